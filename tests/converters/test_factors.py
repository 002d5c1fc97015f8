"""NVFP4 matrices with a factor, which llama.cpp has as a tensor beside them: `blk.0.attn_q.scale`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import all_logits
from golden_models import SOME_GPU
from hf_folders import complaint
from small_models import Small, write_small

from edge.converters.convert import Conversion, convert
from edge.converters.gguf.ggml import quantize_file
from edge.converters.gguf.quantize import Settings
from edge.formats.blocks import dequantize
from edge.formats.gguf import TensorInfo, read_gguf
from edge.formats.gguf_writer import Planned, fields_of, planned_as, write_gguf
from edge.model.model import Model, open_model
from edge.types import AnyArray

SHAPE = Small(layers=2, hidden=128, heads=8, kv_heads=4, ffn=128, vocab=275, tied=False,
              types={"": "NVFP4", "token_embd": "F16"})  # fmt: skip
TOKENS = np.arange(3, 40, dtype=np.int32)


def with_factors(path: Path, count: int = 1) -> tuple[Model, Model]:
    """A model whose matrices have factors, and the same in F32 whose matrices are multiplied by them."""
    file = read_gguf(write_small(path / "plain.gguf", SHAPE))
    names = [name for name, info in file.tensors.items() if info.type == "NVFP4"]
    factors = {name: np.full(count, 0.001 * (index + 200), np.float32) for index, name in enumerate(names)}
    others = {f"{name.removesuffix('weight')}{part}": values for name, values in factors.items()
              for part in ("scale", "input_scale")}  # fmt: skip
    planned = planned_as(file.tensors.values()) + [Planned(name, (count,), "F32") for name in others]
    data = [*map(file.tensor_bytes, file.tensors.values()), *(each.view(np.uint8) for each in others.values())]
    write_gguf(path / "factors.gguf", fields_of(file), planned, data)

    def multiplied(info: TensorInfo) -> AnyArray:
        values = dequantize(file.tensor_bytes(info).reshape(info.rows, -1), info.type)
        return (values * factors[info.name][0]).view(np.uint8) if info.name in factors else file.tensor_bytes(info)

    plain = planned_as(file.tensors.values())
    kinds = [replace(each, type="F32") if each.name in factors else each for each in plain]
    write_gguf(path / "floats.gguf", fields_of(file), kinds, map(multiplied, file.tensors.values()))
    return open_model(path / "factors.gguf"), open_model(path / "floats.gguf")


def test_factors_multiply_in_reference_and_conversions(tmp_path: Path) -> None:
    model, floats = with_factors(tmp_path)
    expected = all_logits(floats, TOKENS)
    np.testing.assert_allclose(all_logits(model, TOKENS), expected, rtol=0, atol=1e-4)
    for name, settings, most in (("copy", None, 1e-4), ("floats", Settings("F16", "rtn"), 0.05)):
        convert(model.file.path, tmp_path / f"{name}-made.gguf", Conversion("gguf", settings=settings))
        made = open_model(tmp_path / f"{name}-made.gguf")
        assert {info.type for info in made.file.tensors.values()} >= {"F16" if settings else "NVFP4"}
        np.testing.assert_allclose(all_logits(made, TOKENS), expected, rtol=0, atol=most)
    said = complaint(lambda: quantize_file(model.file, tmp_path / "q.gguf", "Q8_0"))
    assert "its NVFP4 matrices have factors: use edge convert --type q8_0" in said


def test_factors_of_parts_are_unknown(tmp_path: Path) -> None:
    model, _ = with_factors(tmp_path, count=2)
    assert "do not know the tensor blk.0.attn_" in complaint(lambda: all_logits(model, TOKENS))


@pytest.mark.parametrize(
    "backend", ["onnx", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("cpu", "gpu"))]
)
def test_factors_on_engines(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_GPU", SOME_GPU)
    model, floats = with_factors(tmp_path)
    ours, expected = all_logits(model, TOKENS, backend), all_logits(floats, TOKENS)
    assert np.corrcoef(ours.ravel(), expected.ravel())[0, 1] > 0.999

"""What methods do to a model's weights on their way into ONNX, in ONNX Runtime and against the oracle."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import all_logits
from small_models import Small, write_small

from edge.backends.onnx.graph.check import check_weights
from edge.backends.onnx.graph.layout import make_layout
from edge.backends.onnx.graph.weights import write_weights
from edge.converters.calibrate import Statistics, collect
from edge.converters.onnx.methods import METHODS, NEED_STATISTICS, find_method, planning_method
from edge.converters.onnx.writer import planned_files, rounded_types, write_onnx
from edge.converters.quantizers.smoothquant import factors_of
from edge.errors import InputError, ModelFormatError
from edge.formats import nf4
from edge.formats.onnx_folder import WEIGHTS
from edge.model.model import Model, open_model
from edge.types import AnyArray

onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
WIDE: dict[str, Any] = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head": 32, "ffn": 256}
LOUD, FACTOR = (3, 50, 90), 80.0  # channels of the norms that are outliers, and how loud they are
TOKENS = np.random.default_rng(1).integers(3, 270, 40).astype(np.int32)


def add_outliers(weights: dict[str, AnyArray]) -> None:
    """A few inputs of matrices become loud, and their columns quiet: the model stays what it was."""
    loud = list(LOUD)
    for name in list(weights):
        if name.endswith(("attn_norm", "ffn_norm")):
            weights[name][loud] *= FACTOR
            if (bias := weights.get(f"{name}.bias")) is not None:
                bias[loud] *= FACTOR
        elif name.endswith(("attn_q", "attn_k", "attn_v", "attn_qkv", "ffn_gate", "ffn_up")):
            weights[name][:, loud] /= FACTOR


def small_model(path: Path, architecture: str = "llama", types: str = "F32") -> Model:
    return open_model(
        write_small(path / "small.gguf", Small(architecture=architecture, types=types, **WIDE), add_outliers)
    )


@lru_cache
def statistics_of(model: Model) -> dict[str, Statistics]:
    return collect(model.file, model.spec, np.random.default_rng(2).integers(3, 270, 256).astype(np.int32))


def error_of(model: Model, name: str | None, folder: Path) -> float:
    """Mean error of logits, relative to their standard deviation."""
    method = find_method(name, model.file, model.spec, statistics_of(model))
    write_onnx(model.file, model.spec, folder, method=method)
    ours = all_logits(open_model(folder), TOKENS, "onnx")
    exact = all_logits(model, TOKENS)
    return float(np.abs(ours - exact).mean() / exact.std())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_outliers_spoil_plain_int8_only(architecture: str, tmp_path: Path) -> None:
    model = small_model(tmp_path, architecture)
    names = ("w8a8", "smoothquant", "llm-int8", None)
    plain, smoothed, split, exact = (error_of(model, name, tmp_path / str(name)) for name in names)
    assert plain > 0.15
    assert smoothed < plain / 3
    assert split < plain / 3
    assert exact < 1e-4
    unused = factors_of(np.array([0, 4, 4]), np.array([2, 0, 1]), 0.5)  # channels without inputs, or weights
    np.testing.assert_array_equal(unused, [1, 1, 2])


def test_nf4_values_equal_the_table(tmp_path: Path) -> None:
    """ONNX Runtime multiplies by the very weights that `nf4` rounds to: with these as floats, logits are the same."""

    def round_them(weights: dict[str, AnyArray]) -> None:
        for name, weight in weights.items():
            if weight.ndim == 2 and name.startswith("blk."):
                weights[name] = nf4.dequantize(*nf4.quantize(weight))

    model = small_model(tmp_path)
    write_onnx(model.file, model.spec, tmp_path / "nf4", method=find_method("nf4", model.file, model.spec))
    ours = all_logits(open_model(tmp_path / "nf4"), TOKENS, "onnx")

    def both(weights: dict[str, AnyArray]) -> None:
        add_outliers(weights)
        round_them(weights)

    rounded = open_model(write_small(tmp_path / "rounded.gguf", Small(**WIDE), both))
    expected = all_logits(rounded, TOKENS)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3)


PLAIN = [(None, types) for types in ("F32", "F16", "Q4_0", "Q5_1", "Q8_0")]


@pytest.mark.parametrize(("name", "types"), [*PLAIN, *((name, "F32") for name in METHODS)])
def test_sizes_are_predicted_and_floats_unchanged(name: str | None, types: str, tmp_path: Path) -> None:
    model = small_model(tmp_path, types=types)
    method = find_method(name, model.file, model.spec, statistics_of(model))
    planned = planned_files(model.file, model.spec, planning_method(name, model.file, model.spec))
    written = write_onnx(model.file, model.spec, tmp_path / "model", method=method)
    assert set(planned) == set(written)
    assert planned[WEIGHTS] == (None if name == "llm-int8" else written[WEIGHTS])
    assert rounded_types(model.file, model.spec, method) == ([types] if name or types in ("Q4_1", "Q5_1") else [])
    exact = all_logits(model, TOKENS)
    folder = open_model(tmp_path / "model")
    assert folder.spec.weight_type == {None: types, "nf4": "NF4"}.get(name, "INT8")
    ours = all_logits(folder, TOKENS, "onnx")
    if name is None and types in ("F32", "F16", "BF16"):
        np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-3)
    assert np.corrcoef(ours.ravel(), exact.ravel())[0, 1] > 0.6  # outliers spoil some: see above


def test_methods_name_their_requirements(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    with pytest.raises(InputError, match="unknown method 'gptq' for ONNX: choose nf4"):
        find_method("gptq", model.file, model.spec)
    for name in NEED_STATISTICS:
        with pytest.raises(InputError, match=f"{name} needs a calibration text"):
            find_method(name, model.file, model.spec)


@pytest.mark.parametrize("name", [None, *METHODS])
def test_weight_that_was_written_wrongly_is_found(name: str | None, tmp_path: Path) -> None:
    model = small_model(tmp_path, types="Q4_1" if name is None else "F32")
    layout = make_layout(model.file, model.spec, find_method(name, model.file, model.spec, statistics_of(model)))
    write_weights(model.file, layout, tmp_path / "data")
    check_weights(model.file, layout, tmp_path / "data")
    matrix = next(place for key, place in layout.places.items() if key.startswith("blk.1.ffn_down."))
    data = bytearray((tmp_path / "data").read_bytes())
    data[matrix.offset : matrix.offset + 256] = bytes(256)
    (tmp_path / "data").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"do not read back as the model's \(blk.1.ffn_down\)"):
        check_weights(model.file, layout, tmp_path / "data")

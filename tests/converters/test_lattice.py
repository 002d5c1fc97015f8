"""Weights of quantization-aware training: conversions keep their codes, whatever their steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as ggufs_values
from gguf.quants import quantize as ggufs
from small_models import Small, write_small
from test_cli import edge_here as edge

from edge.converters.gguf.ggml import quantize_file
from edge.converters.gguf.quantize import METHODS, Settings, quantize_gguf
from edge.converters.quantizers.lattice import is_trained
from edge.converters.quantizers.rtn import quantize
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.model.model import open_model
from edge.model.structure.layers import TABLE
from edge.types import FloatArray

TOKENS = np.random.default_rng(1).integers(3, 272, 2048).astype(np.int32)


def bf16(values: FloatArray) -> FloatArray:
    """The nearest bf16 values, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def trained(shape: tuple[int, int], seed: int, low: int = -7, high: int = 7, share: int = 32) -> FloatArray:
    """Weights as training leaves them: codes of `low` to `high`, a step for every `share` columns, stored in bf16."""
    random = np.random.default_rng(seed)
    codes = np.rint(np.clip(random.normal(0, high / 2, shape), low, high)).astype(np.float32)
    steps = bf16(random.uniform(0.001, 0.004, (shape[0], shape[1] // share)).astype(np.float32))
    return bf16(codes * np.repeat(steps, share, axis=1))


def rounded_by(weight: FloatArray, kind: str = "Q4_0") -> FloatArray:
    return dequantize(quantize(weight, kind), kind)


def error(found: FloatArray, weight: FloatArray) -> float:
    return float(np.sqrt(np.square(found - weight).sum() / np.square(weight).sum()))


@pytest.mark.parametrize(("low", "high"), [(-8, 7), (-7, 7), (-4, 3), (-1, 1)])
@pytest.mark.parametrize("share", [32, 128])
def test_codes_of_any_step_come_back(low: int, high: int, share: int) -> None:
    weight = trained((64, 512), 2, low, high, share)
    assert is_trained(weight)
    found = rounded_by(weight)
    assert np.allclose(found, weight, rtol=1.5 * 2**-8, atol=0)
    assert np.array_equal(rounded_by(found), found)  # steps are exact now
    raw = ggufs(weight, GGMLQuantizationType.Q4_0)
    naive = ggufs_values(raw, GGMLQuantizationType.Q4_0)
    assert error(found, weight) < 0.003
    if low > -8:
        assert error(naive, weight) > 0.015 or high == 1  # of two values and 0, −8 · step is exact


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def train(weights: dict[str, FloatArray]) -> None:
        for seed, (name, weight) in enumerate(weights.items()):
            if name.startswith("blk.") and weight.ndim == 2:
                weights[name] = trained(weight.shape, seed)

    return write_small(tmp_path_factory.mktemp("trained") / "model.gguf", Small(layers=2), train)


def matrices(file: GGUFFile) -> dict[str, FloatArray]:
    return {
        name: dequantize(file.tensor_bytes(info).reshape(info.shape[1], -1), info.type)
        for name, info in file.tensors.items()
        if (name.startswith("blk.") or name == f"{TABLE}.weight") and len(info.shape) == 2
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_trained_codes(method: str, path: Path, tmp_path: Path) -> None:
    model = open_model(path)
    report = quantize_gguf(model.file, model.spec, tmp_path / "q.gguf", Settings(method=method), TOKENS)
    found = open_model(tmp_path / "q.gguf").file
    for name, weight in matrices(model.file).items():
        assert error(matrices(found)[name], weight) < 0.003, name
    assert "Q4_0 keeps them as they are" in report.notes[-1]


def test_quantize_keeps_types_and_notes_others(path: Path, tmp_path: Path) -> None:
    model = open_model(path)
    quantize_file(model.file, tmp_path / "q.gguf", "Q4_0")
    found = matrices(open_model(tmp_path / "q.gguf").file)
    assert all(error(found[name], weight) < 0.003 for name, weight in matrices(model.file).items())
    done = edge("quantize", str(path), str(tmp_path / "other.gguf"), "q5_0", "--no-eval")
    assert done.returncode == 0, done.stderr
    assert "would keep them as they are" in done.stderr.replace("\n", " ")

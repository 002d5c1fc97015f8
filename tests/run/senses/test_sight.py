"""Towers on our engines, against transformers (tests/golden/towers.py)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from conftest import GOLDEN, engine_here, exhaustive

from edge.backends import engine_named
from edge.formats.gguf import read_gguf
from edge.model.towers import Tower, read_tower
from edge.run.senses.sight import Encoder
from edge.types import AnyArray

TOWERS = GOLDEN / "towers"
OFTEN = "qwen3vl"  # by the native engine, in make test
OFTEN_GPU = ("smolvlm", "gemma4")  # several tiles and LayerNorm; positions apart, bounds of matrices
NAMES = ("smolvlm", "gemma3", "qwen3vl", "gemma4", "lfm2", "qwen25vl")


@lru_cache
def open_golden_tower(name: str) -> tuple[Tower, dict[str, AnyArray]]:
    with np.load(TOWERS / f"{name}.npz") as arrays:
        return read_tower(read_gguf(TOWERS / f"{name}.gguf")), dict(arrays)


@pytest.mark.parametrize("name", NAMES)
def test_pixels_and_prompt_are_those_of_transformers(name: str) -> None:
    tower, golden = open_golden_tower(name)
    height, width, _ = golden["picture"].shape
    layout = tower.layout(width, height)
    tiles = list(tower.tiles(golden["picture"], layout))
    mean, std = (np.array(each) for each in (tower.mmproj.mean, tower.mmproj.std))
    levels = np.concatenate([((tile * std + mean) * 255).reshape(-1) for tile in tiles])[::7]
    off = np.abs(levels - golden["pixels"]) > 1e-3
    assert off.mean() <= (0.01 if name == "lfm2" else 0)  # whose processor resizes by torchvision
    np.testing.assert_allclose(levels[off], golden["pixels"][off], atol=1.001)
    said = "".join(part if isinstance(part, str) else "<image>" * part for part in layout.parts)
    assert said == str(golden["prompt"])


@pytest.mark.parametrize(("backend", "name"), [
    *((backend, name) for backend in ("reference", "onnx@cpu") for name in NAMES),
    *(
        pytest.param(backend, name, marks=() if name in often else pytest.mark.exhaustive)
        for backend, often in (("cpu", (OFTEN,)), ("onnx@cpu-static", (OFTEN,)), ("gpu", OFTEN_GPU)) for name in NAMES
    ),
    pytest.param("onnx@qnn", OFTEN, marks=pytest.mark.wing("QNN's emulator")), exhaustive("onnx@qnn", "gemma4"),
])  # fmt: skip
def test_rows_are_those_of_transformers(backend: str, name: str) -> None:
    tower, golden = open_golden_tower(name)
    height, width, _ = golden["picture"].shape
    engine, _, provider = backend.partition("@")
    if provider == "qnn":
        pytest.importorskip("onnxruntime_qnn")
    with engine_here(engine):
        encoder = Encoder(tower, engine_named(engine), 1, "f32", provider=provider or "cpu")
        layout = tower.layout(width, height)
        rows = np.concatenate(encoder.encode(golden["picture"], layout))
    near = 5e-3 if provider == "qnn" else 1e-3 if name == "lfm2" else 2e-4  # QNN computes in float16
    np.testing.assert_allclose(rows, golden["rows"], atol=near * np.abs(golden["rows"]).max())

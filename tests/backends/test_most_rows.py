"""Rows beyond which llama.cpp's answers would be another model's: planned down, or refused where they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import GOLDEN, Engines, load_engine
from small_models import Small, write_small

from edge.backends import find_backend
from edge.errors import InputError, UnsupportedError
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import make_plan

WINDOW, LONGROPE = "llama-window", "phi3-longrope"  # a window of 20 positions; 256 positions before scaling
ROWS = 24  # of a cache in which the window would matter


def opened(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


def planned(model: Model, backend: str = "llamacpp", **options: object) -> int:
    module = find_backend(backend, model.file, model.spec)
    return make_plan(model.spec, module, Options(**options)).config.capacity  # type: ignore[arg-type]


def test_rows_end_with_a_window_that_llama_cpp_ignores() -> None:
    model = opened(WINDOW)
    assert planned(model) == planned(model, expected_tokens=100) == planned(model, max_kv_size=20) == 20
    assert planned(model, "reference") > ROWS
    with pytest.raises(InputError, match=r"--max-kv-size .* 20, not 24 \(llama.cpp ignores .* of 20 .*--backend cpu"):
        planned(model, max_kv_size=ROWS)
    assert planned(model, kv_memory="1MiB") <= 20


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "phi3", "qwen2", "llama"])
def test_plan_and_engine_agree_whose_windows_llama_cpp_knows(
    architecture: str, tmp_path: Path, engines: Engines
) -> None:
    model = open_model(write_small(tmp_path / "model.gguf", Small(layers=6, window=20, architecture=architecture)))
    knows = architecture.startswith("gemma")
    assert (planned(model) > ROWS) is knows
    if knows:
        engines(load_engine(model, "llamacpp", "f16", capacity=ROWS))
    else:
        with pytest.raises(UnsupportedError, match="sliding window of 20"):
            load_engine(model, "llamacpp", "f16", capacity=ROWS)


def test_llama_cpp_uses_short_longrope_factors_for_short_runs() -> None:
    model = opened(LONGROPE)
    assert planned(model) == planned(model, expected_tokens=256) == 256
    assert planned(model, expected_tokens=257) == planned(model, expected_tokens=257, max_kv_size=512) == 512
    assert planned(model, "reference", max_kv_size=512) == 512
    with pytest.raises(InputError, match=r"not 512 \(in a larger cache, llama.cpp rotates texts of up to 256 tokens"):
        planned(model, max_kv_size=512)

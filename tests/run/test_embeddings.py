"""Embeddings: hidden states of models that write and of encoders, against transformers (tests/golden/encoders.py), and
what is pooled of them."""

from __future__ import annotations

import json
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from conftest import CAPACITY, GOLDEN, exhaustive, load_engine, open_golden
from test_cli import edge_here as edge

from edge.errors import InputError, UnsupportedError
from edge.model.model import Model, open_model
from edge.model.parts.places import Places
from edge.run.conversation import Conversation
from edge.run.starting.loading import load
from edge.types import AnyArray, IntArray

MODEL = open_golden("llama-gqa-tied").model
ENCODERS = GOLDEN / "encoders"
CONTEXT = 96
SKY = "The sky is blue."


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_pooled_vectors_match_states(backend: str) -> None:
    """The reference engine's head turns its states into transformers' logits."""
    golden, text = open_golden("llama-gqa-tied"), "Hello, world"
    tokens = golden.tokens[:40]
    with load(MODEL, backend="reference", max_kv_size=128) as session:
        states = session.engine.hidden(golden.tokens)  # type: ignore[attr-defined]
        logits = session.engine.logits(states)  # type: ignore[attr-defined]
        np.testing.assert_allclose(logits[-len(golden.logits) :], golden.logits, atol=2e-3)
    mean, last = states[:40].mean(axis=0), states[39]
    with load(MODEL, backend=backend, max_kv_size=128, prefill_step_size=16) as session:
        for count in (40, 1):  # chunks, and a pass of a single token
            found = session.engine.hidden(tokens[:count])  # type: ignore[attr-defined]
            np.testing.assert_allclose(found, states[:count], atol=8e-2)
            session.reset()
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
        assert np.array_equal(session.embed(text), session.embed(session.model.encode_text(text)))


def test_long_texts_stream_and_empty_are_refused() -> None:
    tokens = open_golden("llama-gqa-tied").tokens
    with load(MODEL, backend="reference", max_kv_size=CAPACITY, prefill_step_size=8) as session:
        assert np.linalg.norm(session.embed(tokens)) == pytest.approx(1, abs=1e-5)
        for text in ("", np.zeros(0, np.int32)):
            with pytest.raises(InputError, match="empty"):
                session.embed(text)
        with pytest.raises(InputError, match="one of mean, cls, last"):
            session.embed("x", pooling="first")  # type: ignore[arg-type]
    with (
        load(MODEL, backend="reference", kv_policy="full", max_kv_size=CAPACITY) as session,
        pytest.raises(InputError, match="64 tokens"),
    ):
        session.embed(tokens)


def test_embed_on_command_line(tmp_path: Path) -> None:
    command = ("embed", str(MODEL.path), "--backend", "reference")
    done = edge(*command, "-q", "--pooling", "last", stdin="one\n\ntwo\n")
    one, two = map(json.loads, done.stdout.splitlines())
    (tmp_path / "lines").write_text("two\n")
    both = edge(*command, "-q", "--pooling", "last", "one", "-f", str(tmp_path / "lines"))
    assert both.stdout == done.stdout
    with load(MODEL, backend="reference", max_kv_size=64) as session:
        assert one == pytest.approx(session.embed("one", pooling="last").tolist(), abs=1e-5)
        assert two == pytest.approx(session.embed("two", pooling="last").tolist(), abs=1e-5)
    done = edge(*command, "--max-kv-size", "64", "one " * 90, " ")
    assert "(1 of the texts had more than 64 tokens: streaming evicted rows)" in done.stderr
    assert "(1 vector of 64 numbers; 1 blank text left out)" in done.stderr


# Encoders


@lru_cache
def open_encoder(name: str) -> tuple[Model, dict[str, AnyArray]]:
    with np.load(ENCODERS / f"{name}.npz") as arrays:
        return open_model(ENCODERS / f"{name}.gguf"), dict(arrays)


def texts_of(arrays: dict[str, AnyArray]) -> list[IntArray]:
    return np.split(arrays["ids"], np.cumsum(arrays["sizes"])[:-1])


@pytest.mark.parametrize(("backend", "name"), [
    *(("reference", name) for name in ("bert", "bert-cased", "nomic-bert")), ("cpu", "bert"),
    exhaustive("cpu", "bert-cased"), exhaustive("cpu", "nomic-bert"),
])  # fmt: skip
def test_states_and_vectors_match_transformers(backend: str, name: str) -> None:
    model, golden = open_encoder(name)
    with closing(load_engine(model, backend, "f32", capacity=CONTEXT, chunk=CONTEXT)) as engine:
        for text, mean, cls in zip(texts_of(golden), golden["mean"], golden["cls"], strict=True):
            states = engine.hidden(text)  # type: ignore[attr-defined]
            np.testing.assert_allclose(states.mean(axis=0), mean, atol=1e-4)
            np.testing.assert_allclose(states[0], cls, atol=1e-4)
        np.testing.assert_allclose(states, golden["states"], atol=1e-4)  # of the last text
        texts = texts_of(golden)[:3]  # side by side in one pass
        sizes = [text.size for text in texts]
        states = engine.hidden(np.concatenate(texts), Places.of_texts(sizes))  # type: ignore[attr-defined]
        means = [each.mean(axis=0) for each in np.split(states, np.cumsum(sizes)[:-1])]
        np.testing.assert_allclose(means, golden["mean"][:3], atol=1e-4)
        with pytest.raises(UnsupportedError, match="answers no prompts: edge embed"):
            engine.forward(text)


def test_text_is_run_whole_or_refused() -> None:
    model, _ = open_encoder("bert")
    with load(model, backend="reference") as session:
        assert session.plan.kv_policy == "full"
        assert session.plan.config.chunk == session.plan.config.capacity == CONTEXT
        long = " ".join(["sky"] * 200)
        tokens = session.model.encode_text(long)
        with pytest.raises(InputError, match=f"{tokens.size} tokens, but this encoder sees {CONTEXT}: .*truncate"):
            session.embed(long)
        cut = np.append(tokens[: CONTEXT - 1], tokens[-1:])
        assert np.array_equal(session.embed(long, truncate=True), session.embed(cut))
        one = session.embed(tokens[:1])  # a pass of one token
        assert one.shape == (model.spec.hidden,)
        assert session.engine.kv.length == 0
        with pytest.raises(InputError, match="empty"):
            session.embed("")


def test_encoders_refuse_generation() -> None:
    model, _ = open_encoder("bert")
    with load(model, backend="reference", max_kv_size=64) as session:
        assert session.plan.config.chunk == 64
        for ask in (
            lambda: session.generate("Hello"),
            lambda: session.generate(messages=[{"role": "user", "content": "Hello"}]),
            lambda: session.generate(np.array([5, 6], np.int32)),
            lambda: session.score(np.array([5, 6], np.int32)),
            lambda: Conversation(session),
        ):
            with pytest.raises(UnsupportedError, match="is an encoder, which answers no prompts: edge embed"):
                ask()
    for options, message in (
        ({"prefill_step_size": 16}, "an encoder runs whole texts"),
        ({"kv_policy": "h2o"}, "an encoder sees whole texts|shows attention"),
        ({"backend": "llamacpp"}, "llamacpp engine does not run encoders yet: use .*backend"),
        ({"backend": "onnx"}, "onnx engine does not run encoders yet: use .*backend"),
    ):  # type: tuple[dict[str, Any], str]
        with pytest.raises((InputError, UnsupportedError), match=message):
            load(model, **({"backend": "reference"} | options))


def test_encoder_on_command_line() -> None:
    model, golden = open_encoder("bert")
    options = ("--backend", "reference", "-q")
    done = edge("embed", str(model.path), SKY, "--unscaled", *options)
    assert json.loads(done.stdout) == pytest.approx(golden["mean"][0].tolist(), abs=1e-4)
    planned = edge("plan", str(model.path), "--device", "raspberry-pi-5").stdout
    assert [each in planned for each in (f"{CONTEXT} rows", "a text of", "a token at")] == [True, True, False]
    for command in (("run", str(model.path), SKY), ("chat", str(model.path))):
        done = edge(*command, *options)
        assert done.returncode == 2
        assert done.stderr == "edge: bert is an encoder, which answers no prompts: edge embed makes vectors with it\n"

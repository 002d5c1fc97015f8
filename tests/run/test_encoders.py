"""Encoders on our engines, against transformers' embeddings and llama.cpp's (tests/golden/encoders.py)."""

from __future__ import annotations

import json
from functools import lru_cache

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from serving import error_of, served
from test_architectures import require_native
from test_cli import edge_here as edge

from edge.errors import InputError, UnsupportedError
from edge.model.model import Model, open_model
from edge.model.parts.places import Places
from edge.run.conversation import Conversation
from edge.run.starting.loading import load
from edge.types import AnyArray, IntArray

ENCODERS = GOLDEN / "encoders"
NAMES = ("bert", "bert-cased", "nomic-bert")
CONTEXT = 96
SKY = "The sky is blue."
EXHAUSTIVE = pytest.mark.exhaustive


@lru_cache
def open_encoder(name: str) -> tuple[Model, dict[str, AnyArray]]:
    with np.load(ENCODERS / f"{name}.npz") as arrays:
        return open_model(ENCODERS / f"{name}.gguf"), dict(arrays)


def texts_of(arrays: dict[str, AnyArray]) -> list[IntArray]:
    return np.split(arrays["ids"], np.cumsum(arrays["sizes"])[:-1])


@pytest.mark.parametrize(("backend", "name"), [
    *(("reference", name) for name in NAMES), ("cpu", NAMES[0]),
    *(pytest.param("cpu", name, marks=EXHAUSTIVE) for name in NAMES[1:3]),
])  # fmt: skip
def test_states_and_vectors_match_transformers(backend: str, name: str) -> None:
    if backend == "cpu":
        require_native()
    model, golden = open_encoder(name)
    engine = load_engine(model, backend, "f32", capacity=CONTEXT, chunk=CONTEXT)
    try:
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
    finally:
        engine.close()


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=EXHAUSTIVE)])
def test_text_is_run_whole_or_refused(backend: str) -> None:
    if backend == "cpu":
        require_native()
    model, _ = open_encoder("bert")
    with load(model, backend=backend) as session:
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


def test_embeddings_endpoint_matches_transformers() -> None:
    _, golden = open_encoder("bert")
    with served("encoders/bert", options={"max_kv_size": CONTEXT}) as client:
        response = client.post("/v1/embeddings", json={"input": [SKY, golden["ids"][: golden["sizes"][0]].tolist()]})
        assert response.status_code == 400  # texts or tokens, not both
        found = client.post("/v1/embeddings", json={"input": [SKY]}).json()
        expected = golden["mean"][0] / np.linalg.norm(golden["mean"][0])
        assert found["data"][0]["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)
        assert found["usage"]["prompt_tokens"] == golden["sizes"][0]
        found = client.post("/v1/embeddings", json={"input": "sky " * 200, "truncate": True}).json()
        assert found["usage"]["prompt_tokens"] == CONTEXT
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
            ("completions", {"prompt": "Hello"}),
            ("embeddings", {"input": "sky " * 200}),
        ):  # type: tuple[str, dict[str, Any]]
            response = client.post(f"/v1/{path}", json=body)
            assert response.status_code == 400
            assert "encoder" in error_of(response)["message"]

"""Several requests at once, on an engine with several sequences."""

from __future__ import annotations

import base64
import threading
from typing import Any

import numpy as np
import pytest
from conftest import open_golden
from serving import MODEL, chat, client_of, served
from starlette.testclient import TestClient

from edge.run.starting.loading import load
from edge.server.protocols.embeddings import MOST_TEXTS

pytest.importorskip("tvm")
SEVERAL: dict[str, Any] = {"backend": "cpu", "max_kv_size": 256, "threads": 1, "sequences": 3}

client = client_of(options=SEVERAL)


def ask_together(client: TestClient, texts: list[str], **fields: Any) -> list[str]:
    """The answers to several questions that are asked at the same time."""
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        message = chat(client, [{"role": "user", "content": text}], **fields)["choices"][0]["message"]
        found[text] = message["content"]

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[text] for text in texts]


def test_requests_together_have_answers_that_they_have_alone(client: TestClient) -> None:
    texts = [f"Question {number} of five" for number in range(5)]
    together = ask_together(client, texts, max_tokens=20)
    with served(options={**SEVERAL, "sequences": 1}) as alone:
        assert [chat(alone, [{"role": "user", "content": text}], max_tokens=20)["choices"][0]["message"]["content"]
                for text in texts] == together  # fmt: skip
    assert client.get("/props").json()["total_slots"] == 3


def test_embeddings_match_session(client: TestClient) -> None:
    texts = ["Rivers and seas", "Stones"]
    with load(open_golden(MODEL).model, **SEVERAL) as session:
        expected = [session.embed(text) for text in texts]
        tokens = session.model.encode_text(texts[0]).tolist()
    found = client.post("/v1/embeddings", json={"input": texts}).json()
    for each, wanted in zip(found["data"], expected, strict=True):
        np.testing.assert_allclose(each["embedding"], wanted, atol=1e-6)
    coded = client.post("/v1/embeddings", json={"input": tokens, "encoding_format": "base64"}).json()
    values = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), np.float32)
    np.testing.assert_allclose(values, expected[0], atol=1e-6)
    assert coded["usage"]["prompt_tokens"] == len(tokens)
    short = client.post("/v1/embeddings", json={"input": texts, "dimensions": 7}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(short, expected[0][:7] / np.linalg.norm(expected[0][:7]), atol=1e-6)
    many = client.post("/v1/embeddings", json={"input": [*["sea"] * (MOST_TEXTS - 1), texts[1]]}).json()["data"]
    assert [each["index"] for each in many] == list(range(MOST_TEXTS))
    np.testing.assert_allclose(many[-1]["embedding"], expected[1], atol=1e-6)
    for body in (
        {"input": ["sea"] * (MOST_TEXTS + 1)}, {}, {"input": []}, {"input": [""]}, {"input": "x", "dimensions": 7000},
        {"input": [1 << 20]},
    ):  # fmt: skip
        assert client.post("/v1/embeddings", json=body).status_code == 400


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("share", [False, True])
def test_keys_share_rows_only_if_asked(sequences: int, share: bool) -> None:
    keys = ["first-key-123", "second-key-45"]
    with served(options={**SEVERAL, "sequences": sequences}, api_key=keys, share_prompts=share) as client:
        body = {"messages": [{"role": "user", "content": "The secret plan, which is long enough"}], "max_tokens": 2}

        def reused(key: str) -> int:
            found = client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}).json()
            return found["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert reused(keys[0]) == 0
        assert reused(keys[0]) > 10
        assert (reused(keys[1]) > 10) == share

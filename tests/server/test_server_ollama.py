"""Ollama's endpoints about models, as the `ollama` command and its libraries use them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import MODEL, OTHER, PLAIN, hub_of, served
from thinking_models import SPECIALS, write_script

ENCODER = "encoders/bert"
ANSWERED = {"/api/generate": "response", "/api/chat": "message"}


def test_models_are_listed_with_digests_and_capabilities(tmp_path: Path) -> None:
    write_script(tmp_path / "thinker.gguf", SPECIALS["qwen"], 8, [2])
    with served(MODEL, OTHER, str(tmp_path / "thinker"), ENCODER) as client:
        listed = client.get("/api/tags").json()["models"]
        assert [each["name"] for each in listed] == [MODEL, OTHER, "thinker", "bert"]
        digests = {each["digest"] for each in listed}
        assert len(digests) == len(listed)
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in digests)
        capabilities = [client.post("/api/show", json={"name": each["name"]}).json()["capabilities"] for each in listed]
    assert capabilities == [["completion", "tools"]] * 2 + [["completion", "tools", "thinking"], ["embedding"]]


@pytest.mark.parametrize(("path", "stream"), [("/api/generate", None), ("/api/chat", False)])
def test_empty_requests_load_and_unload_a_model(path: str, stream: bool | None) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        empty = {"messages": []} if path == "/api/chat" else {}
        response = client.post(path, json={"model": MODEL, "stream": stream, **empty, **fields})
        assert response.status_code == 200
        assert response.text.count("\n") == 0
        found: dict[str, Any] = response.json()
        assert found["done"]
        assert ANSWERED[path] in found
        return found

    with served() as client:
        assert client.get("/api/ps").json() == {"models": []}
        assert ask()["done_reason"] == "load"
        [loaded] = client.get("/api/ps").json()["models"]
        assert loaded["name"] == MODEL
        assert loaded["size"] > loaded["size_vram"] == 0
        assert loaded["context_length"] == 400
        for keep in (0, "0", "0s"):
            assert ask(keep_alive=keep)["done_reason"] == "unload"
            assert not hub_of(client).pool.workers
            assert ask(keep_alive="1h5.5m")["done_reason"] == "load"


def test_embeddings_of_ollama_are_those_of_openai() -> None:
    with served(options={"kv_policy": "full"}) as client:
        for path in ("/v1/embeddings", "/api/embed"):
            assert client.post(path, json={"input": "sea", "dimensions": 7000}).status_code == 400
        wanted = [
            each["embedding"] for each in client.post("/v1/embeddings", json={"input": ["a", "sea"]}).json()["data"]
        ]
        found = client.post("/api/embed", json={"model": MODEL, "input": ["a", "sea"]}).json()
        np.testing.assert_array_equal(found["embeddings"], wanted)
        assert found["prompt_eval_count"] == 4
        assert client.post("/api/embed", json={"input": []}).json()["embeddings"] == []
        assert client.post("/api/embeddings", json={"prompt": "sea"}).json() == {"embedding": wanted[1]}
        assert client.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}
        long = {"input": "sea " * 200}
        assert client.post("/api/embed", json=long).json()["prompt_eval_count"] == PLAIN["max_kv_size"]
        assert client.post("/api/embed", json={**long, "truncate": False}).status_code == 400


@pytest.mark.parametrize("evict", [True, False])
def test_embedding_evicts_rows_only_where_allowed(evict: bool) -> None:
    with served(evict=evict) as client:
        response = client.post("/v1/embeddings", json={"input": "sea " * 200})
        assert response.status_code == (200 if evict else 400)
        assert ("context_length_exceeded" in response.text) is not evict


@pytest.mark.parametrize(("method", "path", "words"), [
    ("POST", "/api/copy", "copies no models"), ("DELETE", "/api/delete", "deletes no models"),
    ("POST", "/api/create", "makes no models"), ("POST", "/api/push", "uploads no models"),
    ("POST", "/api/pull", "not found"), ("POST", "/api/show", "not found"),
    ("POST", "/api/blobs/sha256:12", "there is no"), ("GET", "/api/chat", "does not work"),
])  # fmt: skip
def test_errors_of_ollama_are_sentences(method: str, path: str, words: str) -> None:
    with served() as client:
        response = client.request(method, path, json={"model": "none"})
        assert 400 <= response.status_code < 500
        assert words in response.json()["error"]
        assert client.post("/api/pull", json={"model": f"{MODEL}:latest"}).json() == {"status": "success"}

"""A server in this process, over tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import GOLDEN
from starlette.testclient import TestClient

from edge.options import Options
from edge.server.app import make_app
from edge.server.hub import Hub
from edge.server.running import make_hub
from edge.server.settings import Settings

MODEL = "llama-gqa-tied"  # its template is ChatML, its tokens are bytes
OTHER = "qwen2"
PLAIN = {"backend": "reference", "max_kv_size": 400, "threads": 1}
HELLO = [{"role": "user", "content": "Hello"}]
PLACE: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip


@contextmanager
def served(*models: str, options: dict[str, Any] | None = None, **settings: Any) -> Iterator[TestClient]:
    """A client of a server of these golden models; `client.hub` has its models. Their tokens are bytes: prompts with
    tools are longer than the rows."""
    paths = [name if name.endswith(".gguf") else str(GOLDEN / f"{name}.gguf") for name in models or (MODEL,)]
    hub = make_hub(paths, Options.parse(**{**PLAIN, **(options or {})}), Settings.parse(**{"evict": True, **settings}))
    with TestClient(make_app(hub), base_url="http://127.0.0.1:8080", raise_server_exceptions=False) as client:
        client.hub = hub  # type: ignore[attr-defined]
        yield client


def client_of(*models: str, **more: Any) -> Any:
    """A fixture: one such client for all tests of a module."""

    @pytest.fixture(scope="module")
    def client() -> Iterator[TestClient]:
        with served(*models, **more) as opened:
            yield opened

    return client


def hub_of(client: TestClient) -> Hub:
    return client.hub  # type: ignore[attr-defined]


def chat(client: TestClient, messages: list[dict[str, Any]] = HELLO, **fields: Any) -> dict[str, Any]:
    """The response to a chat. max_tokens and ignore_eos: short answers of one length, since the model is random."""
    body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(text: str) -> list[Any]:
    """The data of server-sent events; `[DONE]` as text."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def error_of(response: Any) -> dict[str, Any]:
    """The error of a response, which is one line of JSON."""
    assert "\n" not in response.text
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"]
    return found

"""Answers and events of all protocols, whole and streamed, have the fields and types that their APIs require."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import shapes
from serving import HELLO, MODEL, served
from shapes import differences
from starlette.testclient import TestClient

from edge.server.events import Call, Ended, Event, Piece
from edge.server.protocols import responses
from edge.server.protocols.responses import ResponsesBody
from edge.tools.parser import ArgumentPiece, CallBegin, CallEnd

PLACE = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"],
         "additionalProperties": False}  # fmt: skip
FUNCTION = {"name": "weather", "parameters": PLACE}
CALLED = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 100}
PLAIN: dict[str, Any] = {"messages": HELLO, "max_tokens": 6}
NO_TEXT = {"messages": []}

# path, body, shape of the whole answer, and of a part of the streamed one; None: there is none
POSTS: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("/v1/chat/completions", {**PLAIN, "n": 2, "logprobs": True, "top_logprobs": 2}, shapes.CHAT, shapes.CHAT_CHUNK),
    ("/v1/chat/completions", {"messages": HELLO, **CALLED}, shapes.CHAT, shapes.CHAT_CHUNK),
    ("/v1/chat/completions", {**PLAIN, "stream_options": {"include_usage": True}}, shapes.CHAT, shapes.CHAT_CHUNK),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "logprobs": 1}, shapes.COMPLETION, shapes.COMPLETION),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True}, shapes.COMPLETION, shapes.COMPLETION),
    ("/v1/embeddings", {"input": ["a", "b"]}, shapes.EMBEDDINGS, None),
    ("/v1/rerank", {"query": "a", "documents": ["a", "b"], "return_documents": True}, shapes.RERANK, None),
    ("/rerank", {"query": "a", "texts": ["a"]}, [{"index": int, "score": float}], None),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 6}, shapes.RESPONSE, shapes.RESPONSE_EVENT),
    ("/v1/responses", {"input": "Hi", "temperature": 0.5, "metadata": {"a": "b"}, "text": {"verbosity": "low"},
                       "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
     shapes.RESPONSE, shapes.RESPONSE_EVENT),
    ("/v1/messages", PLAIN, shapes.MESSAGE, shapes.MESSAGE_EVENT),
    ("/v1/messages", {**PLAIN, "max_tokens": 100, "tools": [{"name": "weather", "input_schema": PLACE}],
                      "tool_choice": {"type": "any"}}, shapes.MESSAGE, shapes.MESSAGE_EVENT),
    ("/v1/messages/count_tokens", PLAIN, {"input_tokens": int}, None),
    ("/api/chat", PLAIN, shapes.API_CHAT, (shapes.API_CHAT, shapes.API_CHAT_LINE)),
    ("/api/chat", {"messages": HELLO, "tools": CALLED["tools"]}, shapes.API_CHAT, shapes.API_CHAT_LINE),
    ("/api/chat", NO_TEXT, shapes.API_CHAT_LINE, None),
    ("/api/generate", {"prompt": "a"}, shapes.API_GENERATE, (shapes.API_GENERATE, shapes.API_GENERATE_LINE)),
    ("/api/generate", {}, shapes.API_GENERATE_LINE, None),
    ("/api/embed", {"input": ["a", "b"]}, shapes.API_EMBED, None),
    ("/api/embeddings", {"prompt": "a"}, {"embedding": [float]}, None),
    ("/api/show", {"model": MODEL}, shapes.API_SHOW, None),
]  # fmt: skip
GETS = [
    ("/v1/models", {}, shapes.MODELS), ("/v1/models", {"anthropic-version": "2023-06-01"}, shapes.ANTHROPIC_MODELS),
    ("/api/tags", {}, shapes.API_TAGS), ("/api/ps", {}, shapes.API_PS), ("/v1/nothing", {}, shapes.ERROR),
    ("/v1/nothing", {"anthropic-version": "2023-06-01"}, shapes.ANTHROPIC_ERROR),
    ("/api/nothing", {}, shapes.API_ERROR),
]  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as client:
        yield client


@pytest.mark.parametrize(("path", "body", "whole", "part"), POSTS)
def test_answers(client: TestClient, path: str, body: dict[str, Any], whole: Any, part: Any) -> None:
    response = client.post(path, json={**body, "stream": False})
    assert response.status_code == 200, response.text
    assert differences(response.json(), whole) == []
    if part is None:
        return
    lines = client.post(path, json={**body, "stream": True}).text.splitlines()
    parts = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event: ")]
    found = [json.loads(each) for each in parts if each != "[DONE]"]
    assert found
    assert [line for each in found for line in differences(each, part)] == []


@pytest.mark.parametrize(("path", "headers", "shape"), GETS)
def test_lists_and_errors(client: TestClient, path: str, headers: dict[str, str], shape: Any) -> None:
    assert differences(client.get(path, headers=headers).json(), shape) == []


def test_thoughts_in_responses() -> None:
    """A reasoning item has a part, as a message has, which accumulating clients need before its text."""
    call = [CallBegin(0, "call_1", "weather"), ArgumentPiece(0, "{}"), CallEnd(0)]
    events: list[Event] = [
        Piece(0, "Hm", thought=True), Piece(0, "Hi"), *(Call(0, each) for each in call), Ended(0, None),
    ]  # fmt: skip
    writer = responses.Writer("model", ResponsesBody(input="Hi"))
    sent = [chunk.decode() for each in events for chunk in writer.chunks(each)]
    sent += [chunk.decode() for chunk in writer.last()]
    found = [json.loads(each.split("data: ")[1]) for each in sent]
    assert [line for each in found for line in differences(each, shapes.RESPONSE_EVENT)] == []
    names = [each["type"].removeprefix("response.") for each in found]
    thoughts = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
                "content_part.done", "output_item.done"]  # fmt: skip
    assert names[2:8] == thoughts
    assert [each["type"] for each in found[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]
    assert all(each["status"] == "completed" for each in found[-1]["response"]["output"])


def test_differences() -> None:
    shape = {"a": (str, None), "b?": [int], "c": {"x", "y"}}
    assert differences({"a": None, "c": "x", "more": 1}, shape) == []
    wrong = differences({"b": [1, True], "c": "z"}, shape)
    assert [line.split(" ")[0] for line in wrong] == [".a", ".b[1]", ".c"]

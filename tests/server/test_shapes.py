"""Answers and events of all protocols, whole and streamed, have the types of the packages openai, anthropic, ollama."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serving import HELLO, MODEL, PLACE, served

from edge.server.events import Call, Ended, Event, Piece
from edge.server.protocols import responses
from edge.server.protocols.responses import ResponsesBody
from edge.tools.parser import ArgumentPiece, CallBegin, CallEnd

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "clients" / "bin" / "python"
FUNCTION = {"name": "weather", "parameters": PLACE}
CALLED = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 100}
PLAIN: dict[str, Any] = {"messages": HELLO, "max_tokens": 6}
CHAT, COMPLETION = "openai.types.chat.ChatCompletion", "openai.types.Completion"
RESPONSE, EVENT = "openai.types.responses.Response", "openai.types.responses.ResponseStreamEvent"
MESSAGE, MESSAGE_EVENT = "anthropic.types.Message", "anthropic.types.RawMessageStreamEvent"
ANTHROPIC = {"anthropic-version": "2023-06-01"}
# path, body, type of the whole answer, and of a part of the streamed one; None: the package has none
POSTS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("/v1/chat/completions", {**PLAIN, "n": 2, "logprobs": True, "top_logprobs": 2}, CHAT, f"{CHAT}Chunk"),
    ("/v1/chat/completions", {"messages": HELLO, **CALLED}, CHAT, f"{CHAT}Chunk"),
    ("/v1/chat/completions", {**PLAIN, "stream_options": {"include_usage": True}}, CHAT, f"{CHAT}Chunk"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 4, "logprobs": 1}, COMPLETION, None),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True}, COMPLETION, COMPLETION),
    ("/v1/embeddings", {"input": ["a", "b"]}, "openai.types.CreateEmbeddingResponse", None),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 6}, RESPONSE, EVENT),
    ("/v1/responses", {"input": "Hi", "temperature": 0.5, "metadata": {"a": "b"}, "text": {"verbosity": "low"},
                       "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}, RESPONSE, EVENT),
    ("/v1/messages", PLAIN, MESSAGE, MESSAGE_EVENT),
    ("/v1/messages", {**PLAIN, "max_tokens": 100, "tools": [{"name": "weather", "input_schema": PLACE}],
                      "tool_choice": {"type": "any"}}, MESSAGE, MESSAGE_EVENT),
    ("/v1/messages/count_tokens", PLAIN, "anthropic.types.MessageTokensCount", None),
    ("/api/chat", PLAIN, "ollama.ChatResponse", "ollama.ChatResponse"),
    ("/api/chat", {"messages": HELLO, "tools": CALLED["tools"]}, "ollama.ChatResponse", "ollama.ChatResponse"),
    ("/api/chat", {"messages": []}, "ollama.ChatResponse", None),
    ("/api/generate", {"prompt": "a"}, "ollama.GenerateResponse", "ollama.GenerateResponse"),
    ("/api/embed", {"input": ["a", "b"]}, "ollama.EmbedResponse", None),
    ("/api/embeddings", {"prompt": "a"}, "ollama.EmbeddingsResponse", None),
    ("/api/show", {"model": MODEL}, "ollama.ShowResponse", None),
]  # fmt: skip
GETS = [
    ("/v1/models", {}, "openai.pagination.SyncPage"), (f"/v1/models/{MODEL}", {}, "openai.types.Model"),
    (f"/v1/models/{MODEL}", ANTHROPIC, "anthropic.types.ModelInfo"),
    ("/v1/models", ANTHROPIC, "anthropic.pagination.SyncPage"),
    ("/v1/nothing", ANTHROPIC, "anthropic.types.ErrorResponse"),
    ("/api/tags", {}, "ollama.ListResponse"), ("/api/ps", {}, "ollama.ProcessResponse"),
]  # fmt: skip


def thoughtful_events() -> list[dict[str, Any]]:
    """Events of a response with a thought, a text and a call, as the writer sends them."""
    call = [CallBegin(0, "call_1", "weather"), ArgumentPiece(0, "{}"), CallEnd(0)]
    events: list[Event] = [
        Piece(0, "Hm", thought=True), Piece(0, "Hi"), *(Call(0, each) for each in call), Ended(0, None),
    ]  # fmt: skip
    writer = responses.Writer("model", ResponsesBody(input="Hi"))
    sent = [chunk.decode() for each in events for chunk in writer.chunks(each)]
    return [json.loads(each.split("data: ")[1]) for each in sent + [chunk.decode() for chunk in writer.last()]]


@pytest.mark.skipif(not PYTHON.exists(), reason="no clients: make test installs them")
def test_answers_have_the_types_of_official_packages() -> None:
    found: list[tuple[str, Any]] = [(EVENT, each) for each in thoughtful_events()]
    with served() as client:
        for path, body, whole, part in POSTS:
            response = client.post(path, json={**body, "stream": False})
            assert response.status_code == 200, response.text
            found.append((whole, response.json()))
            if part:
                lines = client.post(path, json={**body, "stream": True}).text.splitlines()
                parts = [each.removeprefix("data: ") for each in lines if each and not each.startswith("event: ")]
                assert len(parts) > 1
                found += [(part, json.loads(each)) for each in parts if each != "[DONE]"]
        found += [(kind, client.get(path, headers=headers).json()) for path, headers, kind in GETS]
    program = ROOT / "tests" / "clients" / "programs" / "valid.py"
    given = "\n".join(map(json.dumps, found))
    done = subprocess.run([PYTHON, program], input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_thoughts_in_responses_have_parts_and_end() -> None:
    """A reasoning item has a part, as a message has, which accumulating clients need before its text."""
    found = thoughtful_events()
    names = [each["type"].removeprefix("response.") for each in found]
    thoughts = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
                "content_part.done", "output_item.done"]  # fmt: skip
    assert names[2:8] == thoughts
    assert [each["type"] for each in found[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]
    assert all(each["status"] == "completed" for each in found[-1]["response"]["output"])

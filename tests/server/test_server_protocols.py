"""Other protocols over the same answers: OpenAI's responses, Anthropic's messages, Ollama's; and their description."""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import HELLO, MODEL, OTHER, PLACE, PLAIN, chat, client_of, hub_of, served
from starlette.testclient import TestClient
from thinking_models import SPECIALS, write_script

from edge.errors import EngineError
from edge.types import IntArray

client = client_of()


def sent(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def named_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of server-sent events."""
    found = []
    for block in text.strip().split("\n\n"):
        head, data = block.split("\n", 1)
        found.append((head.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def answer_of(client: TestClient, messages: list[dict[str, Any]] = HELLO, **fields: Any) -> str:
    text: str = chat(client, messages, **{"max_tokens": 8, "ignore_eos": False, **fields})["choices"][0]["message"][
        "content"
    ]
    return text


def test_responses_have_answers_of_chats(client: TestClient) -> None:
    found = sent(client, "/v1/responses", {"input": "Hello", "max_output_tokens": 8})
    [item] = found["output"]
    assert item["content"][0]["text"] == answer_of(client)
    assert found["status"] in ("completed", "incomplete")
    assert found["usage"]["output_tokens"] <= 8
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
        {"type": "message", "role": "user", "content": "More"},
    ]
    body = {"input": items, "instructions": "You are Codex.", "max_output_tokens": 8, "store": False, "stream": True,
            "include": [], "tools": [{"type": "web_search"}], "reasoning": {"effort": "low"}}  # fmt: skip
    events = named_events(client.post("/v1/responses", json=body).text)
    assert [each["sequence_number"] for _, each in events] == list(range(len(events)))
    names = [name for name, _ in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[:4] == [f"response.{each}" for each in begin]
    assert names[-1] in ("response.completed", "response.incomplete")
    said = [{"role": "system", "content": "You are Codex.\n\nBe brief."}, *HELLO,
            {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]  # fmt: skip
    text = "".join(each["delta"] for name, each in events if name == "response.output_text.delta")
    assert text == answer_of(client, said)
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == text
    response = client.post("/v1/responses", json={"input": "x", "previous_response_id": "resp_1"})
    assert response.status_code == 400


LONG = {"type": "object", "properties": {"text": {"type": "string", "minLength": 300}}, "required": ["text"]}


@pytest.mark.parametrize(("count", "begun"), [(12, False), (90, True)])
def test_forced_calls_that_are_cut_are_no_text(client: TestClient, count: int, begun: bool) -> None:
    """Their beginning is no text; /v1/responses ends each item that it began."""
    function = {"name": "note", "parameters": LONG}
    for path, body in {
        "/v1/chat/completions": {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        "/v1/messages": {"tools": [{"name": "note", "input_schema": LONG}], "tool_choice": {"type": "any"}},
    }.items():
        found = sent(client, path, {"messages": HELLO, "max_tokens": count, **body})
        if "choices" in found:
            assert found["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
            assert found["choices"][0]["finish_reason"] == "length"
        else:
            assert (found["content"], found["stop_reason"]) == (
                [{"type": "text", "text": "", "citations": None}],
                "max_tokens",
            )
    body = {"input": "Hello", "tools": [{"type": "function", **function}], "tool_choice": "required",
            "max_output_tokens": count, "stream": True}  # fmt: skip
    events = named_events(client.post("/v1/responses", json=body).text)
    assert [each["sequence_number"] for _, each in events] == list(range(len(events)))
    added = [each["item"]["id"] for name, each in events if name == "response.output_item.added"]
    done = [each["item"] for name, each in events if name == "response.output_item.done"]
    assert added == [each["id"] for each in done]
    assert [(each["type"], each["status"]) for each in done] == [("function_call", "incomplete")] * begun
    name, last = events[-1]
    assert (name, last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["output"] == done


def test_messages_have_answers_of_chats(client: TestClient) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;\n"}, {"type": "text", "text": "Be brief."}]
    content = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    body = {"model": MODEL, "max_tokens": 8, "system": system, "messages": [{"role": "user", "content": content}]}
    found = sent(client, "/v1/messages", body)
    expected = answer_of(client, [{"role": "system", "content": "Be brief."}, *HELLO])
    assert found["content"] == [{"type": "text", "text": expected, "citations": None}]
    assert found["stop_reason"] in ("end_turn", "max_tokens")
    events = named_events(client.post("/v1/messages", json={**body, "stream": True}).text)
    assert all(name == each["type"] for name, each in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(each["delta"]["text"] for name, each in events if name == "content_block_delta") == expected
    usage = events[-2][1]["usage"]
    counted = sent(client, "/v1/messages/count_tokens", body)["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    response = client.post("/v1/messages", json={**body, "messages": []})
    assert response.status_code == 400
    assert response.json()["type"] == "error"


def test_ollamas_programs_are_answered(client: TestClient) -> None:
    options = {"num_predict": 8, "temperature": 0}
    body = {"model": f"{MODEL}:latest", "messages": HELLO, "options": options}
    whole = sent(client, "/api/chat", {**body, "stream": False})
    assert whole["message"]["content"] == answer_of(client)
    assert whole["done"]
    lines = [json.loads(line) for line in client.post("/api/chat", json=body).text.splitlines()]
    assert "".join(each["message"]["content"] for each in lines) == whole["message"]["content"]
    assert [each["done"] for each in lines] == [False] * (len(lines) - 1) + [True]
    content = json.dumps({"prompt": "Hello", "options": options, "stream": False})
    plain = client.post("/api/generate", content=content, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert plain.json()["response"] == whole["message"]["content"]
    assert client.get("/api/tags").json()["models"][0]["name"] == MODEL
    assert client.get("/api/version").json()["version"]
    assert "tools" in sent(client, "/api/show", {"model": MODEL})["capabilities"]
    form = sent(client, "/api/chat", {"messages": HELLO, "format": PLACE, "stream": False})
    assert json.loads(form["message"]["content"])["city"] in ("Rome", "Oslo")
    for body in ({"model": "none", "messages": HELLO}, {"options": {"top_p": 7}, "messages": HELLO}):
        response = client.post("/api/chat", json=body)
        assert response.status_code in (400, 404)
        assert isinstance(response.json()["error"], str)


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "stream": True}, "/v1/completions": {"prompt": "Hello", "stream": True},
    "/v1/responses": {"input": "Hello", "stream": True},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8, "stream": True}, "/api/chat": {"messages": HELLO},
}  # fmt: skip


@pytest.mark.parametrize("path", STREAMS)
def test_stream_that_goes_wrong_ends_with_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the protocol's form and follows the text that was sent before."""
    with served() as client:
        chat(client)
        engine = hub_of(client).pool.workers[MODEL].opened.result().engine
        forward, steps = engine.forward, count()

        def fail(tokens: IntArray) -> Any:
            if tokens.size == 1 and next(steps) == 6:
                raise EngineError("the device is lost")
            return forward(tokens)

        monkeypatch.setattr(engine, "forward", fail)
        model = {"model": MODEL}
        parts = client.post(path, json=STREAMS[path] | model).text.strip().split("\n\n")
        done = parts.pop() if parts[-1] == "data: [DONE]" else ""
        lines = parts[-1].split("\n")
        found = json.loads(lines[-1].removeprefix("data: "))
        assert bool(done) == path.endswith("completions")
        assert max(len(parts), len(lines)) > 1  # some of the answer
        if path == "/v1/responses":
            assert (found["type"], found["response"]["status"]) == ("response.failed", "failed")
            found = found["response"]
        if path == "/v1/messages":
            assert (lines[0], found["type"]) == ("event: error", "error")
        error = found["error"]
        assert "the model failed on this request" in (error if isinstance(error, str) else error["message"])


# Ollama, as its command and its libraries use it


def test_models_are_listed_with_digests_and_capabilities(tmp_path: Path) -> None:
    write_script(tmp_path / "thinker.gguf", SPECIALS["qwen"], 8, [2])
    with served(MODEL, OTHER, str(tmp_path / "thinker"), "encoders/bert") as client:
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
        assert ("response" if path == "/api/generate" else "message") in found
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

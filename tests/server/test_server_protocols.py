"""Other protocols over the same answers: OpenAI's responses, Anthropic's messages, Ollama's; and their description."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from serving import HELLO, MODEL, chat, hub_of, served
from starlette.testclient import TestClient

from edge.errors import EngineError
from edge.types import IntArray

PLACE = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
         "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as client:
        yield client


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


def test_responses_call_tools(client: TestClient) -> None:
    tool = {"type": "function", "name": "weather", "parameters": PLACE, "strict": True}
    body = {"input": "Hello", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    [item] = sent(client, "/v1/responses", body)["output"]
    assert (item["type"], item["name"]) == ("function_call", "weather")
    assert json.loads(item["arguments"])["city"] in ("Rome", "Oslo")
    events = named_events(client.post("/v1/responses", json={**body, "stream": True}).text)
    parts = [each["delta"] for name, each in events if name == "response.function_call_arguments.delta"]
    assert "".join(parts) == item["arguments"]
    follow = [{"type": "message", "role": "user", "content": "Hello"}, item,
              {"type": "function_call_output", "call_id": item["call_id"], "output": "12 degrees"}]  # fmt: skip
    assert sent(client, "/v1/responses", {"input": follow, "max_output_tokens": 4})["output"]


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


def test_whole_calls_are_calls_where_the_limit_has_no_room_for_more(client: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PLACE}}]
    common = {"messages": HELLO, "tool_choice": "required", "temperature": 0}
    path, body = "/v1/chat/completions", {**common, "tools": tools}
    one = sent(client, path, {**body, "max_tokens": 400, "parallel_tool_calls": False})
    least = one["usage"]["completion_tokens"]
    for most in (least, least + 1, least + 12):
        choice = sent(client, path, {**body, "max_tokens": most})["choices"][0]
        assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls"), most
        body_of = {"tools": [{"name": "weather", "input_schema": PLACE}], "tool_choice": {"type": "any"}}
        found = sent(client, "/v1/messages", {**common, **body_of, "max_tokens": most})
        assert found["stop_reason"] == "tool_use"


def test_forced_calls_are_complete_within_their_limit(client: TestClient) -> None:
    """A text without end is closed; the response says that the limit ended it."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    function = {"name": "note", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    common = {"messages": HELLO, "max_tokens": 90, "temperature": 1, "seed": 3}
    choice = sent(client, "/v1/chat/completions", {**common, "tools": tools, "tool_choice": "required"})["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], {*json.loads(call["function"]["arguments"])}) == ("length", {"text"})
    body = {"tools": [{"name": "note", "input_schema": schema}], "tool_choice": {"type": "any"}}
    found = sent(client, "/v1/messages", {**common, **body})
    assert (found["stop_reason"], found["content"][-1]["type"]) == ("max_tokens", "tool_use")
    body = {"input": "Hello", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    found = sent(client, "/v1/responses", {**body, "max_output_tokens": 90, "temperature": 1})
    assert (found["status"], [each["status"] for each in found["output"]]) == ("incomplete", ["completed"])
    assert {*json.loads(found["output"][0]["arguments"])} == {"text"}
    body = {"messages": HELLO, "format": schema, "stream": False, "options": {"num_predict": 40, "temperature": 1}}
    found = sent(client, "/api/chat", body)
    assert (found["done_reason"], {*json.loads(found["message"]["content"])}) == ("length", {"text"})


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


def test_messages_call_tools(client: TestClient) -> None:
    tools = [{"name": "weather", "input_schema": PLACE}, {"type": "web_search_20250305", "name": "web_search"}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"max_tokens": 200, "messages": HELLO, "tools": tools, "tool_choice": choice}
    found = sent(client, "/v1/messages", body)
    block = found["content"][-1]
    assert (block["type"], block["name"], found["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert block["input"]["city"] in ("Rome", "Oslo")
    events = named_events(client.post("/v1/messages", json={**body, "stream": True}).text)
    parts = [each["delta"]["partial_json"] for name, each in events if name == "content_block_delta"]
    assert json.loads("".join(parts)) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "12 degrees"}]}
    turns = [*HELLO, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert sent(client, "/v1/messages", {**body, "messages": turns, "tool_choice": None, "max_tokens": 4})["content"]


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


def test_endpoints_of_the_description_answer(client: TestClient) -> None:
    found = client.get("/openapi.json").json()
    for path, methods in found["paths"].items():
        for method in methods:
            response = client.request(method.upper(), path, json={} if method == "post" else None)
            assert response.status_code in ((415,) if path.startswith("/v1/audio/") else (200, 400)), path
    schema = found["components"]["schemas"]["ChatBody"]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["top_p"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}

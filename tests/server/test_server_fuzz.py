"""Bodies with values of wrong types, on every protocol: refused in its form, never an internal error; and bodies that
schemathesis makes of the server's own description."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import client_of, served
from starlette.testclient import TestClient

from edge.server.protocols.openapi import describe

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Tells it", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TEXT = [{"type": "text", "text": "Hello"}]
WHOLE: dict[str, dict[str, Any]] = {  # a valid body of each protocol, with most of its fields
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT},
            {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        ],
        "model": "llama-gqa-tied", "max_tokens": 1, "temperature": 0.5, "seed": 3, "stop": ["x"], "n": 1,
        "stream_options": {"include_usage": True}, "logit_bias": {"3": 1.0}, "logprobs": True, "top_logprobs": 2,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": True,
        "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True},
        "edge": {"energy": "30J", "time": 20},
    },
    "/v1/chat/completions?form": {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    },
    "/v1/completions": {
        "prompt": ["Hello", "there"], "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0, "suffix": "",
        "best_of": 1, "top_k": 3, "min_p": 0.1, "stop": "x",
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "12"},
        ],
        "instructions": "Be brief.", "max_output_tokens": 1, "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "weather"}, "reasoning": {"effort": "low"},
    },
    "/v1/responses?form": {
        "input": "Hello", "max_output_tokens": 1, "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/v1/embeddings": {"input": [[3, 4], [5]], "encoding_format": "float", "dimensions": 64},
    "/v1/rerank": {"query": "Hello", "documents": [{"text": "a"}, {"text": "b"}], "top_n": 1},
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Rome"}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": TEXT}]},
        ],
        "max_tokens": 10, "system": TEXT, "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 9},
        "tools": [{"name": "weather", "description": "Tells it", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    },
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]},
            {"role": "tool", "tool_name": "weather", "content": "12"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}], "think": False,
        "stream": False, "options": {"num_predict": 1, "seed": 3, "stop": ["x"], "temperature": 0.5, "top_k": 3},
    },
    "/api/generate": {
        "prompt": "Hello", "system": "Be brief.", "raw": False, "format": SCHEMA, "stream": False,
        "options": {"num_predict": 1},
    },
    "/api/embed": {"input": ["Hello"], "truncate": True},
    "/api/embeddings": {"prompt": "Hello"},
    "/api/show": {"model": "llama-gqa-tied"},
    "/tokenize": {"content": "Hello", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [3, 4]},
}  # fmt: skip
WHOLE["/v1/messages/count_tokens"] = WHOLE["/v1/messages"]
WRONG: list[Any] = [None, True, 0, -1, 2, 1 << 70, 0.5, "", "x", "\ud800", "-", [], [-1], [None], [[]], {}, {"x": 1}]


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values within a value."""
    if way:
        yield way
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*way, key))


def changed(body: dict[str, Any], way: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = deepcopy(body)
    inner: Any = found
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = value
    return found


def send(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    return client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


client = client_of()


@pytest.mark.parametrize("path", WHOLE)
def test_valid_bodies_are_answered(client: TestClient, path: str) -> None:
    response = send(client, path, WHOLE[path])
    assert response.status_code == 200, response.text


@given(st.data())
def test_no_value_breaks_server(client: TestClient, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(WHOLE)))
    way = data.draw(st.sampled_from(list(places(WHOLE[path]))))
    response = send(client, path, changed(WHOLE[path], way, data.draw(st.sampled_from(WRONG))))
    assert response.status_code in (200, 400, 404, 413, 422), response.text
    if response.status_code != 200:
        assert "backtrace" not in response.text
        assert response.json()["error"]


@pytest.mark.skipif(not find_spec("schemathesis"), reason="no schemathesis")
def test_server_follows_its_openapi_schema() -> None:
    """In one test, since the import takes a worker seconds."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(describe())
    with served(options={"max_kv_size": 64}) as client:
        for path, methods in describe()["paths"].items():
            for method in methods:
                check_operation(client, schema[path][method])


def check_operation(client: TestClient, operation: Any) -> None:
    @settings(max_examples=5, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        body = case.body if isinstance(case.body, dict) else {}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 2) or 1
        content = {"json": body} if case.method.upper() == "POST" else {}
        response = client.request(case.method, case.path, **content)
        assert response.status_code != 500, response.text
        assert str(response.status_code) in operation.definition.raw["responses"], response.text
        if response.status_code != 200 and case.path.startswith(("/v1/c", "/v1/r", "/t", "/d")):
            assert response.json()["error"]["message"]

    check()

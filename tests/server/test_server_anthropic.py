"""Anthropic's protocol, where its official clients are strict."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import HELLO, MODEL, OTHER, hub_of, served
from starlette.testclient import TestClient

VERSION = {"anthropic-version": "2023-06-01"}
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": HELLO}
TOOL = {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(MODEL, OTHER) as client:
        yield client


def data_of(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of the events of a streamed answer."""
    lines = client.post("/v1/messages", json={**body, "stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_models(client: TestClient) -> None:
    found = client.get("/v1/models", headers=VERSION).json()
    assert [each["id"] for each in found["data"]] == [MODEL, OTHER]
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, MODEL, OTHER)
    one = client.get(f"/v1/models/{OTHER}", headers=VERSION).json()
    assert one == found["data"][1]
    assert (one["type"], one["display_name"]) == ("model", OTHER)
    assert datetime.datetime.fromisoformat(one["created_at"].replace("Z", "+00:00")).tzinfo
    assert client.get("/v1/models").json()["object"] == "list"


def test_message_start_counts_prompt(client: TestClient) -> None:
    counted = client.post("/v1/messages/count_tokens", json=BODY).json()["input_tokens"]
    [start] = [each for each in data_of(client, BODY) if each["type"] == "message_start"]
    assert start["message"]["usage"]["input_tokens"] == counted > 0


def test_stop_sequence(client: TestClient) -> None:
    """An answer that another text ends is told from one that ended by itself, or at its limit."""
    text = client.post("/v1/messages", json=BODY).json()["content"][0]["text"]
    stop = {**BODY, "stop_sequences": ["no such text", text[2:4]]}
    found = client.post("/v1/messages", json=stop).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[2:4])
    assert found["content"][0]["text"] == text[: text.index(text[2:4])]
    [end] = [each for each in data_of(client, stop) if each["type"] == "message_delta"]
    assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == ("stop_sequence", text[2:4])
    whole = client.post("/v1/messages", json={**BODY, "stop_sequences": ["no such text"]}).json()
    assert (whole["stop_reason"] in ("end_turn", "max_tokens"), whole["stop_sequence"]) == (True, None)


def test_calls_have_their_prefix(client: TestClient) -> None:
    body = {**BODY, "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}}
    found = client.post("/v1/messages", json=body).json()["content"]
    begun = [each["content_block"] for each in data_of(client, body) if each["type"] == "content_block_start"]
    calls = [each for each in (*found, *begun) if each["type"] == "tool_use"]
    assert len(calls) >= 2
    assert all(each["id"].startswith("toolu_") for each in calls)


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"max_tokens": -1}, {"temperature": 3}, {"top_p": 2}, {"top_k": -5},
     {"thinking": {"type": "enabled", "budget_tokens": 8}}, {"messages": []}],
)  # fmt: skip
def test_impossible_values(client: TestClient, wrong: dict[str, Any]) -> None:
    response = client.post("/v1/messages", json={**BODY, **wrong})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert next(iter(wrong)) in response.json()["error"]["message"]


def test_too_large_and_too_busy(client: TestClient) -> None:
    response = client.post("/v1/messages", json={**BODY, "system": "x" * (5 << 20)})
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
    refused = hub_of(client).pool.full(MODEL)
    assert (refused.status, refused.body("anthropic")["error"]["type"]) == (429, "rate_limit_error")
    assert f"try again in {refused.headers['Retry-After']} s" in refused.message

"""/v1/chat/completions and /v1/completions: the answers of a session, whole or in pieces."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from conftest import log_softmax, open_golden
from serving import HELLO, MODEL, PLACE, PLAIN, chat, client_of, error_of, events_of, served
from starlette.testclient import TestClient

from edge.run.starting.loading import load
from edge.sampling import SamplingParams

SHORT: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}

client = client_of()


def text_of(response: dict[str, Any], choice: int = 0) -> str:
    return response["choices"][choice]["message"]["content"]


def test_chat_has_answer_of_session(client: TestClient) -> None:
    with load(open_golden(MODEL).model, **PLAIN) as session:
        answer = session.generate("Hello", **SHORT)
        drawn = session.generate("Hello", sampling=SamplingParams(temperature=1.0, seed=7), **SHORT)
        report = session.report
    found = chat(client)
    assert text_of(found) == answer
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == report.tokens.prompt
    assert found["usage"]["completion_tokens"] == 8
    assert found["timings"]["predicted_n"] == 8
    assert found["usage"]["edge"]["joules"] > 0
    assert text_of(chat(client, temperature=1.0, seed=7)) == drawn


@pytest.mark.parametrize("policy", ["full", "streaming"])
def test_answers_without_limit_end_with_their_rows(policy: str) -> None:
    """Or after as many tokens as there are rows, if a policy makes room; the finish reason tells."""
    with served(options={"max_kv_size": 96, "kv_policy": policy}) as client:
        response = client.post("/v1/chat/completions", json={"messages": HELLO, "ignore_eos": True})
        found = response.json()
        assert found["choices"][0]["finish_reason"] == "length"
        usage = found["usage"]
        assert usage["completion_tokens"] == 96 - (usage["prompt_tokens"] if policy == "full" else 0)
        capacity = usage["edge"]["kv"]["capacity"]
        assert usage["edge"]["kv"]["rows"] <= capacity == 96


def test_several_choices_have_seeds_of_their_own(client: TestClient) -> None:
    found = chat(client, n=3, temperature=1.5, seed=1)
    assert [each["index"] for each in found["choices"]] == [0, 1, 2]
    texts = [each["message"]["content"] for each in found["choices"]]
    assert len(set(texts)) > 1
    assert texts == [text_of(chat(client, temperature=1.5, seed=1 + number)) for number in range(3)]
    assert found["usage"]["completion_tokens"] == 24


def test_answers_end_before_stop_text(client: TestClient) -> None:
    whole = text_of(chat(client, max_tokens=20))
    stop = whole[6:8]
    found = chat(client, max_tokens=20, stop=[stop])
    assert text_of(found) == whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"


def test_tools_are_called_in_forms_of_protocol(client: TestClient) -> None:
    function = {"name": "weather", "parameters": PLACE}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 200,
            "ignore_eos": False, "parallel_tool_calls": False}  # fmt: skip
    whole = chat(client, **body)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    [call] = whole["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    streamed = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, **body})
    chunks = [each["choices"][0] for each in events_of(streamed.text)[:-1]]
    parts = [part for each in chunks for part in each["delta"].get("tool_calls", [])]
    assert all(part["index"] == 0 for part in parts)
    assert parts[0]["function"]["name"] == "weather"
    assert parts[0]["id"]
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert chat(client, turns, tools=body["tools"])["choices"][0]["message"]["role"] == "assistant"
    cut = chat(client, **{**body, "max_tokens": 20})["choices"][0]
    assert cut["finish_reason"] == "length"
    assert "tool_calls" not in cut["message"]


def test_tokens_are_as_likely_as_session_says(client: TestClient) -> None:
    with load(open_golden(MODEL).model, **PLAIN) as session:
        session.generate("Hello", logprobs=2, **SHORT)
        expected = session.report.logprobs
    found = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    chances = [[each["logprob"], *(one["logprob"] for one in each["top_logprobs"])] for each in found]
    wanted = [[each.logprob, *(chance for _, chance in each.top)] for each in expected]
    np.testing.assert_allclose(chances, wanted, atol=1e-4)  # a prefix that is reused has its chunks elsewhere
    body = {"messages": HELLO, "stream": True, "logprobs": True, **SHORT}
    chunks = events_of(client.post("/v1/chat/completions", json=body).text)[:-1]
    tokens = [one for each in chunks for one in (each["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [each["bytes"] for each in tokens] == [each["bytes"] for each in found]


def test_biases_change_answer(client: TestClient) -> None:
    token = client.post("/tokenize", json={"content": "q"}).json()["tokens"][0]
    assert text_of(chat(client, logit_bias={str(token): 1000}, max_tokens=3)) == "qqq"


def test_prompt_that_agrees_with_earlier_one_is_reused(client: TestClient) -> None:
    said = [{"role": "user", "content": "Tell me of rivers and seas, " * 4}]
    chat(client, said)
    again = chat(client, said)
    reused = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused == again["usage"]["prompt_tokens"] - 1
    assert again["usage"]["edge"]["prefix"] == {"reused": reused, "diverged_at": None}
    other = [{"role": "user", "content": "Tell me of rivers and lakes, " * 4}]
    model = open_golden(MODEL).model
    one, two = (model.prompt(each[0]["content"]).first(None) for each in (said, other))
    apart = int(np.flatnonzero(one[: two.size] != two[: one.size])[0])
    prefix = chat(client, other)["usage"]["edge"]["prefix"]
    assert prefix == {"reused": apart, "diverged_at": apart}


def test_budget_of_request_ends_it(client: TestClient) -> None:
    for more in ({}, {"vote": 2}):
        body = {"messages": HELLO, "edge": {"energy": "0.001mJ", **more}}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 422
        error = error_of(response)
        assert ("edge.energy 0.001 mJ is spent" in error["message"], error["param"]) == (True, "edge.energy")
    response = client.post("/v1/chat/completions", json={"messages": HELLO}, headers={"Edge-Energy": "0.001mJ"})
    assert response.status_code == 422
    found = chat(client, edge={"energy": "1000J", "time": 60})
    assert found["usage"]["edge"]["budget"] is None


def test_texts_are_continued_without_template(client: TestClient) -> None:
    with load(open_golden(MODEL).model, **PLAIN) as session:
        answers = [session.generate(text, raw=True, **SHORT) for text in ("One two", "Three")]
        tokens = session.tokenizer.encode("One two", special=True).tolist()
    found = client.post("/v1/completions", json={"prompt": ["One two", "Three"], "n": 1, **SHORT}).json()
    assert [each["text"] for each in found["choices"]] == answers
    assert found["object"] == "text_completion"
    ids = client.post("/v1/completions", json={"prompt": tokens, "echo": True, **SHORT}).json()
    assert ids["choices"][0]["text"] == "One two" + answers[0]
    streamed = client.post("/v1/completions", json={"prompt": ["One two", "Three"], "stream": True, **SHORT})
    chunks = [each["choices"][0] for each in events_of(streamed.text)[:-1]]
    for index, answer in enumerate(answers):
        assert "".join(each["text"] for each in chunks if each["index"] == index) == answer


@pytest.mark.parametrize("count", [0, 1])
def test_echoed_tokens_are_as_likely_as_transformers_says(client: TestClient, count: int) -> None:
    golden = open_golden(MODEL)
    tokens = golden.tokens[:40].tolist()
    body = {"prompt": [tokens, tokens[:5]], "echo": True, "logprobs": 2, "max_tokens": count, "temperature": 0}
    found = client.post("/v1/completions", json=body).json()
    assert [len(each["logprobs"]["tokens"]) for each in found["choices"]] == [40 + count, 5 + count]
    logprobs = found["choices"][0]["logprobs"]
    expected = log_softmax(golden.logits[:40])
    follow = np.append(golden.tokens[1:40], expected[39].argmax())[: 39 + count]
    assert logprobs["token_logprobs"][0] is None
    chances = expected[np.arange(39 + count), follow]
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], chances, atol=2e-4)
    for row, top in zip(expected, logprobs["top_logprobs"][1:], strict=False):
        np.testing.assert_allclose(sorted(top.values()), np.sort(row)[-len(top) :], atol=2e-4)
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:n])) for n in range(40 + count)]
    assert found["usage"]["prompt_tokens"] == 45


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WRONG = {"type": "object", "properties": {"a": {"type": "wrong"}}}
WRONG_TOOL = {"type": "function", "function": {"name": "look", "parameters": WRONG}}
BAD_CHATS: list[tuple[dict[str, Any], int, str | None]] = [
    ({}, 400, "messages"), ({"messages": []}, 400, "messages"), ({"messages": "Hello"}, 400, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ""}]}, 200, None),
    ({"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format"),
    ({"messages": HELLO, "model": "gpt-4"}, 404, "model"), ({"messages": HELLO, "temperature": -1}, 400, "temperature"),
    ({"messages": HELLO, "temperature": "hot"}, 400, "temperature"), ({"messages": HELLO, "top_p": 2}, 400, "top_p"),
    ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": HELLO, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools[0].name"),
    ({"messages": HELLO, "tools": [LOOK, LOOK]}, 400, "tools"),
    ({"messages": HELLO, "tools": [{"function": {"name": "f", "parameters": [True]}}]}, 400,
     "tools[0].function.parameters"),
    ({"messages": HELLO, "tools": [LOOK], "tool_choice": {"type": "allowed_tools", "tools": []}}, 400, "tool_choice"),
    ({"messages": HELLO, "tools": [WRONG_TOOL], "tool_choice": "required"}, 400, "tools[0].function.parameters"),
    ({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}}, 400,
     "response_format"),
    ({"messages": HELLO, "guided_json": WRONG}, 400, "guided_json"),
    ({"messages": HELLO, "guided_choice": []}, 400, "guided_choice"),
    ({"messages": HELLO, "tool_choice": "required", "tools": []}, 400, "tool_choice"),
    ({"messages": HELLO, "n": 0}, 400, "n"), ({"messages": HELLO, "n": 1000}, 400, "n"),
    ({"messages": HELLO, "stop": [""] * 100}, 400, "stop"),
    ({"messages": HELLO, "edge": {"energy": "30 apples"}}, 400, "edge.energy"),
    ({"messages": HELLO, "edge": {"time": -1}}, 400, "edge.time"),
    ({"messages": [{"role": "user", "content": "long " * 2000}], "edge": {}}, 200, None),  # rows are evicted
]  # fmt: skip


def test_bad_requests_are_refused_in_a_line(client: TestClient) -> None:
    for body, status, param in BAD_CHATS:
        response = client.post("/v1/chat/completions", json={"max_tokens": 2, **body})
        assert response.status_code == status, body
        if status != 200:
            error = error_of(response)
            assert error["param"] == param, error
            assert not re.search(r"\b(None|True|False)\b|\{'", error["message"])  # Python's
            streamed = client.post("/v1/chat/completions", json={"max_tokens": 2, "stream": True, **body})
            assert streamed.status_code == status
    for body, param in (
        ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": [[1]] * 100}, "prompt"), ({"prompt": [100000]}, None), ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "x", "best_of": 3, "stream": True}, "best_of"), ({"prompt": "x", "edge": {"vote": 3}}, "edge.vote"),
    ):  # fmt: skip
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 400, body
        found = error_of(response)["param"]
        assert found is None if param is None else found.startswith(param)


def test_best_of_sends_the_likeliest(client: TestClient) -> None:
    body = {"prompt": ["one", "two"], "temperature": 1.0, "seed": 7, **SHORT}
    drawn = client.post("/v1/completions", json={**body, "n": 3, "logprobs": 0}).json()["choices"]

    def likelihood(choice: dict[str, Any]) -> float:
        return float(np.mean(choice["logprobs"]["token_logprobs"]))

    best = [max(own, key=likelihood)["text"] for own in (drawn[:3], drawn[3:])]
    found = client.post("/v1/completions", json={**body, "best_of": 3}).json()
    assert [(each["index"], each["text"], each["logprobs"]) for each in found["choices"]] == [
        (0, best[0], None), (1, best[1], None),
    ]  # fmt: skip
    assert found["usage"]["completion_tokens"] == 6 * SHORT["max_tokens"]


def test_vote_sends_what_most_answers_say(client: TestClient) -> None:
    drawn = {"temperature": 1.0, "seed": 3, "guided_choice": ["yes", "no"]}
    texts = [each["message"]["content"] for each in chat(client, n=5, **drawn)["choices"]]
    found = chat(client, edge={"vote": 5}, **drawn)
    [choice] = found["choices"]
    most = max(texts.count(text) for text in texts)
    assert texts.count(choice["message"]["content"]) == found["usage"]["edge"]["votes"] == most
    for other in ({"n": 2}, {"stream": True}, {"temperature": 0}, {"edge": {"vote": 1}}, {"edge": {"vote": 17}}):
        response = client.post("/v1/chat/completions", json={"messages": HELLO, "edge": {"vote": 3}, **other})
        assert (response.status_code, error_of(response)["param"]) == (400, "edge.vote")


LONG = "long " * 50
TOO_LONG = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
    "/v1/completions": {"prompt": LONG, "max_tokens": 2},
    "/v1/responses": {"input": LONG, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
    "/api/chat": {"messages": [{"role": "user", "content": LONG}], "options": {"num_predict": 2}},
    "/api/generate": {"prompt": LONG, "options": {"num_predict": 2}},
}


@pytest.mark.parametrize("path", TOO_LONG)
def test_long_prompts_are_evicted_only_if_asked(path: str) -> None:
    body = TOO_LONG[path]
    asked: list[dict[str, Any]] = [{"edge": {"evict": True}}]
    asked += [{"truncation": "auto"}] if path == "/v1/responses" else []
    asked += [{"truncate": True}] if path.startswith("/api/") else []
    with served(options={"max_kv_size": 64}, evict=False) as client:
        for streams in (False, True):
            response = client.post(path, json={**body, "stream": streams})
            assert response.status_code == 400
            error = response.json()["error"]
            if path.startswith("/api/"):
                assert re.fullmatch(r"prompt too long; exceeded max context length by \d+ tokens", error)
            elif path == "/v1/messages":
                assert error["type"] == "invalid_request_error"
                assert re.fullmatch(r"prompt is too long: \d+ tokens > 63 maximum", error["message"])
            else:
                assert error["code"] == "context_length_exceeded"
                assert "maximum context length is 63 tokens" in error["message"]
        for more in asked:
            assert client.post(path, json={**body, **more}).status_code == 200
    for owner in ({"evict": True}, {"options": {"max_kv_size": 64, "kv_policy": "window"}, "evict": False}):
        with served(**{"options": {"max_kv_size": 64}, **owner}) as client:
            assert client.post(path, json=body).status_code == 200

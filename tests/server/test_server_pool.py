"""Several models in one budget, their queue, what their endpoints say, and the memory of requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from serving import HELLO, MODEL, OTHER, chat, client_of, error_of, hub_of, served
from starlette.testclient import TestClient

from edge.devices.memory import MemoryLimit, memory_use
from edge.errors import BudgetError
from edge.run.loaded import Loaded
from edge.run.request import Request
from edge.server.events import Flow, Piece
from edge.server.ledger import Claim, Ledger
from edge.server.prompts import prepare
from edge.server.refusal import RefusedError

CHATS = "/v1/chat/completions"

client = client_of(MODEL, OTHER)


def test_models_are_found_by_their_names(client: TestClient) -> None:
    found = client.get("/v1/models").json()["data"]
    assert [each["id"] for each in found] == [MODEL, OTHER]
    assert f"{MODEL}.gguf" in found[0]["aliases"]
    assert found[0]["chat_template"] is True
    assert found[0]["meta"]["n_ctx_train"] >= found[0]["meta"]["n_ctx"] > 0
    assert client.get(f"/v1/models/{OTHER}").json()["id"] == OTHER
    assert client.get("/v1/models/none").status_code == 404
    for name in (MODEL, f"{MODEL}.gguf", None, ""):
        assert chat(client, model=name)["model"] == (name or MODEL)


def test_least_recently_used_model_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(MODEL, OTHER, "qwen3") as client:
        pool, opened = hub_of(client).pool, type(hub_of(client).pool)._open

        def open_two(self: Any, entry: Any) -> Any:
            if len(self.workers) >= 2:
                raise BudgetError("no room")
            return opened(self, entry)

        monkeypatch.setattr(type(pool), "_open", open_two)
        for name in (MODEL, OTHER, MODEL):
            chat(client, model=name)
        chat(client, model="qwen3")
        assert set(pool.workers) == {MODEL, "qwen3"}
        assert set(pool.ledger.models) == {MODEL, "qwen3"}
        assert pool.evictions == 1
        chat(client, model=OTHER)
        assert set(pool.workers) == {"qwen3", OTHER}


def test_model_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as client:

        def refuse(self: Any, entry: Any) -> Any:
            raise BudgetError("needs 2 GiB, the memory budget is 1 GiB")

        monkeypatch.setattr(type(hub_of(client).pool), "_open", refuse)
        response = client.post(CHATS, json={"messages": HELLO})
        assert response.status_code == 422
        assert error_of(response)["code"] == "budget_exceeded"


def test_full_queue_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also requests that come together, and find room for each alone."""
    with served(queue=2) as client:
        chat(client)
        pool, responses, leased = hub_of(client).pool, list[Any](), list[str | None]()
        entered, go_on, acquire = threading.Event(), threading.Event(), type(pool).acquire

        def wait(*arguments: Any) -> Request:
            entered.set()
            assert go_on.wait(120)
            return prepare(*arguments)

        async def together(self: Any, name: str | None) -> Any:
            lease = await acquire(self, name)
            leased.append(name)
            while 1 < len(leased) < 4:  # the first one runs by then
                await asyncio.sleep(0.01)
            return lease

        monkeypatch.setattr("edge.server.hub.prepare", wait)
        monkeypatch.setattr(type(pool), "acquire", together)
        body = {"messages": HELLO, "max_tokens": 2}
        threads = [threading.Thread(target=lambda: responses.append(client.post(CHATS, json=body))) for _ in range(4)]
        threads[0].start()
        assert entered.wait(120)
        for thread in threads[1:]:
            thread.start()
        try:
            while not responses:
                time.sleep(0.01)
                assert pool.workers[MODEL].queued <= 2
        finally:
            go_on.set()
        for thread in threads:
            thread.join(120)
        assert [each.status_code for each in responses] == [429, 200, 200, 200]
        assert int(responses[0].headers["retry-after"]) >= 1
        assert error_of(responses[0])["type"] == "rate_limit_error"


def test_draining_server_takes_no_more_requests(client: TestClient) -> None:
    hub = hub_of(client)
    hub.draining = True
    try:
        assert client.get("/health").status_code == 503
        assert client.post(CHATS, json={"messages": HELLO}).status_code == 503
    finally:
        hub.draining = False


def test_texts_become_tokens_and_come_back(client: TestClient) -> None:
    tokens = client.post("/tokenize", json={"content": "Hello<|im_end|>"}).json()["tokens"]
    plain = client.post("/tokenize", json={"content": "Hello<|im_end|>", "parse_special": False}).json()["tokens"]
    assert len(tokens) < len(plain)
    assert client.post("/detokenize", json={"tokens": plain}).json() == {"content": "Hello<|im_end|>"}
    pieces = client.post("/tokenize", json={"content": "Hi", "with_pieces": True}).json()["tokens"]
    assert "".join(each["piece"] for each in pieces) == "Hi"
    assert client.post("/detokenize", json={"tokens": [1 << 20]}).status_code == 400
    for more in ({}, {"add_special_tokens": False}):  # as vLLM has it; this model's prompts begin with no BOS
        assert client.post("/tokenize", json={"prompt": "Hello<|im_end|>", **more}).json()["tokens"] == tokens
    assert client.post("/tokenize", json={}).json()["error"]["param"] == "content"
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["chat_template"]


def test_properties_and_metrics_tell_memory_and_joules(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    chat(client)
    found = client.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] > 0
    assert found["edge"]["memory"]["kv"] > 0
    assert found["edge"]["memory"]["resident"] <= found["edge"]["memory"]["peak"]
    text = client.get("/metrics").text
    assert 'edge_responses_total{path="/v1/chat/completions",status="200"}' in text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["edge_generated_tokens_total"]) >= 8
    assert float(values["edge_joules_total"]) > 0
    monkeypatch.setattr(Loaded, "team", lambda self: (3, 5))
    text = client.get("/metrics").text
    for line in (f'edge_passes_total{{model="{MODEL}",threads="{n}"}} {count}' for n, count in ((1, 3), (2, 5))):
        assert line in text


@pytest.fixture(scope="module", params=[{}, {"power": "9000W"}], ids=["", "power"])
def counted(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    with served(MODEL, OTHER, options=request.param) as client:
        yield client


def test_models_have_joules_of_their_own(counted: TestClient) -> None:
    """Those of answers are part of their model's, and these add up to no more than the process's."""
    client = counted
    pool = hub_of(client).pool
    for name in (MODEL, OTHER):
        before = pool.shares[name].joules
        spent = chat(client, model=name)["usage"]["edge"]["joules"]
        text = client.get("/metrics").text
        found = float(text.partition(f'edge_model_joules_total{{model="{name}"}} ')[2].split()[0])
        assert found >= round(before + spent, 3) - 0.002
        assert spent > 0
    assert sum(share.joules for share in pool.shares.values()) <= pool.energy.read(anew=True).joules


@pytest.mark.parametrize(("budget", "free", "share"), [
    (None, 8 << 30, 1 << 30), (None, 100 << 20, 64 << 20), (4 << 30, 8 << 30, 256 << 20),
])  # fmt: skip
def test_earlier_prompts_have_share_of_memory(
    budget: int | None, free: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of what is free, less what models that are still to come take; of a budget a sixteenth."""
    use = memory_use()
    granted = MemoryLimit(free + use.rss, "free memory")
    monkeypatch.setattr("edge.server.models.pool.memory_limit", lambda: granted)
    monkeypatch.setattr("edge.server.models.pool.memory_use", lambda: use)  # which others' memory pressure changes
    with served(options={"memory": budget}) as client:
        chat(client)
        found = client.get("/props").json()["edge"]["memory"]["prompts"]
        assert found == share if budget or free < 1 << 30 else share * 0.9 < found <= share


def test_client_that_does_not_read_is_given_up() -> None:
    async def read() -> None:
        flow = Flow(Claim(Ledger(None)))
        for _ in range(100):
            flow.put(Piece(0, "x" * (64 << 10)))
        assert isinstance(await flow.get(), Piece)
        with pytest.raises(RefusedError, match="too slow"):
            await flow.get()
        flow.close()

    asyncio.run(read())


# Memory of requests


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(number: int) -> dict[str, Any]:
    properties = {f"argument_{n}": {"type": "string"} for n in range(4)}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": {"properties": properties}}}


def test_oversized_requests_are_refused() -> None:
    with served() as client:
        ledger = hub_of(client).pool.ledger
        ledger.budget = 256 << 20
        for path, body in (
            (CHATS, {"messages": [{"role": "user", "content": "word " * 400_000}]}),
            (CHATS, {"messages": HELLO, "max_tokens": 400, "n": 16, "logprobs": True, "top_logprobs": 20}),
            (CHATS, {"messages": HELLO, **form({"enum": [f"a{n}" for n in range(60_000)]})}),
            (CHATS, {"messages": HELLO, **form({"properties": {f"a{n}": {"type": "string"} for n in range(2000)}})}),
            (CHATS, {"messages": HELLO, "tools": [tool(n) for n in range(300)], "tool_choice": "required"}),
            (CHATS, {"messages": HELLO, "x": [[]] * 120_000}),
            ("/tokenize", {"content": "a b " * 250_000, "with_pieces": True}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 413
            assert "bytes of memory" in error_of(response)["message"]
            assert ledger.claims.total() == 0


def test_models_may_enter_while_figures_are_told() -> None:
    ledger, other = Ledger(None), SimpleNamespace(weights=1, lora=0, kv=0, snapshots=0, scratch=0)

    class Entering(SimpleNamespace):
        @property
        def weights(self) -> int:
            ledger.models["other"] = other  # type: ignore[assignment]
            return 1

    ledger.models["first"] = Entering(lora=0, kv=0, snapshots=0, scratch=0)  # type: ignore[assignment]
    assert ledger.figures()["weights"] == 1


def test_requests_that_wait_leave_room_for_those_that_run() -> None:
    ledger = Ledger(512 << 20)  # 32 MiB of which are for requests
    waiting, running = Claim(ledger), Claim(ledger)
    waiting.add("bodies", 20 << 20, waits=True)
    with pytest.raises(RefusedError) as full:
        Claim(ledger).add("bodies", 5 << 20, waits=True)
    assert (full.value.status, bool(full.value.retry)) == (429, True)
    running.add("grammars", 12 << 20)
    waiting.hold().release()
    assert ledger.claims.total() == 32 << 20
    waiting.release()
    running.release()
    assert ledger.claims.total() == 0


def test_claims_last_as_long_as_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, put = list[dict[str, int]](), Flow.put
    body = {"messages": [{"role": "user", "content": "x" * 10_000}], "max_tokens": 20, "ignore_eos": True}
    with served() as client:
        ledger = hub_of(client).pool.ledger
        monkeypatch.setattr(Flow, "put", lambda self, event: (seen.append(dict(ledger.claims)), put(self, event))[1])
        assert client.post(CHATS, json={**body, "stream": True}).status_code == 200
        assert len(seen) > 20
        assert all(each["bodies"] > 100_000 and each["answers"] for each in seen)
        assert ledger.claims.total() == 0

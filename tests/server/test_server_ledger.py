"""Memory of requests: claimed before it is taken, and for as long as it lives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import open_golden
from serving import HELLO, MODEL, PLAIN, error_of, hub_of, served
from starlette.testclient import TestClient

from edge.devices.power import find_meter
from edge.run.budgets.shares import EnergyLedger
from edge.run.request import Request
from edge.run.starting.loading import load
from edge.server.events import Flow
from edge.server.ledger import Claim, Ledger
from edge.server.models.worker import Job, Turns, Worker

CHATS = "/v1/chat/completions"
RESERVE = 16 << 20  # bytes for requests, as under --memory 256MiB
WORDS = "word " * 400_000


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as client:
        hub_of(client).pool.ledger.budget = 16 * RESERVE
        yield client
        assert hub_of(client).pool.ledger.claims.total() == 0


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(number: int) -> dict[str, Any]:
    properties = {f"argument_{n}": {"type": "string"} for n in range(4)}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": {"properties": properties}}}


@pytest.mark.parametrize(("path", "body"), [
    (CHATS, {"messages": [{"role": "user", "content": WORDS}]}),
    (CHATS, {"messages": HELLO, "max_tokens": 400, "n": 16, "logprobs": True, "top_logprobs": 20}),
    (CHATS, {"messages": HELLO, **form({"enum": [f"a{n}" for n in range(60_000)]})}),
    (CHATS, {"messages": HELLO, **form({"properties": {f"a{n}": {"type": "string"} for n in range(2000)}})}),
    (CHATS, {"messages": HELLO, "tools": [tool(n) for n in range(300)], "tool_choice": "required"}),
    (CHATS, {"messages": HELLO, "x": [[]] * 120_000}),
    ("/tokenize", {"content": "a b " * 250_000, "with_pieces": True}),
])  # fmt: skip
def test_oversized_requests_are_refused(client: TestClient, path: str, body: dict[str, Any]) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 413
    assert "bytes of memory" in error_of(response)["message"]
    assert hub_of(client).pool.ledger.claims.total() == 0


def test_many_biases_are_refused(client: TestClient) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "logit_bias": {f"{n}": 1 for n in range(20_000)}}
    response = client.post(CHATS, json=body)
    assert response.status_code == 400
    assert "at most 1024" in error_of(response)["message"]


def test_claims_last_as_long_as_stream() -> None:
    with served() as client:
        claims = hub_of(client).pool.ledger.claims
        seen = []
        body = {"messages": [{"role": "user", "content": "x" * 10_000}], "max_tokens": 20, "ignore_eos": True}
        real = hub_of(client).pool.ledger
        answering = type(hub_of(client)).ask

        async def ask(self: Any, *given: Any, **more: Any) -> Any:
            found = await answering(self, *given, **more)
            put = found.flow.put

            def watched(event: Any) -> None:
                seen.append(dict(real.claims))
                put(event)

            found.flow.put = watched
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(hub_of(client)), "ask", ask)
            assert client.post(CHATS, json={**body, "stream": True}).status_code == 200
        assert len(seen) > 20
        assert all(each["bodies"] > 100_000 and each["answers"] for each in seen)
        assert claims.total() == 0


def test_abandoned_work_returns_its_claim() -> None:
    """Embeddings and scores whose client goes away meanwhile."""
    ledger, energy, done = Ledger(None), EnergyLedger(find_meter()), threading.Event()
    worker = Worker("x", lambda: load(open_golden(MODEL).model, **PLAIN), Turns(energy), energy.share())

    def work(session: Any, job: Job) -> bool:
        job.flow.close()
        worker.when_done(job.flow, job.flow.claim.release)
        job.flow.claim.add("answers", 1000)
        done.set()
        return False

    async def ask() -> None:
        worker.submit(Job(Flow(Claim(ledger)), 0, Request("x"), (), Claim(ledger), work=work))

    asyncio.run(ask())
    assert done.wait(120)
    worker.close()
    assert ledger.claims.total() == 0

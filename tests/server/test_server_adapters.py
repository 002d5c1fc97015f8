"""LoRA adapters as names of models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, open_golden
from lora_files import write_adapter
from serving import MODEL, PLAIN, chat, error_of, hub_of, served

from edge.options import Options
from edge.run.request import Request
from edge.run.starting.loading import load
from edge.server.events import Piece
from edge.server.ledger import Claim
from edge.server.running import make_hub
from edge.server.settings import Settings


def test_adapters_are_models(tmp_path: Path) -> None:
    model = open_golden(MODEL).model
    small = write_adapter(tmp_path / "small.gguf", model, rank=2, seed=1)
    large = write_adapter(tmp_path / "large.gguf", model, rank=8, seed=2)
    with load(model, lora=str(large), **PLAIN) as session:
        answers = {}
        for name, lora in (("", None), (":small", small), (":large", large)):
            session.set_lora(lora)
            answers[name] = session.generate("Hello", max_tokens=8, ignore_eos=True)
    assert len(set(answers.values())) == 3
    with served(adapters=[f"small={small}", f"{MODEL}/large={large}"]) as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == [MODEL, f"{MODEL}:small", f"{MODEL}:large"]
        for name in ("", ":small", ":large", "", ":small"):
            found = chat(client, model=MODEL + name)
            assert found["choices"][0]["message"]["content"] == answers[name]
            assert found["model"] == MODEL + name
        assert hub_of(client).pool.loads == 1
        response = client.post("/v1/chat/completions", json={"messages": [], "model": f"{MODEL}:none"})
        assert error_of(response)["code"] in ("model_not_found", "invalid_value")


def test_requests_with_different_adapters_are_answered_together(tmp_path: Path) -> None:
    """While one answer goes on without end, others come, with their own adapters; `--lora` is that of the model."""
    pytest.importorskip("tvm")
    model = open_golden(MODEL).model
    files = {rank: write_adapter(tmp_path / f"{rank}.gguf", model, rank, seed=rank) for rank in (2, 8)}
    options: dict[str, Any] = {"backend": "cpu", "max_kv_size": 256, "threads": 1, "lora": str(files[8])}
    expected = {}
    with load(model, **options) as session:
        for name, lora in ((MODEL, files[8]), (f"{MODEL}:small", files[2])):
            session.set_lora(lora)
            expected[name] = session.generate("Hello", raw=True, max_tokens=8, ignore_eos=True)
    assert len(set(expected.values())) == 2

    async def ask() -> None:
        parsed = Options.parse(sequences=5, **options)
        hub = make_hub([str(GOLDEN / f"{MODEL}.gguf")], parsed, Settings.parse(adapters=[f"small={files[2]}"]))
        try:
            endless = await hub.ask(
                f"{MODEL}:small", [Request("Once", 1 << 30, raw=True, ignore_eos=True)], Claim(hub.pool.ledger)
            )
            assert isinstance(await endless.flow.get(), Piece)
            for name, text in expected.items():
                answering = await hub.ask(
                    name, [Request("Hello", 8, raw=True, ignore_eos=True)], Claim(hub.pool.ledger)
                )
                events = [event async for event in answering.events()]
                answering.close()
                assert "".join(event.text for event in events if isinstance(event, Piece)) == text
            assert endless.lease.worker.running
            assert endless.lease.session.plan.config.loras == 2
            endless.close()
        finally:
            await hub.pool.close()

    asyncio.run(ask())

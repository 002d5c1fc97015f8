"""Tokens that a GPU picks: kernels beside NumPy, the engine beside itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from conftest import GOLDEN, GPU_HOST, SOME_GPU, exhaustive, first_adapter, on_gpu

from edge.backends.kv_cache import end_of
from edge.backends.tvm.gpu import picking
from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.engine import GPUEngine
from edge.backends.tvm.gpu.hosts import Device, open_device
from edge.backends.tvm.gpu.program import Kernel, Slice
from edge.devices.power.estimate import Estimate
from edge.devices.profiles.profile import Power
from edge.model.model import open_model
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import FloatArray

pytest.importorskip("tvm")

CHUNK = 8
NAN = np.float32(np.nan)


@cache
def kernels(language: str) -> dict[str, Kernel]:
    from edge.backends.tvm.gpu.kernels import pick
    from edge.backends.tvm.gpu.lowering import lower

    return {built.name: lower(built, language) for built in pick.kernels()}


@pytest.fixture(scope="module", params=[GPU_HOST, exhaustive("opencl")])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with closing(open_device(adapter := first_adapter(request.param))) as opened:
        opened.prepare(kernels(adapter.language))
        yield opened


def logits_like(kind: str, vocab: int) -> FloatArray:
    values = np.random.default_rng(vocab).standard_normal(vocab).astype(np.float32)
    if kind == "tied":
        values = np.copysign(np.round(values), np.resize(np.array([1, -1], np.float32), vocab)).astype(np.float32)
    if kind == "tiny":
        values *= np.float32(1e-41)  # subnormal
    if kind == "infinite":
        values[:] = -np.inf
        values[vocab // 2 :: 7] = np.inf
    if kind == "damaged":
        values[vocab // 2 :] = np.copysign(NAN, values[vocab // 2 :])
    return values


@pytest.mark.parametrize("kind", ["normal", "tied", "tiny", "infinite", "damaged"])
@pytest.mark.parametrize("vocab", [5, 1025, 70_000, exhaustive(262_144)])
def test_picks_are_numpys(device: Device, vocab: int, kind: str) -> None:
    logits = logits_like(kind, vocab)
    order = np.argsort(np.where(np.isnan(logits), -np.inf, -logits.astype(np.float64)), kind="stable")
    banned = order[[0, 2]] if kind == "normal" else order[:0]
    state = np.zeros(State.WORDS, np.uint32)
    state[State.BANNED] = banned.size
    state[State.BANS :][: banned.size] = banned
    rows = np.stack([logits, logits[::-1]])
    sizes = {"logits": rows.nbytes, "tables": state.nbytes, "tokens": 4 * CHUNK + 16}
    sizes |= {"found": 2 * picking.found_bytes(vocab)}
    buffers = {name: device.create(size) for name, size in sizes.items()}
    device.write(buffers["logits"], 0, rows)
    device.write(buffers["tables"], 0, state)
    argmax = picking.argmax(vocab, CHUNK, Slice("logits"))
    device.run(device.record(argmax, buffers), times=2)
    tokens = device.read(buffers["tokens"], 0, sizes["tokens"]).view(np.int32)
    allowed = logits.copy()
    allowed[banned] = -np.inf
    likeliest = int(allowed.argmax())
    told = -1 - likeliest if kind == "damaged" else likeliest
    assert [tokens[0], *tokens[CHUNK : CHUNK + 3]] == [likeliest, told, told, 0]
    state[[State.APPENDED, State.ANGLE, State.POSITION, State.PICKED]] += 2
    assert (device.read(buffers["tables"], 0, state.nbytes).view(np.uint32) == state).all()

    device.run(device.record(picking.top(vocab, Slice("logits"), 2), buffers), 2)
    for number, row in enumerate(rows):
        order = np.argsort(np.where(np.isnan(row), -np.inf, -row.astype(np.float64)), kind="stable")
        at = number * picking.found_bytes(vocab) + picking.top_offset(vocab)
        found = device.read(buffers["found"], at, 8 * picking.TOP).view(np.uint32)
        for count in (1, min(vocab, picking.TOP)):
            ids, values = picking.candidates(found, count)
            assert np.array_equal(ids, order[:count])
            assert np.array_equal(values, row[ids], equal_nan=True)
    for buffer in buffers.values():
        device.free(buffer)


# The engine


PROMPT = np.arange(5, 25, dtype=np.int32)


@pytest.fixture(scope="module", params=["llama-window", exhaustive("gemma3")])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    model = open_model(GOLDEN / f"{request.param}.gguf")
    with on_gpu(SOME_GPU), load(model, backend="gpu", max_kv_size=64, threads=1) as opened:
        yield opened


def test_picked_tokens_maximize_the_logits(session: Session) -> None:
    """Ids and rows, bit for bit, where windows and rings end, too, and behind rows that were forgotten again."""
    engine = session.engine
    assert isinstance(engine, GPUEngine)
    session.reset()
    banned = np.array([7, 200], np.int32)
    kv = engine.kv
    token, ran, sizes = int(engine.forward(PROMPT).argmax()), PROMPT.size, list[int]()
    for wanted in (1, 5, 2, 26, 4):
        length, end = kv.length, end_of(kv)
        ids = engine.run_greedy(token, wanted, banned)
        sizes.append(ids.size)
        assert kv.length == length + ids.size
        assert 1 <= ids.size <= wanted
        kept = max(1, ids.size - 2)
        kv.truncate(length + kept)
        rows = kv.save(length)
        kv.truncate(length, end)
        one_by_one = list[int]()
        for each in [token, *ids[: kept - 1]]:
            logits = engine.forward(np.array([each], np.int32))
            logits[banned] = -np.inf
            one_by_one.append(int(logits.argmax()))
        assert one_by_one == ids[:kept].tolist()
        again = kv.save(length)
        assert bytes(rows.data) == bytes(again.data)
        assert rows.tail == again.tail
        assert rows.positions.tolist() == again.positions.tolist()
        token, ran = one_by_one[-1], ran + kept
    assert kv.length == ran
    assert max(sizes) > 10
    found, values = engine.forward_top(PROMPT[:3], 9)
    kv.truncate(ran)
    logits = engine.forward(PROMPT[:3])
    assert np.array_equal(found, np.argsort(-logits, kind="stable")[:9])
    assert np.array_equal(values, logits[found])


def test_all_that_the_device_runs_counts_as_work(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of more cores than drivers have, which run on the CPU."""
    engine, clock = session.engine, Estimate(Power(core_watts=1.0, profile="x"))
    assert isinstance(engine, GPUEngine)
    monkeypatch.setattr(engine.sequence(0), "config", replace(engine.config, threads=1000))
    banned = np.zeros(0, np.int32)
    for run in (
        lambda: engine.forward(PROMPT), lambda: engine.forward_all(PROMPT), lambda: engine.forward_top(PROMPT, 3),
        lambda: engine.run_greedy(1, 4, banned),
    ):  # fmt: skip
        engine.kv.truncate(0)
        before, cpu = clock.read().joules, time.process_time()
        run()
        assert clock.read().joules - before > 2 * (time.process_time() - cpu)  # watt

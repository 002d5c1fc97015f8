"""Weights larger than the budget: the same numbers as when they stay in memory, in less of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, Child, Engines, copy_kernels, examples, exhaustive, run_child
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.backends import find_backend
from edge.backends.base import Backend, Engine, EngineConfig
from edge.backends.tvm import CPU
from edge.backends.tvm.cpu.streaming import BLOCK, STEPS, Disk, make_streams, packed_bytes, streaming_need
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.devices.memory import MemoryUse
from edge.devices.memory.paging import measure_paging
from edge.errors import BudgetError
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import Plan, make_plan
from edge.storage.cache import entries
from edge.types import FloatArray

MIB = 1 << 20
PAGE = mmap.PAGESIZE
MODELS = ("llama-gqa-tied", "llama-gqa-untied", "gemma2", "gpt2", "phi3", "qwen2")
SMALL_ROWS = {"llama-gqa-tied": "f16", "gpt2": "f16"}  # the others in float32, for which other tests compile them
CONFIG = EngineConfig(capacity=64, chunk=8, kv_dtype="f16", threads=2)
REAL = replace(CONFIG, drafts=7)  # with code for drafts, as sessions have it compiled
RESIDENT = 60 * MIB  # of the process that plans


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden models are smaller than a block."""
    monkeypatch.setattr("edge.backends.tvm.cpu.streaming.BLOCK", PAGE)


@lru_cache
def opened(name: str) -> Model:
    return open_model(name if name == "smollm2-135m" else GOLDEN / f"{name}.gguf")


def native(model: Model) -> Backend:
    return find_backend("cpu", model.file, model.spec)


def answers(engine: Engine, vocab: int) -> list[FloatArray]:
    """Logits of a prompt in chunks, of steps, after an eviction, and of more steps."""
    tokens = (np.arange(60) * 37 % vocab).astype(np.int32)
    found = [engine.forward(tokens[:21]).copy()]
    found += [engine.forward(tokens[at : at + 1]).copy() for at in range(21, 30)]
    engine.kv.keep(np.r_[0:4, 12:30].astype(np.int32), close_gaps=True)
    found.append(engine.forward_all(tokens[30:43]).copy())
    return found + [engine.forward(tokens[at : at + 1]).copy() for at in range(43, 50)]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", [*MODELS[:3], *(exhaustive(each) for each in MODELS[3:])])
def test_streamed_weights_change_no_bit(name: str, engines: Engines) -> None:
    model, config = opened(name), replace(CONFIG, kv_dtype=SMALL_ROWS.get(name, "f32"))
    backend = native(model)
    need = backend.footprint(model.spec, config)
    assert need.least_weights is not None
    expected = answers(engines(backend.load(model.file, model.spec, config)), model.spec.vocab)
    for resident in (1, (need.least_weights + need.weights) // 2):
        engine = engines(backend.load(model.file, model.spec, replace(config, resident=resident)))
        found = answers(engine, model.spec.vocab)
        assert all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True))


def in_page_cache(path: Path) -> int:
    """Bytes of a file that the system holds."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // PAGE))()
        start = ctypes.addressof(first := ctypes.c_char.from_buffer(mapped))
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), pages)
        del first
        assert not failed
        return sum(page & 1 for page in pages) * PAGE


def can_put_out(folder: Path) -> bool:
    """Whether the system takes pages of a file there out of its page cache when it is asked to."""
    path = folder / "probe"
    path.write_bytes(bytes(16 * MIB))
    os.sync()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert not any(mapped[::PAGE])  # all are there
        before = in_page_cache(path)
        for _ in range(10):  # Linux may be about to move them between its lists
            with suppress(OSError):
                mapped.madvise(21)  # MADV_PAGEOUT
            if in_page_cache(path) < before:
                return True
            time.sleep(0.05)
        return False


def test_weights_streamed_from_disk_leave_the_page_cache(
    smollm2: Model, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else the system makes room for it by what stays."""
    backend, layout = native(smollm2), make_layout(smollm2.file, smollm2.spec)
    backend.load(smollm2.file, smollm2.spec, REAL).close()
    copy_kernels(tmp_path)
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))  # no other process maps these weights
    least = backend.footprint(smollm2.spec, REAL).least_weights
    assert least is not None
    config = replace(REAL, resident=least + 40 * MIB)
    left = layout.nbytes - backend.footprint(smollm2.spec, config).streamed // 2  # single pages may stay for a while
    engine = engines(backend.load(smollm2.file, smollm2.spec, config))
    [path] = [entry.path for entry in entries("weights")]
    token = np.array([1], np.int32)
    expected = engine.forward(token).copy()
    assert in_page_cache(path) > 0.9 * layout.nbytes
    if not can_put_out(tmp_path):
        pytest.skip("this system keeps pages of files")
    monkeypatch.setattr(Disk, "wanted", lambda self: 1)
    for _ in range(20):
        engine.kv.truncate(0)
        assert np.array_equal(engine.forward(token), expected)
        if in_page_cache(path) < left:
            break
        time.sleep(0.05)
    assert 40 * MIB < in_page_cache(path) < left


# Which blocks


@lru_cache
def layout_of(name: str) -> PackedLayout:
    return make_layout(opened(name).file, opened(name).spec)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", MODELS)
@given(kept=st.integers(0, STEPS), threads=st.integers(1, 5))
def test_every_block_either_stays_or_goes_once(name: str, kept: int, threads: int) -> None:
    layout = layout_of(name)
    streams = make_streams(layout, kept, threads)
    *pieces, looked_up = streams.pieces
    going = [block for piece in pieces for first, count in piece for block in range(first, first + count)]
    rows = {block for first, count in looked_up for block in range(first, first + count)}
    staying = [block for first, count in streams.kept for block in range(first, first + count)]
    assert len(set(going)) == len(going)
    assert not set(staying) & (set(going) | rows)
    assert sorted({*going, *rows, *staying}) == list(range(-(-layout.nbytes // PAGE)))
    if layout.network.head == "token_embd":  # all of the head that goes
        assert rows == {block for piece in pieces[layout.shape.layers :] for first, count in piece
                        for block in range(first, first + count)}  # fmt: skip


@given(resident=st.integers(1, 120 * MIB), threads=st.integers(1, 8))
def test_more_memory_never_streams_more(resident: int, threads: int) -> None:
    spec = opened("smollm2-135m").spec
    config = EngineConfig(256, 16, "f16", threads, resident=resident)
    need, more = (streaming_need(spec, replace(config, resident=size)) for size in (resident, resident + MIB))
    assert 0 < more.streamed <= need.streamed <= packed_bytes(spec)
    layout = layout_of("smollm2-135m")
    *pieces, _ = make_streams(layout, need.kept, threads).pieces
    streamed = sum(count for piece in pieces for _, count in piece) * BLOCK
    assert streamed == pytest.approx(need.streamed, abs=3 * BLOCK)


def passes_as_from_a_disk(count: int, waits: Callable[[int, list[int]], bool], monkeypatch: pytest.MonkeyPatch) -> str:
    """A digit for each pass. waits: whether pages have to be waited for, given the pass's number and all digits."""
    faults, passes = 5, list[int]()
    monkeypatch.setattr("edge.backends.tvm.cpu.streaming._waited_for", lambda: faults)
    disk = Disk()
    for number in range(count):
        passes.append(disk.wanted())
        faults += 100 * waits(number, passes) + 1  # now and then a page of some library
    return "".join(map(str, passes))


def test_while_memory_is_short_pages_come_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = passes_as_from_a_disk(400, lambda number, passes: True, monkeypatch)
    assert found.startswith("0" + "1" * 4 + "00" + "1" * 8 + "00" + "1" * 16 + "00" + "1" * 32 + "00" + "1" * 64 + "00")
    assert found[200:].count("0") <= 8


@given(glitches=st.sets(st.integers(0, 60)))
def test_where_memory_suffices_pages_stay(glitches: set[int]) -> None:
    """A pass waits for pages that the pass before put out, and at a glitch."""
    with pytest.MonkeyPatch.context() as patch:
        found = passes_as_from_a_disk(200, lambda number, passes: number in glitches or passes[-2:-1] == [1], patch)
    assert "1" not in found[150:]
    assert ("1" in found) == bool(glitches)


# What a plan makes of it


@pytest.fixture
def planning_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it always is, and nothing is left to compile."""
    monkeypatch.setattr("edge.plan.plan.memory_use", lambda: MemoryUse(RESIDENT, RESIDENT, None, None))
    monkeypatch.setattr(CPU, "first_run", lambda *_: 0)


def plan(memory: int, **request: int | None) -> Plan:
    model = opened("smollm2-135m")
    return make_plan(model.spec, native(model), Options(**request, memory=memory))  # type: ignore[arg-type]


@pytest.mark.usefixtures("planning_process")
@pytest.mark.parametrize(("policy", "streams"), [("streaming", False), ("full", True)])
def test_plan_gives_up_the_smaller_share(policy: str, streams: bool) -> None:
    made = plan(300 * MIB, expected_tokens=7730, expected_prompt=7670, kv_policy=policy)
    assert bool(made.bytes.streamed) == streams
    assert (made.config.capacity >= 7730) == streams
    assert ("evicting" in made.rows_by) == (policy == "streaming")


@pytest.mark.usefixtures("planning_process")
@settings(max_examples=examples(8))
@given(memory=st.integers(110 * MIB, 200 * MIB))
def test_streamed_plan_fills_its_budget(memory: int) -> None:
    made = plan(memory, expected_tokens=700)
    assert made.bytes.total + made.bytes.reserve <= memory
    assert made.config.capacity == 768
    if made.config.resident:
        assert made.bytes.total + made.bytes.reserve > memory - MIB


@pytest.mark.usefixtures("planning_process")
@pytest.mark.parametrize(("memory", "prompt", "answer"), [(125, 900, 20), (140, 40, 60), (160, 300, 100)])
def test_no_other_chunk_reads_less(memory: int, prompt: int, answer: int) -> None:
    """By passes over streamed weights; few answers are as long as they may be."""
    wanted, expected = {"expected_tokens": prompt + answer, "expected_prompt": prompt}, min(answer, max(1, prompt // 8))
    made = [plan(memory * MIB, **wanted, prefill_step_size=size) for size in (None, 16, 32, 64, 128, 256)]
    assert made[0].config.resident
    same = [each for each in made if each.config.capacity == made[0].config.capacity]
    passes = [-(-prompt // each.config.chunk) + expected for each in same]
    first, *others = [count * each.bytes.streamed for count, each in zip(passes, same, strict=True)]
    assert others
    assert first <= min(others) + 1.25 * MIB * passes[0]  # weights stay in whole MiB


@pytest.mark.usefixtures("planning_process")
def test_smallest_budget_has_weights_streamed() -> None:
    with pytest.raises(BudgetError, match=r"\(256 KV rows, weights streamed\)") as caught:
        plan(50 * MIB)
    assert plan(caught.value.smallest or 0).config.resident


# A process of its own

_RUN = """
import json, sys
import edge
import numpy as np

memory, rows = int(sys.argv[1]) or None, int(sys.argv[2])
model = edge.open_model("smollm2-135m")
prompt = (1000 + 97 * np.arange(rows - 24, dtype=np.int32)) % 49000  # from all over the table
drawn = []
with edge.load(model, backend="cpu", memory=memory, threads=2, expected_tokens=rows) as session:
    text = session.generate(prompt, max_tokens=24, ignore_eos=True)
    memory = session.report.to_dict()["memory"]
    print(json.dumps({"text": text, "memory": memory, "predicted": session.plan.predicted_peak,
                      "rows": session.plan.config.capacity}))
"""


def run(memory: int, rows: int) -> Child:
    child = run_child(_RUN, memory, rows)
    assert child.status == 0, child.errors
    return child


@pytest.mark.wing("SmolLM2 135M")
@pytest.mark.slow
@pytest.mark.parametrize("share", [exhaustive(0.6), 0.35])
def test_weights_above_their_budget_give_the_same_tokens(share: float) -> None:
    run(0, 512)  # compiles, and packs
    ample = run(0, 512)
    counted = ample.output["memory"]
    budget = int(counted["interpreter"] + share * (counted["weights"] + counted["kv"]) + counted["scratch"] + 6 * MIB)
    streamed = run(budget, 512)
    assert streamed.output["text"] == ample.output["text"]
    assert streamed.output["rows"] == ample.output["rows"]
    assert streamed.peak <= budget < ample.peak
    # Weights that stay count whole, and 8 to 10 MiB of them are never touched; how many pages of libraries are mapped
    # depends on the page cache, by some MiB.
    assert streamed.peak <= streamed.output["predicted"] <= streamed.peak + 20 * MIB
    assert streamed.output["memory"]["streamed"] > 0
    assert ample.output["memory"]["streamed"] == 0


# What it costs


def test_streaming_cost_is_measured(tmp_path: Path) -> None:
    paging = measure_paging(tmp_path, 2)
    assert paging is not None
    assert 0 <= paging.cached < 1e-6
    assert 0 < paging.disk < 1e-4
    assert not list(tmp_path.iterdir())
    assert measure_paging(tmp_path / "new", 1) is not None
    (tmp_path / "file").touch()
    assert measure_paging(tmp_path / "file", 1) is None

"""The KV cache of the C runtime and its Python twin: the same operations leave the same bytes in the same places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import exhaustive
from runtime_kv import Case, InC, make_rows, make_twin, new_rows

from edge.apps.gpu_programs import SNAPSHOTS
from edge.backends.kv_cache import KVState, RewindError
from edge.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # of keys too large for float16

RINGED: dict[str, Any] = {"windows": (20, 0, 9), "kinds": (1, 0, 1)}
LATENT: dict[str, Any] = {"kv_heads": 1, "head": 144, "value": 128, "shared": True, "first": 64, "pairs": 8}
HYBRID: dict[str, Any] = {"windows": (0,) * 4, "kinds": (0,) * 4, "states": (32, 0, 80, 0)}
CASES = {
    "streaming": Case(),
    "f32": Case(dtype="f32", kv_heads=1, head=16, pairs=8),
    "int8": Case(dtype="int8", head=80, pairs=40),
    "int4": Case(dtype="int4", head=160, pairs=48),
    "pinned": Case(dtype="int8", keep=19),
    "window": Case("window", keep=0),
    "full": Case("full", capacity=200),
    "h2o": Case("h2o", context=150),
    "h2o int4": Case("h2o:aging=0,recent=0.25", "int4", capacity=45),
    "h2o aging": Case("h2o:aging=0.6", ties=False),  # NumPy's powers differ in the last bit between processors
    "h2o small": Case("h2o", "int8", capacity=16),
    "ring": Case(**RINGED),
    "ring int8": Case("h2o", "int8", **RINGED, context=150),
    "small values": Case(kv_heads=2, head=48, value=16, dtype="int8"),
    "latent": Case(**LATENT, keep=19),
    "latent int4": Case(dtype="int4", **LATENT, keep=19),
    "latent h2o": Case("h2o", "int8", **LATENT, context=150),
    "apart": Case(**RINGED, kv_heads=1, head=32, ring=(2, 16)),
    "apart int4": Case(dtype="int4", **RINGED, kv_heads=2, head=16, ring=(1, 48), keep=19),
    "apart h2o": Case("h2o", "int8", **RINGED, kv_heads=1, ring=(3, 32), context=150),
    "all windowed": Case(windows=(12, 30)),
    "long": Case(long_from=40, capacity=90, **RINGED),
    "long h2o": Case("h2o", long_from=80),
    "kvzap": Case("kvzap", context=150),
    "kvzap int8": Case("kvzap:floor=0.5,kernel=1", "int8", head=80, pairs=40, keep=9),
    "kvzap int4": Case("kvzap", "int4", head=160, pairs=48, capacity=45, context=100),
    "kvzap even": Case("kvzap:floor=1", "f32", **RINGED, context=150),
    "kvzap latent": Case("kvzap", "int8", **LATENT, long_from=80, balance=-5),
    "kvzap states": Case("kvzap", "int8", **HYBRID, context=150),
    "states": Case(**HYBRID),
    "states ring": Case(windows=(20, 0, 0), kinds=(1, 0, 0), states=(0, 0, 48)),
}
STEPS = 60
BAD_FILE, FULL = -2, -6


class Pair:
    """Both caches, and what is done to them."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        heads = len(case.windows) * case.most_heads
        self.normals = self.rng.standard_normal((heads, case.longest)).astype(np.float32)
        self.normals /= np.linalg.norm(self.normals, axis=-1, keepdims=True)
        self.twin, self.c = make_twin(case, self.normals), InC(case, self.normals)
        self.rows = make_rows(case, self.twin)
        self.ends: dict[int, KVState] = {}  # to which both can go back, by their numbers of rows

    def run(self, count: int) -> None:
        count, evicted = min(count, self.case.chunk), self.rows.evicted
        fits = self.rows.make_room(count)
        self.ends = self.ends if evicted == self.rows.evicted else {}
        assert self.c.make_room(count) == fits
        self.check()
        if not fits:
            return
        self.twin.announce(count)
        self.c.announce(count)
        self.twin.prepare(count)
        self.c.prepare(count)
        arena = self.twin.store.arena
        for name in ("starts", "lengths"):
            np.testing.assert_array_equal(self.c.array(name, getattr(arena, name)), getattr(arena, name))
        for store, new in zip(self.twin.stores, new_rows(self.twin, count, self.rng, self.largest), strict=True):
            other = self.c.rows_like(store.rows, self.prefix(store))
            for name in store.rows.arrays:
                other.scatter(name, new, store.rows.gather(name, new))
        if state := self.twin.state:
            state.values[:] = self.rng.standard_normal(state.values.size)
            self.c.array("states", state.values)[:] = state.values
        self.twin.appended(count)
        self.c.appended(count)
        paid = self.rng.random(arena.paid.size, np.float32)
        paid = np.floor(4 * paid) if self.case.ties else paid
        arena.paid += paid
        self.c.array("paid", arena.paid)[:] += paid

    @property
    def largest(self) -> int:
        return 1 if self.case.rule.needs.ranks else 6  # scores of larger keys are alike

    def prefix(self, store: object) -> str:
        return "ring_" if self.case.ring and store is not self.twin.store else ""

    def step(self) -> None:
        twin, c, rng = self.twin, self.c, self.rng
        names = ["run"] * 3 + ["one", "evict", "truncate", "shrink", "renumber", "save", "remember"]
        name = rng.choice(names)
        if name in ("run", "one"):
            self.run(1 if name == "one" else int(rng.integers(1, self.case.chunk + 1)))
        elif name == "evict":
            budget = min(int(rng.integers(max(1, twin.length // 2), twin.length + 2)), twin.capacity)
            self.ends = self.ends if budget >= twin.length else {}
            self.rows.shrink(budget)
            c.evict(budget)
        elif name == "truncate":
            length = int(rng.integers(max(0, twin.length - 30), twin.length + 1))
            self.truncate(int(rng.choice(list(self.ends))) if self.ends and rng.random() < 0.7 else length)
        elif name == "shrink" and rng.random() < 0.2:
            capacity = max(1, twin.capacity - twin.free, twin.capacity - int(rng.integers(1, 20)))
            twin.shrink(capacity)
            c.shrink(capacity)
        elif name == "renumber" and rng.random() < 0.3:
            twin.renumber()
            c.renumber()
            self.ends = {}
        elif name == "save" and twin.capacity == self.case.capacity:
            saved = c.save()
            c.close()
            self.c = InC(self.case, self.normals, c.evicted)
            assert self.c.load(saved) == 0
            assert self.c.save() == saved
            self.ends = {}
        elif name == "remember" and twin.state and twin.alike and not twin.ring:
            for _ in range(int(rng.integers(1, 4))):
                kept = min(self.ends, default=0) if rng.random() < 0.5 else 0
                if twin.length:
                    self.ends[twin.length] = twin.save(twin.length)
                    stays, *others = sorted(self.ends) if kept else (0, *sorted(self.ends))
                    names = ([stays] if kept else []) + others[bool(kept) - SNAPSHOTS :]
                    self.ends = {rows: self.ends[rows] for rows in names}
                c.remember(kept)
                self.run(int(rng.integers(1, 9)))
            if self.ends:
                assert c.latest(twin.length) == max(self.ends)
                self.truncate(int(rng.choice(list(self.ends))))
        self.check()

    def truncate(self, length: int) -> None:
        allowed = self.c.can_truncate(length)
        end = self.ends.get(length)
        try:
            self.twin.truncate(length, end)
        except (RewindError, InputError):  # the latter: a head has fewer rows
            assert not allowed
            return
        assert allowed
        self.c.truncate(length)
        self.ends = {rows: each for rows, each in self.ends.items() if rows <= length} if length else {}

    def check(self) -> None:
        twin, c = self.twin, self.c
        assert (c.length(), c.free(), c.capacity()) == (twin.length, twin.free, twin.capacity)
        assert (c.next_position(), c.next_rope_position()) == (twin.next_position, twin.next_rope_position)
        lengths = [c.head_length(head) for head in range(twin.head_lengths.size)]
        assert lengths == twin.head_lengths.reshape(-1).tolist()
        assert c.lengthened() == bool(twin.rope.suffix)
        assert (c.bytes(), c.fixed()) == (twin.nbytes - twin.fixed, twin.fixed)
        assert c.evicted.value == self.rows.evicted
        if twin.state:
            np.testing.assert_array_equal(c.array("states", twin.state.values), twin.state.values)
            assert c.remembered() == SNAPSHOTS * twin.state.nbytes
        for store in twin.stores:
            pairs = zip(store.regions.starts, store.lengths, strict=True)
            rows = np.concatenate([first + np.arange(length) for first, length in pairs])
            other = c.rows_like(store.rows, self.prefix(store))
            for name in store.rows.arrays:
                np.testing.assert_array_equal(other.gather(name, rows), store.rows.gather(name, rows), name)
            for name, array, wanted in (
                ("positions", store.arena.positions, store._windowed), ("paid", store.arena.paid, store.observes),
            ):  # fmt: skip
                if wanted:
                    found = c.array(self.prefix(store) + name, array)
                    np.testing.assert_array_equal(found[rows], array[rows])
        if twin.store.observes:
            np.testing.assert_array_equal(c.ages(), twin.ages.reshape(len(twin.lengths), -1))


@pytest.mark.parametrize("seeds", [range(1), exhaustive(range(1, 60))])
@pytest.mark.parametrize("name", CASES)
def test_operations_leave_the_same_rows(name: str, seeds: range) -> None:
    for seed in seeds:
        pair = Pair(CASES[name], seed)
        for _ in range(STEPS):
            pair.step()
        pair.c.close()


@pytest.mark.parametrize("name", ["pinned", "ring int8", "long", "states", "apart", "kvzap"])
def test_damaged_state_is_refused_or_harmless(name: str) -> None:
    """Most changes hit rows, which are any numbers; the session can run on in any case."""
    pair, rng, refused = Pair(CASES[name], 1), np.random.default_rng(0), 0
    for _ in range(20):
        pair.run(16)
    saved = pair.c.save()
    assert all(pair.c.load(saved[:end]) == BAD_FILE for end in range(0, len(saved), 97))
    for _ in range(300):
        damaged = bytearray(saved)
        at = rng.integers(0, min(len(saved), int(rng.choice([88, 2000, len(saved)]))))
        damaged[at] ^= 1 << int(rng.integers(8))
        refused += pair.c.load(bytes(damaged)) != 0
        assert pair.c.free() <= pair.c.capacity()
        for count in (16, 1, 16):
            if pair.c.make_room(count):
                pair.c.announce(count)
                pair.c.prepare(count)
                pair.c.appended(count)
        pair.c.renumber()
        pair.c.truncate(int(pair.c.length()) // 2 if pair.c.can_truncate(int(pair.c.length()) // 2) else 0)
    assert 50 < refused < 300
    pair.c.close()


def test_state_larger_than_the_cache_is_refused() -> None:
    pair = Pair(CASES["full"], 0)
    for _ in range(5):
        pair.run(16)
    small = InC(replace(CASES["full"], capacity=70), pair.normals)
    assert small.load(pair.c.save()) == FULL
    assert small.length() == 0

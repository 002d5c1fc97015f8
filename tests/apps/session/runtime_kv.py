"""The KV cache of the C runtime beside its Python twin: the same rows go into both."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from conftest import GOLDEN
from runtime_library import PLATFORM, load_runtime, pointer

from edge.apps.sections.model_file import ANGLES, CONFIG, KV_DTYPES, LAYER, POLICIES
from edge.backends.base import EngineConfig
from edge.backends.fixed_state import FixedState
from edge.backends.head_kv import HeadKV
from edge.backends.importance import EXTRA, RowImportance
from edge.backends.ring import LayerKinds
from edge.backends.rope import CacheRope, Rotation
from edge.backends.tvm.kv.householder import reflect
from edge.backends.tvm.kv.memory import ArenaSize, KVMemory
from edge.backends.tvm.kv.row_formats import FORMATS, encode, pack_keys
from edge.backends.tvm.kv.rows import HostRows
from edge.backends.tvm.kv.store import Arena, NativeStore, make_kv
from edge.backends.tvm.packing.shape import Shape
from edge.kv import make_policy, pinned_rows
from edge.model.architectures.angles import Angles
from edge.model.cores import Attention, Rope
from edge.model.model import open_model
from edge.model.structure.layers import Block
from edge.run.sequences.rows import SequenceRows
from edge.types import AnyArray, FloatArray, IntArray

_SPEC = open_model(GOLDEN / "llama-gqa-tied.gguf").spec  # of any model: sequences ask it for little
SINKS = 4  # of the plan; others are pinned in the session
SOURCES = (
    "kv_harness.c", "rows.c", "kv.c", "kv_keys.c", "kv_regions.c", "kv_state.c", "policy.c", "scores.c", "model.c",
    "error.c", *PLATFORM,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """windows, kinds: of each layer. ring: KV heads and values of a head of layers with rings, if these have others.
    value: of values, if they are a part of keys or smaller. first: the first rotated pair.
    states: values of each layer's fixed state; such layers keep no rows. long_from: where LongRoPE's long factors
    begin. keep: pinned rows. ties: many rows get equal attention. balance: of keys behind shared values."""

    policy: str = "streaming"
    dtype: str = "f16"
    windows: tuple[int, ...] = (0, 0)
    kinds: tuple[int, ...] = (0, 0)
    states: tuple[int, ...] = ()
    kv_heads: int = 2
    head: int = 32
    ring: tuple[int, int] | None = None
    pairs: int = 16
    first: int = 0
    value: int = 0
    shared: bool = False
    capacity: int = 60
    chunk: int = 16
    context: int = 4096
    long_from: int = 0
    keep: int = 4
    evict_step: int = 5
    ties: bool = True
    balance: int = 0

    @property
    def rule(self) -> Any:
        return make_policy(self.policy, self.keep, keep=self.keep)

    @property
    def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """KV heads and values of a head, of layers without and with rings."""
        whole = self.kv_heads, self.head
        return whole, self.ring or whole

    @property
    def most_heads(self) -> int:
        return max(heads for heads, _ in self.sizes)

    @property
    def longest(self) -> int:
        """Values of the largest head."""
        return max(values for _, values in self.sizes)

    @property
    def uneven(self) -> bool:
        return bool(self.rule.needs.uneven != "token")

    @property
    def learned(self) -> RowImportance:
        """Random linear models of all heads."""
        heads, key = self.sizes[0]
        rope = Rope(2 * self.pairs, 10000.0, first=2 * self.first)
        core = Attention(heads, heads, key, 1.0, rope=rope, value_dim=self.value, shared_values=self.shared)
        rng, layers = np.random.default_rng(5), self.layer_kinds.whole
        known = {layer: rng.standard_normal((heads, key + EXTRA)).astype(np.float32) / 8 for layer in layers}
        return RowImportance(cast(Any, SimpleNamespace(attention=[core] * len(self.windows), halves=False)), known)

    @property
    def layer_kinds(self) -> LayerKinds:
        return LayerKinds.of(self.windows, np.flatnonzero(self.states).tolist())

    def rotation(self, long: bool = False) -> Rotation:
        angles = []
        for kind in range(max(self.kinds) + 1):
            radians = (10000.0 * (1 + kind)) ** (-np.arange(self.pairs) / self.pairs) / (1 + 2 * long)
            angles.append(Angles(radians, 1.0 + 0.1 * long, first=2 * self.first))
        return Rotation(tuple(angles), self.kinds, self.longest // 2, halves=False)


class TwoRopes(CacheRope):
    """Angles without a model's file."""

    def __init__(self, case: Case) -> None:
        self._limit = case.long_from or None
        self._short, self._long = case.rotation(), case.rotation(long=True)
        self.clear()


def make_twin(case: Case, normals: FloatArray) -> HeadKV[NativeStore[HostRows]]:
    layers = len(case.windows)
    windowed = (False, True) if case.ring else (any(case.windows),)
    cores = [
        Attention(heads, heads, size, 1.0, window=int(window), value_dim=case.value, shared_values=case.shared)
        for (heads, size), window in zip(case.sizes, windowed, strict=False)
    ]
    blocks = tuple(Block("attn_norm", core) for core in cores)
    shape = Shape(layers, 64, 64, "rms", 1e-5, 1.0, 0.0, 1.0, False, blocks, ((0,),))
    rule = case.rule
    config = EngineConfig(
        case.capacity, case.chunk, case.dtype, 1, observes=bool(rule.needs.queries), per_head=rule.needs.looks,
        uneven=case.uneven, pinned=pinned_rows(rule) if rule.close_gaps else 0,
    )  # fmt: skip
    memory = KVMemory.of(shape, case.layer_kinds, config, case.context)
    state = FixedState(case.states) if case.states else None
    arrays = {name: array.zeros() for name, array in memory.bookkeeping().items()}

    def make_arena(size: ArenaSize) -> Arena[HostRows]:
        def move_rows(_: object, pairs: IntArray) -> None:
            for name in rows.arrays:
                rows.scatter(name, pairs[:, 1], rows.gather(name, pairs[:, 0]))

        stored = {size.prefix + name: array.zeros() for name, array in size.stored(case.dtype).items()}
        rows = HostRows(size, stored, case.dtype, normals[:, : size.row.key], move_rows)
        return Arena(shape, rows, arrays, size.prefix)

    arena, *rings = map(make_arena, memory.arenas)
    apart = rings[0] if rings else None
    kv = make_kv(arena, memory.kinds, *memory.regions(), TwoRopes(case), "key", config, state, apart)
    kv.balances = [case.balance] * layers
    return kv


def make_rows(case: Case, kv: object) -> SequenceRows:
    """Policies as a session applies them."""
    engine = SimpleNamespace(kv=kv, spec=replace(_SPEC, context=case.context))
    plan = SimpleNamespace(kv_policy=case.policy, sinks=case.keep, evict_step=case.evict_step, snapshots=0)
    return SequenceRows(cast(Any, engine), cast(Any, plan), None, case.learned if case.rule.needs.ranks else None)


ROWS = ("keys", "values", "key_scales", "value_scales")
RINGS = (*ROWS, "positions")


class Pointers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (*ROWS, "lengths", "positions", "paid", "starts", *(f"ring_{each}" for each in RINGS), "states")
    ]


def library() -> Any:
    c = load_runtime(*SOURCES)
    results: dict[Any, tuple[str, ...]] = {
        ctypes.c_void_p: ("make_session", "session_kv", "session_policy"), Pointers: ("kv_arguments",),
        ctypes.c_int64: ("kv_next_position", "kv_next_rope_position"),
        ctypes.c_uint64: ("kv_bytes", "kv_fixed", "kv_remembered", "kv_saved_bytes", "save_session"),
        ctypes.c_bool: ("kv_lengthened", "kv_can_truncate", "policy_make_room"),
    }  # fmt: skip
    for result, names in results.items():
        for name in names:
            getattr(c, name).restype = result
    return c


@dataclass
class InC:
    """A session's cache and policy in C, with the methods of the Python twins."""

    case: Case
    normals: FloatArray
    evicted: ctypes.c_uint64 = field(default_factory=ctypes.c_uint64)

    def __post_init__(self) -> None:
        case, self.c, pinned = self.case, library(), pinned_rows(self.case.rule)
        config, kinds, rule = np.zeros(1, CONFIG), case.layer_kinds, case.rule
        for name, value in {
            "layers": len(case.windows), "kv_heads": case.most_heads, "head": case.longest, "context": case.context,
            "shapes": [(heads, size, 0 if case.shared else case.value or size) for heads, size in case.sizes],
            "capacity": case.capacity, "chunk": case.chunk, "evict_step": case.evict_step,
            "sinks": min(SINKS, pinned), "pinned": pinned, "policy": POLICIES.index(rule.name),
            "kv_dtype": KV_DTYPES.index(case.dtype),
            "whole": len(kinds.whole), "ringed": len(kinds.ringed),
            "ring_rows": kinds.ring_rows(case.capacity, case.chunk), "ring_window": kinds.window,
            "windowed": any(case.windows), "rope_kinds": max(case.kinds) + 1, "long_from": case.long_from,
            "states": sum(case.states),
            **{each: getattr(rule, each, 0) for each in ("recent", "aging", "floor", "kernel")},
            "ranked": case.sizes[0][1] if rule.needs.ranks else 0,
        }.items():  # fmt: skip
            config[name] = value
        layers = np.zeros(len(case.windows), LAYER)
        layers["window"], layers["rope"] = case.windows, case.kinds
        layers["ringed"] = [layer in kinds.ringed for layer in range(len(layers))]
        layers["rowless"] = [layer not in kinds.whole + kinds.ringed for layer in range(len(layers))]
        layers["latent"], layers["unbalance"] = case.value * case.shared, 2.0**-case.balance
        weights = np.concatenate(
            [each.reshape(-1) for each in case.learned.layers.values()] or [np.zeros(0, np.float32)]
        )
        self._kept = [config, layers, np.frombuffer(_angles(case), np.uint8), self.normals, weights]
        self.session = ctypes.c_void_p(self.c.make_session(*map(pointer, self._kept)))
        self.kv = ctypes.c_void_p(self.c.session_kv(self.session))
        self.policy = ctypes.c_void_p(self.c.session_policy(self.session))
        self.c.policy_pin(self.policy, pinned, case.capacity)

    def close(self) -> None:
        self.c.free_session(self.session)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: getattr(self.c, f"kv_{name}")(self.kv, *map(int, arguments))

    def array(self, name: str, like: AnyArray) -> AnyArray:
        """The memory that a pass reads and writes, as the twin's array."""
        at = getattr(self.c.kv_arguments(self.kv), name)
        return np.frombuffer((ctypes.c_uint8 * like.nbytes).from_address(at), like.dtype)

    def rows_like(self, twin: HostRows, prefix: str = "") -> HostRows:
        """The same memory with the twin's functions. prefix: ring_ for an arena of rings."""
        same = copy(twin)
        same.arrays = {name: self.array(prefix + name, array) for name, array in twin.arrays.items()}
        return same

    def make_room(self, count: int) -> bool:
        return bool(self.c.policy_make_room(self.policy, self.kv, int(count), ctypes.byref(self.evicted)))

    def evict(self, budget: int) -> None:
        self.evicted.value += self.c.policy_shrink(self.policy, self.kv, int(budget))

    def ages(self) -> AnyArray:
        """[heads, length]."""
        ages = np.zeros((self.c.kv_heads(self.kv), self.c.kv_length(self.kv)), np.int32)
        paid = np.zeros(ages.shape, np.float32)
        for head, (one, other) in enumerate(zip(paid, ages, strict=True)):
            self.c.kv_attention(self.kv, head, pointer(one), pointer(other))
        return ages

    def save(self) -> bytes:
        out = np.zeros(self.c.kv_saved_bytes(self.kv), np.uint8)
        assert self.c.save_session(self.session, pointer(out)) == out.size
        return out.tobytes()

    def load(self, saved: bytes) -> int:
        return int(self.c.load_session(self.session, saved, ctypes.c_size_t(len(saved)), None))


def _angles(case: Case) -> bytes:
    parts = []
    for long in (False, True):
        for angles in case.rotation(long).angles:
            head, radians = np.zeros(1, ANGLES), np.zeros(case.longest // 2)
            head["pairs"], head["first"], head["magnitude"] = angles.radians.size, case.first, angles.magnitude
            radians[: angles.radians.size] = angles.radians
            parts += [head.tobytes(), radians.tobytes(), bytes(radians.size)]
    return b"".join(parts)


def new_rows(
    twin: HeadKV[NativeStore[HostRows]], count: int, rng: np.random.Generator, largest: int = 6
) -> list[AnyArray]:
    """Random keys and values behind the last rows, as a pass writes them. largest: exponent of keys, to the base 10.
    Returns the rows of each store's arena."""
    places = []
    for store in twin.stores:
        rows, found = store.rows, []
        for index, head in enumerate(store.heads):
            at = store.regions.starts[index] + store.lengths[index] + np.arange(count)
            sizes = 10.0 ** rng.integers(-6, largest, (count, 1))  # some are too large for float16
            keys = (rng.standard_normal((count, store.row.key)) * sizes).astype(np.float32)
            codes, scales = encode(rows.dtype, reflect(keys, rows.normals[head]))
            rows.scatter("keys", at, pack_keys(rows.dtype, codes))
            rows.scatter("key_scales", at, scales)
            values = rng.integers(0, 60, (count, rows.width("values")))
            rows.scatter("values", at, values.astype(FORMATS[rows.dtype].memory))
            rows.scatter("value_scales", at, rng.random((count, rows.width("value_scales"))))
            found.append(at)
        places.append(np.concatenate(found))
    return places

"""The native engine: tokens in, logits out, by one call of compiled code per step or chunk."""

from __future__ import annotations

import contextvars
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig, LoadProgress
from edge.backends.checks import check_lora, check_positions, check_tokens, check_whole
from edge.backends.counts import ExpertCounts
from edge.backends.fixed_state import FixedState
from edge.backends.head_kv import HeadKV
from edge.backends.kv_cache import state_key
from edge.backends.ring import LayerKinds
from edge.backends.rope import CacheRope, Rotation
from edge.backends.token_table import TokenTable
from edge.backends.tvm import ENGINE
from edge.backends.tvm.adapters import Offsets, adapter_bytes, pack_adapters, padded_rank
from edge.backends.tvm.compiler.compiled import compiled, is_compiled
from edge.backends.tvm.cpu.arguments import Job, Table, fill_table, make_scratch
from edge.backends.tvm.cpu.elf import Call, Image
from edge.backends.tvm.cpu.expert_trace import save_trace
from edge.backends.tvm.cpu.slots import ExpertSlots, reads_size
from edge.backends.tvm.cpu.streaming import Disk, make_streams, streaming_need
from edge.backends.tvm.cpu.timing import thread_words
from edge.backends.tvm.cpu.workers import Workers
from edge.backends.tvm.design import Design
from edge.backends.tvm.kv.regions import TILE, make_regions
from edge.backends.tvm.kv.row_formats import FORMATS
from edge.backends.tvm.kv.rows import HostRows
from edge.backends.tvm.kv.store import Arena, NativeStore, choose_normals, make_kv
from edge.backends.tvm.memory import aligned_zeros, pointer
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.layout import TABLE, PackedLayout, make_layout
from edge.backends.tvm.packing.shape import ROPE_AHEAD, padded_head, rope_values
from edge.backends.tvm.packing.weights import PackedWeights, Ranges, open_weights
from edge.backends.tvm.sources import source_hash
from edge.errors import EngineError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import temperatures
from edge.model.layers import Attention
from edge.model.lora import Lora
from edge.model.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

_COMPILING = "compiling for this CPU (first run only)"


class NativeEngine:
    """The Engine protocol over compiled passes. All memory is allocated at load; steps allocate only temporaries."""

    capabilities = ENGINE.CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None,
        *, timed: bool = False,
    ) -> None:  # fmt: skip
        """timed: compiled with timestamps, whose counters are `times` (`cpu/timing.py`)."""
        self.spec, self.config, self._file = spec, config, file
        layout = make_layout(file, spec)
        design = replace(Design.here(layout, config), timed=timed)
        target = design.target
        need = streaming_need(spec, config)
        streams = make_streams(layout, need.kept, config.threads) if config.resident else None
        resident, slots = streams.resident if streams else None, need.slots
        image, packed = _prepare(file, layout, design, resident, progress, experts=not slots, frugal=config.frugal)
        self._weights = packed.bytes
        self._disk = Disk(streams is not None)

        positions = spec.context if config.per_head else config.capacity  # gaps stay open as long as the context allows
        shape = layout.shape
        # Weights are packed so that pairs are neighbours.
        rope = CacheRope(file, layout.network, positions, halves=False, head=shape.padded_head)
        self._head, self._padded_vocab = shape.padded_head, shape.padded_vocab
        name = f"{ENGINE.NAME} {source_hash('kv', 'cpu/kernels', 'cpu/phases')}"
        key = state_key(name, file, spec, config.kv_dtype)
        network = layout.network
        kinds = LayerKinds.of(network.windows, network.rowless)
        apart = shape.ringed.kv_heads if shape.apart else 0
        regions, rings = make_regions(kinds, shape.attention.kv_heads, config, spec.context, apart)
        observed = round_up(regions.longest, TILE) if config.observes else 0
        rank = padded_rank(config.lora_rank)
        scratch = make_scratch(shape, target, config.chunk, config.threads, observed, rank)
        tokens = round_up(config.chunk, target.gemm_tokens)
        rope_size = rope_values(tokens, target.gemm_tokens, self._head)
        reads = reads_size(layout) if slots else 0
        table = np.array(fill_table(layout, scratch, rope_size, streams, reads), np.int64)
        self._table = aligned_zeros(table.size, "int64")
        self._table[:] = table
        self._layout, self._exact = layout, design.exact
        self._adapters = aligned_zeros(adapter_bytes(layout.network, rank, exact=design.exact), "uint8")
        self._floats = aligned_zeros(scratch.floats, "float32")
        self._integers = aligned_zeros(scratch.integers, "int32")
        address = self._weights.ctypes.data
        self._experts = (
            ExpertSlots(packed.path, layout, scratch, self._table, self._integers, slots, address) if slots else None
        )
        at, count = scratch.offsets["normals"], shape.layers * shape.kv_heads * self._head
        self._normals = normals = self._floats[at : at + count].reshape(-1, self._head)
        at, count = scratch.offsets["layer_inputs"], tokens * shape.layers * shape.padded_inputs
        self._inputs = self._floats[at : at + count].reshape(tokens, shape.layers, -1) if count else self._floats[:0]
        self._token_table = TokenTable(file, f"{TABLE}.weight") if count else None
        self._temperature = next((core.temperature for core in network.attention if core), None)
        at = scratch.offsets["temperatures"]
        self._temperatures = self._floats[at : at + (tokens if self._temperature else 0)]

        def rows_of(core: Attention, count: int, move: str) -> HostRows:
            def move_rows(arrays: Iterable[AnyArray], pairs: AnyArray) -> None:
                Call(image, move, (*map(pointer, arrays), pointer(pairs), len(pairs)))()

            head = padded_head(core.head_dim)
            return HostRows(count, head, config.kv_dtype, normals[:, :head], move_rows)

        here = regions.size + (0 if apart else rings.size)
        self._arena = Arena(shape, rows_of(shape.attention, here, "move"), observes=config.observes)
        self._rings = (
            Arena(shape, rows_of(shape.ringed, rings.size, "move_ring"), observes=False, beside=self._arena)
            if apart else None
        )  # fmt: skip
        self._model_key = key
        self._states = aligned_zeros(sum(network.fixed_values), "float32")
        state = FixedState(network.fixed_values, self._states) if self._states.size else None
        self._kv = make_kv(self._arena, kinds, regions, rings, rope, key, config, state, self._rings)
        self._tokens = aligned_zeros(tokens, "int32")
        self._rotation = rope.rotation  # of the table of angles
        tables = len(self._rotation.angles)
        self._rope = aligned_zeros(tables * rope_size, "float32").reshape(tables, rope_size)
        self._rope_from = self._rope_rows = self._observed = 0
        self._votes = False
        self._logits = aligned_zeros(config.logits_rows * self._padded_vocab, "float32")
        self.times = aligned_zeros(config.threads * thread_words(shape.layers) if timed else 0, "int64")
        self._workers: Workers | None = Workers(image, config.threads, self._pointers())
        weakref.finalize(self, self._workers.close)  # also at exit: threads must not outlive the interpreter

        if FORMATS[config.kv_dtype].transformed:
            choose_normals(self._kv, self.forward, spec.vocab)

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """Accumulate the attention that the last `queries` tokens of every chunk pay to each row, in `kv.attention`.

        0 observes nothing and costs nothing. votes: count the queries that pay a row more than the average instead.
        Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`.
        """
        if queries and not self.config.observes:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self._observed, self._votes = queries, votes

    @property
    def normals(self) -> FloatArray:
        """Normals of the keys' Householder reflections (kv/householder.py), float32 [heads of all layers, head]; zeros
        without. A smaller head than the largest has the first values."""
        return self._normals

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Compiled code reads the table again in every pass."""
        check_lora(lora, self.config)
        if self._workers is None:
            raise EngineError("the engine is closed")
        self._kv.truncate(0)
        self._set_adapters(0, [])  # none, should packing fail
        if lora:
            self._set_adapters(
                padded_rank(lora.size.rank), pack_adapters(lora, self._layout, self._adapters, exact=self._exact)
            )
        self._kv.settings = self._model_key + (f" {lora.key}" if lora else "")

    def _set_adapters(self, rank: int, offsets: Sequence[Offsets]) -> None:
        slots = Table.of(self._layout.shape)
        self._table[slots.slot("lora_rank")] = rank
        for layer in range(self.spec.layers):
            found = offsets[layer] if rank else {}
            for slot in slots.lora:
                self._table[slots.place(layer, slot)] = found.get(slot, 0)

    @property
    def experts(self) -> ExpertCounts | None:
        """Of an engine that holds some of the experts at a time; None once it is closed."""
        return self._experts.counts if self._experts else None

    @property
    def expert_trace(self) -> AnyArray:
        """The choices of the last tokens that ran one by one, [tokens, layers with experts, choices]; recorded where
        `experts` are counted."""
        return self._experts.trace if self._experts else np.zeros((0, 0, 0), np.int16)

    @property
    def kv(self) -> HeadKV[NativeStore[HostRows]]:
        return self._kv

    def forward(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        self._kv.announce(tokens.size)
        for start in range(0, tokens.size, self.config.chunk):
            part = tokens[start : start + self.config.chunk]
            self._run(part, wanted=int(start + part.size == tokens.size))
        return self._logits[: self.spec.vocab]

    def forward_all(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        self._kv.announce(tokens.size)
        logits = np.empty((tokens.size, self.spec.vocab), np.float32)
        step = min(self.config.logits_rows, self.config.chunk)
        for start in range(0, tokens.size, step):
            part = tokens[start : start + step]
            self._run(part, wanted=part.size)
            rows = self._logits.reshape(-1, self._padded_vocab)
            logits[start : start + part.size] = rows[: part.size, : self.spec.vocab]
        return logits

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None
        self._kv.closed = True
        for arena in filter(None, (self._arena, self._rings)):
            arena.rows.arrays.clear()
        if self._token_table:
            self._token_table.close()
        if self._experts:
            save_trace(self._file, self._experts.trace)
            self._experts.close()
            self._experts = None
        self._weights = self._floats = self._integers = np.zeros(0, np.uint8)
        self._temperatures = self._adapters = self._states = self._inputs = np.zeros(0, np.uint8)
        self._normals = np.zeros((0, 0), np.float32)

    def _check_weights(self) -> None:
        mapped = getattr(self._weights.base, "obj", None)  # None once the engine is closed
        if isinstance(mapped, mmap.mmap):
            check_whole("a file of packed weights in the cache folder", mapped.size(), self._layout.nbytes)

    def _run(self, tokens: IntArray, *, wanted: int) -> None:
        if self._workers is None:
            raise EngineError("the engine is closed")
        kv, count = self._kv, tokens.size
        check_positions(self.spec, kv.next_position + count)
        self._check_weights()
        self._tokens[:count] = tokens
        self._look_up(tokens)
        kv.prepare(count)
        if self._temperature:
            positions = kv.next_position + np.arange(count)
            self._temperatures[:count] = temperatures(self._temperature, positions)
        if self._experts:
            self._experts.begin(count)
        kind = Job.STEP if count == 1 else Job.CHUNK
        self._workers.run(
            kind=kind, count=count, position=kv.next_position, angle=self._angle_row(count), wanted=wanted,
            observed=min(count, self._observed), votes=int(self._votes), disk=self._disk.wanted(),
        )  # fmt: skip
        if self._experts:
            self._experts.check()
        kv.appended(count)
        if self._experts:
            self._experts.interrupt()

    def _look_up(self, tokens: IntArray) -> None:
        """The table's part of the vectors that tokens have for each layer (`PerLayerInput`)."""
        if self._token_table is None:
            return
        size, layers = self._layout.shape.layer_inputs, self.spec.layers
        for part, rows in self._token_table.read(tokens):
            self._inputs[part, :, :size] = rows.reshape(-1, layers, size) * np.float32(math.sqrt(size / 2))

    def _angle_row(self, count: int) -> int:
        """The row of the angle table where the next `count` positions begin."""
        first = self._kv.next_rope_position
        if self._rotation is not self._kv.rope.rotation:
            self._rotation, self._rope_rows = self._kv.rope.rotation, 0
        if not self._rope_from <= first <= first + count <= self._rope_from + self._rope_rows:
            self._rope_from, self._rope_rows = first, max(count, ROPE_AHEAD)
            positions = np.arange(first, first + self._rope_rows)
            for kind, table in enumerate(self._rope):
                angles = _angle_table(self._rotation, kind, positions)
                table[: angles.size] = angles.reshape(-1)
        return first - self._rope_from

    def _pointers(self) -> tuple[Any, ...]:
        """The arguments of a pass, in the order of `generator.POINTERS`."""
        arena, rings = self._arena, self._rings
        apart = (*rings.rows.arrays.values(), rings.positions) if rings else ()
        arrays = (
            self._weights, self._table, self._floats, self._integers, *arena.rows.arrays.values(),
            arena.lengths, arena.positions, self._tokens, self._logits, self._rope,
            arena.paid, arena.starts, *apart,
            *(each for each in (self._states, self.times, self._adapters) if each.size),
        )  # fmt: skip
        return tuple(map(pointer, arrays))


def _angle_table(rotation: Rotation, kind: int, positions: AnyArray) -> FloatArray:
    """float32 [positions, 2, head] for kernels: the cosines of all dimensions, then −sin and +sin of each pair."""
    cos, sin = rotation.tables(kind, positions)
    return np.stack([np.repeat(cos, 2, axis=1), np.stack([-sin, sin], axis=-1).reshape(len(sin), -1)], axis=1)


def _prepare(
    file: GGUFFile, layout: PackedLayout, design: Design, resident: Ranges | None, progress: LoadProgress | None, *,
    experts: bool, frugal: bool,
) -> tuple[Image, PackedWeights]:  # fmt: skip
    """Compile and pack: a child process compiles while this one packs; frugal: before. experts: map these, too."""

    def pack(progress: LoadProgress | Callable[[float], None] | None) -> PackedWeights:
        return open_weights(file, layout, progress, resident, experts=experts)

    if frugal or is_compiled(design):
        compiling = progress and (lambda part: progress(part, _COMPILING))
        packing = progress and (lambda part: progress(part, "packing weights (first run only)"))
        return compiled(design, compiling, frugal=frugal), pack(packing)
    lock, parts, stopped = threading.Lock(), {"compiled": 0.0, "packed": 0.0}, threading.Event()

    def note(name: str, part: float) -> None:
        if stopped.is_set():
            raise EngineError("loading was stopped")
        with lock:
            parts[name] = part
            if progress:
                progress(sum(parts.values()) / len(parts), _COMPILING)

    with ThreadPoolExecutor(1) as pool:
        try:
            context = contextvars.copy_context()  # what is made there counts, too
            weights = pool.submit(context.run, pack, lambda part: note("packed", part))
            image = compiled(design, lambda part: note("compiled", part))
            return image, weights.result()
        except BaseException:  # Ctrl-C, too
            stopped.set()
            raise

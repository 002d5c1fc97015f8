"""The native engine: tokens in, logits out, by one call of compiled code per step or chunk."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edge.backends.base import EngineConfig, LoadProgress
from edge.backends.checks import check_batch, check_lora
from edge.backends.counts import ExpertCounts
from edge.backends.fixed_state import FixedState
from edge.backends.kv_cache import state_key
from edge.backends.rope import CacheRope
from edge.backends.tvm import ENGINE
from edge.backends.tvm.compiler.compiled import compiled, is_compiled
from edge.backends.tvm.cpu.elf import Call, Image
from edge.backends.tvm.cpu.streaming import make_streams, streaming_need
from edge.backends.tvm.cpu.two_stages import MOST_CANDIDATES, TwoStages
from edge.backends.tvm.design import Design
from edge.backends.tvm.kv.householder import find_means
from edge.backends.tvm.kv.memory import ArenaSize
from edge.backends.tvm.kv.row_formats import FORMATS, centres_keys
from edge.backends.tvm.kv.rows import HostRows
from edge.backends.tvm.kv.store import Arena, choose_normals, make_kv
from edge.backends.tvm.memory import pointer
from edge.backends.tvm.packing.cores import LANES
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.backends.tvm.packing.weights import PackedWeights, Ranges, open_weights
from edge.backends.tvm.passes import Passes
from edge.backends.tvm.sequence import NativeSequence, run_batch
from edge.backends.tvm.sources import source_hash
from edge.devices.keys import key_of
from edge.errors import EngineError, InputError
from edge.formats.gguf import GGUFFile
from edge.model.adapters.lora import Lora
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

if TYPE_CHECKING:
    from edge.backends.tvm.assistant import AssistantLayers

_COMPILING = "compiling for this CPU (first run only)"


class NativeEngine:
    """The Engine protocol over compiled passes. All memory is allocated at load; steps allocate only temporaries."""

    capabilities = ENGINE.CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None,
        *, timed: bool = False, main: NativeEngine | None = None,
    ) -> None:  # fmt: skip
        """timed: compile with timestamps, which are written to `times` (`cpu/timing.py`). main: for a layer for
        multi-token prediction, the main model's engine, whose embedding and head it shares."""
        self.spec, self.config, self._file = spec, config, file
        layout = make_layout(file, spec, halve=True)
        design = replace(Design.here(layout, config), timed=timed)
        need = streaming_need(spec, config)
        streams = make_streams(layout, need.kept, config.threads) if config.resident else None
        resident, slots = streams.resident if streams else None, need.slots
        image, packed = _prepare(file, layout, design, resident, progress, experts=not slots, frugal=config.frugal)
        passes = Passes(
            file, spec, config, layout, design, image, packed, streams, slots, None if main is None else main.passes,
        )  # fmt: skip
        self.passes: Passes = passes
        self.most_candidates = MOST_CANDIDATES if passes.stages else 0
        name = f"{ENGINE.NAME} {source_hash('kv', 'cpu/kernels', 'cpu/phases')}"
        if config.reads:  # rows of answers differ from those of policy `full`
            name += f" {config.reads}"
        key = state_key(name, file, spec, config.kv_dtype)
        memory, shape, network = passes.memory, layout.shape, layout.network
        self.centred = centred = any(core and centres_keys(core, config.kv_dtype) for core in network.attention)
        alone = all(core.rows_of is None for core in network.attention if core)
        assert alone or not centred, "layers that read other layers' rows would reflect queries by means"

        def make_arena(size: ArenaSize) -> Arena[HostRows]:
            def move_rows(stored: Iterable[AnyArray], pairs: AnyArray) -> None:
                name = "move_ring" if size.prefix else "move"
                Call(image, name, (*map(pointer, stored), pointer(pairs), len(pairs)))()

            own = self.normals[:, : size.row.key]
            rows = HostRows(size, passes.arrays, config.kv_dtype, own, move_rows, centred=centred)
            return Arena(shape, rows, passes.arrays, size.prefix)

        arenas = [make_arena(each) for each in memory.kv.arenas]  # of rows; of rings, if they differ

        def make_sequence(number: int, values: FloatArray) -> NativeSequence:
            # Weights are packed so that pairs are neighbours. Gaps stay open as long as the context allows.
            positions = spec.context if config.per_head else config.capacity
            rope = CacheRope(file, network, positions, halves=False, head=shape.padded_head)
            apply, most = partial(passes.apply, number), 1 + config.drafts
            state = FixedState(network.fixed_values, values, apply, most) if values.size else None
            regions = memory.kv.regions(number)
            kv = make_kv(arenas[0], memory.kv.kinds, *regions, rope, key, config, state, arenas[-1])
            kv.balances = passes.balances
            return NativeSequence(number, passes, config, kv)

        self.arenas = arenas
        states = passes.arrays["states"][memory.copies :].reshape(config.sequences, -1)
        self._sequences = [make_sequence(*each) for each in enumerate(states)]
        first = self._sequences[0]  # the engine's own cache and passes: see `NativeSequence`
        self.kv, self.append_rows = first.kv, first.append_rows
        self.observe, self.choose_rows = first.observe, first.choose_rows
        self.forward, self.forward_all, self.forward_top = first.forward, first.forward_all, first.forward_top
        self.hidden, self.verify, self.verify_top = first.hidden, first.verify, first.verify_top
        self.set_crossed, self.crossed, self.rest = passes.set_crossed, passes.crossed, passes.rest
        self.states, self.layer_states, self.give = passes.normed_states, passes.layer_states, passes.give
        self.times = passes.arrays["times"]
        if centred:
            self._find_means(first.kv.rope)
            self.kv.settings += f":{key_of(self.normals.tobytes(), 16)}"  # rows cannot be read without their means
        elif FORMATS[config.kv_dtype].transformed and self.kv.store.row.key:
            choose_normals(self.kv, self.hidden if shape.encoder else self.forward, spec.vocab)
        for sequence in self._sequences:
            sequence.settings = sequence.kv.settings = self.kv.settings

    def sequence(self, number: int) -> NativeSequence:
        """See BatchedEngine. Raises InputError for a number that it was not loaded for."""
        if not 0 <= number < len(self._sequences):
            raise InputError(f"the engine was loaded for {len(self._sequences)} sequences: there is no {number}")
        return self._sequences[number]

    def _find_means(self, rope: CacheRope) -> None:
        """Set the part of keys that rows lack: that of their biases, at all positions."""
        layout, floats = self.passes.layout, self.passes.weights.view(np.float32)
        for layer, core in enumerate(layout.network.attention):
            if core and centres_keys(core, self.kv.store.rows.dtype):
                place = layout.places[f"blk.{layer}.attn_k.bias"]
                head, first = core.row.padded(LANES).key, layer * layout.shape.kv_heads
                biases = floats[place.quants // 4 :][: core.kv_heads * head].reshape(core.kv_heads, 1, head)
                own = self.normals[first : first + core.kv_heads, :head]
                rotation = rope.rotation.of([layer])
                biases = rotation.rotate(biases, 0, np.zeros(1, np.int32))  # YaRN lengthens them
                own[:] = find_means([biases], rotation)

    @property
    def normals(self) -> FloatArray:
        """Normals of the keys' Householder reflections (kv/householder.py), or what rows lack of keys with biases,
        float32 [heads of all layers, head]; else zeros. Heads smaller than the largest use the first values."""
        return self.passes.normals

    @property
    def stages(self) -> TwoStages | None:
        """Of the head; None without them, and once the engine is closed."""
        return self.passes.stages

    @property
    def experts(self) -> ExpertCounts | None:
        """Counters of an engine that holds only some experts in memory; None for others, and once it is closed."""
        return self.passes.experts.counts if self.passes.experts else None

    @property
    def team(self) -> list[int]:
        """Passes that 1, 2, … of the engine's threads have run."""
        return self.passes.workers.passes if self.passes.workers else []

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Changes all sequences."""
        check_lora(lora, self.config)
        for given in (None, lora):  # first none, so that one part is enough for all
            for sequence in self._sequences:
                sequence.set_lora(given)

    def open_assistant(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> AssistantLayers:
        """See SharingEngine."""
        from edge.backends.tvm.assistant import AssistantLayers  # here: few models have one

        layout = make_layout(file, spec)
        design = Design.here(layout, config)
        image, packed = _prepare(file, layout, design, None, None, experts=True, frugal=config.frugal)
        passes = partial(Passes, file, spec, config, layout, design, image, packed, None, 0, None)
        return AssistantLayers(file, passes, self.passes, self.kv)

    def open_mtp(self, file: GGUFFile, config: EngineConfig, progress: LoadProgress | None = None) -> NativeEngine:
        """See StatesEngine."""
        assert self.spec.mtp is not None
        return NativeEngine(file, self.spec.mtp, config, progress, main=self)

    def forward_batch(self, tokens: IntArray, sequences: Sequence[int]) -> FloatArray:
        """See BatchedEngine."""
        found = [self.sequence(number) for number in sequences]
        if len({self.passes.adapters.parts[number] for number in sequences}) > 1:
            raise InputError("sequences with different adapters run in different passes")
        return run_batch(self.passes, check_batch(self.spec, tokens, sequences, [each.kv for each in found]), found)

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self.passes.close(self._file)
        for sequence in self._sequences:
            sequence.kv.closed = True
        for arena in self.arenas:
            arena.rows.arrays.clear()


def _prepare(
    file: GGUFFile, layout: PackedLayout, design: Design, resident: Ranges | None, progress: LoadProgress | None, *,
    experts: bool, frugal: bool,
) -> tuple[Image, PackedWeights]:  # fmt: skip
    """Compile in a child process while this one packs; frugal: compile first. experts: map their weights, too."""

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

    from concurrent.futures import ThreadPoolExecutor  # here: first runs need it

    with ThreadPoolExecutor(1) as pool:
        try:
            context = contextvars.copy_context()  # so that accounts of made files include that thread's
            weights = pool.submit(context.run, pack, lambda part: note("packed", part))
            image = compiled(design, lambda part: note("compiled", part))
            return image, weights.result()
        except BaseException:  # Ctrl-C, too
            stopped.set()
            raise

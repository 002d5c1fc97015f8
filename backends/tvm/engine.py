"""The native engine: tokens in, logits out, by one call of compiled code per step or chunk."""

from __future__ import annotations

import contextvars
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.backends.base import EngineConfig, LoadProgress
from edge.backends.checks import check_lora, check_positions, check_tokens, check_whole, check_whole_text
from edge.backends.counts import ExpertCounts
from edge.backends.fixed_state import FixedState
from edge.backends.kv_cache import state_key
from edge.backends.rope import CacheRope
from edge.backends.token_table import TokenTable
from edge.backends.tvm import ENGINE
from edge.backends.tvm.adapters import Adapters
from edge.backends.tvm.compiler.compiled import compiled, is_compiled
from edge.backends.tvm.cpu.arguments import LORA, PAGES, POINTERS, RINGS, STATES, TIMES, Job, Table
from edge.backends.tvm.cpu.elf import Call, Image
from edge.backends.tvm.cpu.memory import PassMemory
from edge.backends.tvm.cpu.states import normed
from edge.backends.tvm.cpu.streaming import Disk, make_streams, streaming_need
from edge.backends.tvm.cpu.table import fill_table
from edge.backends.tvm.cpu.timing import thread_words
from edge.backends.tvm.cpu.two_stages import MOST_CANDIDATES, TwoStages, largest_of
from edge.backends.tvm.cpu.workers import Workers
from edge.backends.tvm.design import Design
from edge.backends.tvm.kv.memory import RING, ArenaSize
from edge.backends.tvm.kv.pages import pages_read
from edge.backends.tvm.kv.row_formats import FORMATS
from edge.backends.tvm.kv.rows import HostRows
from edge.backends.tvm.kv.store import Arena, choose_normals, make_kv
from edge.backends.tvm.memory import aligned_zeros, pointer
from edge.backends.tvm.packing.layout import TABLE, PackedLayout, make_layout
from edge.backends.tvm.packing.shape import ROPE_AHEAD
from edge.backends.tvm.packing.weights import PackedWeights, Ranges, open_weights
from edge.backends.tvm.sequence import Angles, NativeKV, NativeSequence
from edge.backends.tvm.sources import source_hash
from edge.errors import EngineError, InputError
from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import temperatures
from edge.model.given import GivenRows
from edge.model.lora import Lora
from edge.model.places import Places
from edge.model.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

if TYPE_CHECKING:
    from edge.backends.tvm.cpu.slots import ExpertSlots

_ARRAYS = tuple(name for name in POINTERS if name not in ("job", "lines", "weights"))
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
        self._layout = layout = make_layout(file, spec, halve=True)
        design = replace(Design.here(layout, config), timed=timed)
        self._batches = design.batches
        need = streaming_need(spec, config)
        streams = make_streams(layout, need.kept, config.threads) if config.resident else None
        resident, slots = streams.resident if streams else None, need.slots
        image, packed = _prepare(file, layout, design, resident, progress, experts=not slots, frugal=config.frugal)
        self._weights, self._others = packed.bytes, None if main is None else main._weights
        self._base, placed = self._weights.ctypes.data, layout
        if main is not None:
            at, others_at = self._base, main._weights.ctypes.data
            self._base = min(at, others_at)
            placed = layout.beside(main._layout, at - self._base, others_at - self._base)
        self._disk = Disk(streams is not None)

        name = f"{ENGINE.NAME} {source_hash('kv', 'cpu/kernels', 'cpu/phases')}"
        if config.reads:  # rows of answers differ from those of policy `full`
            name += f" {config.reads}"
        key = state_key(name, file, spec, config.kv_dtype)
        memory = PassMemory.of(spec, config, design.target, design.estimates * (1 + config.drafts))
        self._arrays = arrays = memory.allocate()
        shape, network, scratch = layout.shape, layout.network, memory.scratch
        reads = 0
        if slots:
            from edge.backends.tvm.cpu.slots import ExpertSlots, reads_size

            reads = reads_size(layout)
        numbers = fill_table(placed, memory, streams, reads)
        self._table = arrays["table"] = aligned_zeros(len(numbers), "int64")
        self._table[:] = numbers
        at = Table.of(shape).slot("pages")
        self._pages = self._table[at : at + 2]  # "pages" and "bounded"
        self._adapters = Adapters(layout, self._table, arrays["lora"], config.loras, exact=design.exact)
        self._floats, self._integers = arrays["floats"], arrays["integers"]
        address = self._weights.ctypes.data
        self._experts: ExpertSlots | None = None
        if slots:
            self._experts = ExpertSlots(packed.path, layout, scratch, self._table, self._integers, slots, address)

        def of_floats(name: str, *shape: int) -> FloatArray:
            return scratch.array(self._floats, name).reshape(-1, *shape)

        self._normals = normals = of_floats("normals", shape.padded_head)
        self._behind_layers = of_floats("x", shape.padded_hidden)[:, : spec.hidden]
        self._ran = 0  # tokens of the last pass
        self._given = of_floats("given", shape.padded_hidden)
        self.stages: TwoStages | None = None  # of the head; counts are those of all sequences
        if design.estimates and not config.resident:
            self.stages = TwoStages.of(spec.vocab, scratch, self._floats, self._integers)
        self.most_candidates = MOST_CANDIDATES if self.stages else 0
        self._inputs = of_floats("layer_inputs", shape.layers, max(1, shape.padded_inputs))
        self._token_table = TokenTable(file, f"{TABLE}.weight") if shape.layer_inputs else None
        self._temperature = next((core.temperature for core in network.attention if core), None)
        self._temperatures = of_floats("temperatures")

        def make_arena(size: ArenaSize) -> Arena[HostRows]:
            def move_rows(stored: Iterable[AnyArray], pairs: AnyArray) -> None:
                name = "move_ring" if size.prefix else "move"
                Call(image, name, (*map(pointer, stored), pointer(pairs), len(pairs)))()

            rows = HostRows(size, arrays, config.kv_dtype, normals[:, : size.row.key], move_rows)
            return Arena(shape, rows, arrays, size.prefix)

        self._arena, *rings = map(make_arena, memory.kv.arenas)
        self._rings = rings[0] if rings else None
        self._model_key = key
        most, count = 1 + config.drafts, config.sequences
        states = [
            FixedState(network.fixed_values, each, partial(self._apply, number), most) if each.size else None
            for number, each in enumerate(arrays["states"][memory.copies :].reshape(count, -1))
        ]
        # Weights are packed so that pairs are neighbours. Gaps stay open as long as the context allows.
        positions = spec.context if config.per_head else config.capacity
        ropes = [CacheRope(file, network, positions, halves=False, head=shape.padded_head) for _ in states]
        self._tokens = arrays["tokens"]
        self._angles = arrays["rope"].reshape(memory.arrays["rope"].shape)
        self._chunk_angles = Angles(self._angles)
        self._sequences = [
            NativeSequence(
                number, spec, config,
                make_kv(
                    self._arena, memory.kv.kinds, *memory.kv.regions(number), rope, key, config, state, self._rings,
                ),
                Angles(self._angles, memory.rope.ahead + number * ROPE_AHEAD) if count > 1 else self._chunk_angles,
                self._run, self._verify, self._adapt, self._run_top if self.stages else None,
            )
            for number, (rope, state) in enumerate(zip(ropes, states, strict=True))
        ]  # fmt: skip
        self._batch_angles = memory.rope.together
        self._logits = arrays["logits"]
        self._padded_vocab = shape.padded_vocab
        self.times = arrays["times"] = aligned_zeros(
            config.threads * thread_words(shape.layers) if timed else 0, "int64"
        )
        self._workers: Workers | None = Workers(
            image, config.threads, self._pointers(), fixed=bool(timed or streams or slots)
        )
        weakref.finalize(self, self._workers.close)  # also at exit: threads must not outlive the interpreter

        if FORMATS[config.kv_dtype].transformed:
            choose_normals(self.kv, self.hidden if shape.encoder else self.forward, spec.vocab)
            for sequence in self._sequences:
                sequence.kv.settings = self._model_key = self.kv.settings

    def sequence(self, number: int) -> NativeSequence:
        """See BatchedEngine. Raises InputError for a number that it was not loaded for."""
        if not 0 <= number < len(self._sequences):
            raise InputError(f"the engine was loaded for {len(self._sequences)} sequences: there is no {number}")
        return self._sequences[number]

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See ObservedEngine, and `NativeSequence.observe`."""
        self._sequences[0].observe(queries, votes=votes)

    def choose_rows(self, *, on: bool) -> None:
        """See ChoosingEngine. Changes sequence 0 alone."""
        self._sequences[0].choose_rows(on=on)

    @property
    def normals(self) -> FloatArray:
        """Normals of the keys' Householder reflections (kv/householder.py), float32 [heads of all layers, head]; zeros
        for KV dtypes without. Heads smaller than the largest use the first values."""
        return self._normals

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Changes all sequences."""
        self._adapt(self._sequences, lora)

    def _adapt(self, sequences: Sequence[NativeSequence], lora: Lora | None) -> None:
        """Change the adapters of these sequences. They have none if packing fails."""
        check_lora(lora, self.config)
        if self._workers is None:
            raise EngineError("the engine is closed")
        for sequence in sequences:
            sequence.kv.truncate(0)
            sequence.adapters, sequence.kv.settings = None, self._model_key
        if lora:
            number = self._adapters.hold(lora, {each.adapters for each in self._sequences})
            for sequence in sequences:
                sequence.adapters, sequence.kv.settings = number, f"{self._model_key} {lora.key}"

    @property
    def experts(self) -> ExpertCounts | None:
        """Counters of an engine that holds only some experts in memory; None for others, and once it is closed."""
        return self._experts.counts if self._experts else None

    @property
    def team(self) -> list[int]:
        """Passes that 1, 2, … of the engine's threads have run."""
        return self._workers.passes if self._workers else []

    @property
    def expert_trace(self) -> AnyArray:
        """The experts that the last single-token passes chose, int16 [tokens, layers with experts, choices]; empty
        unless `experts` are counted."""
        return self._experts.trace if self._experts else np.zeros((0, 0, 0), np.int16)

    @property
    def kv(self) -> NativeKV:
        return self._sequences[0].kv

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        return self._sequences[0].forward(tokens, given, places)

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        return self._sequences[0].forward_all(tokens, given, places)

    def append_rows(self, rows: FloatArray) -> None:
        """See GivenEngine."""
        self._sequences[0].append_rows(rows)

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """See TopEngine, and `NativeSequence.forward_top`."""
        return self._sequences[0].forward_top(tokens, count)

    def hidden(self, tokens: IntArray, places: Places | None = None) -> FloatArray:
        """See HiddenEngine."""
        if self._layout.shape.encoder:
            check_whole_text(tokens, self.kv, self.config)
            places = places or Places.after(0, tokens.size, causal=False)
        tokens = check_tokens(tokens, self.spec.vocab, self.kv.free)
        self.kv.announce(tokens.size)
        found, chunk = np.empty((tokens.size, self.spec.hidden), np.float32), self.config.chunk
        for start in range(0, tokens.size, chunk):
            part = tokens[start : start + chunk]
            self._run(self._sequences[0], part, 1, None, places)
            normed = self._layout.network.normed
            found[start : start + part.size] = self.states(part.size) if normed else self._behind_layers[: part.size]
        return found

    def states(self, count: int) -> FloatArray:
        """See StatesEngine."""
        last = self._behind_layers[max(0, self._ran - count) : self._ran]
        return normed(last, self._layout, self._weights)

    def give(self, states: FloatArray) -> None:
        """See MTPEngine."""
        if len(states) > len(self._given):  # no room if no layer reads states, and once the engine is closed
            raise EngineError(f"{len(states)} states are given, and there is room for {len(self._given)}")
        self._given[: len(states), : self.spec.hidden] = states

    def open_mtp(self, file: GGUFFile, config: EngineConfig, progress: LoadProgress | None = None) -> NativeEngine:
        """See StatesEngine."""
        assert self.spec.mtp is not None
        return NativeEngine(file, self.spec.mtp, config, progress, main=self)

    def forward_batch(self, tokens: IntArray, sequences: Sequence[int]) -> FloatArray:
        """See BatchedEngine."""
        found = [self.sequence(number) for number in sequences]
        if len(set(sequences)) != len(found):
            raise InputError(f"sequences must be different, not {list(sequences)!r:.60}")
        tokens = check_tokens(tokens, self.spec.vocab, len(found))
        if tokens.size != len(found):
            raise InputError(f"{tokens.size} tokens for {len(found)} sequences")
        if len({each.adapters for each in found}) > 1:
            raise InputError("sequences with different adapters run in different passes")
        for token, sequence in zip(tokens, found, strict=True):
            check_tokens(token[None], self.spec.vocab, sequence.kv.free)
            check_positions(self.spec, sequence.kv.next_position + 1)
            sequence.kv.announce(1)
        return self._run_batch(tokens, found) if len(found) > 1 else self._run(found[0], tokens, 1)

    def verify(self, tokens: IntArray) -> FloatArray:
        """See VerifyingEngine, and `NativeSequence.verify`."""
        return self._sequences[0].verify(tokens)

    def verify_top(self, tokens: IntArray, count: int) -> list[tuple[IntArray, FloatArray]]:
        """See VerifyingEngine, and `NativeSequence.verify_top`."""
        return self._sequences[0].verify_top(tokens, count)

    def _verify(
        self, sequence: NativeSequence, tokens: IntArray, wanted: int | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> FloatArray:  # fmt: skip
        """Run tokens of one sequence as if each ran alone. Returns their logits. wanted, then: as for `_run`; None: all
        logits."""
        kv, count = sequence.kv, tokens.size
        check_positions(self.spec, kv.next_position + count)
        self._begin(tokens, sequence.adapters)
        for each in self._sequences:  # inputs of drafts are kept for the last pass alone
            if each.kv.state:
                each.kv.state.settle()
        sequence.prepare(count)
        self._arena.follow(count)
        positions = kv.next_position + np.arange(count, dtype=np.int32)
        angle = sequence.angles.row(kv.rope.rotation, kv.next_rope_position, count)
        observed, drafts = np.zeros(count, np.int32), Job.VERIFIED if kv.state else 0
        found = self._run_together(positions, observed, angle, [(sequence, count)], drafts, wanted, then)
        if kv.state:
            kv.state.draft(count)
        return found

    def _apply(self, number: int, count: int) -> None:
        """Add the first `count` tokens of the last verification to a sequence's fixed state."""
        if self._workers is None:
            raise EngineError("the engine is closed")
        self._workers.run(kind=Job.APPLY, count=count, sequence=number, drafts=Job.APPLIED)

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None
        for sequence in self._sequences:
            sequence.kv.closed = True
        for arena in filter(None, (self._arena, self._rings)):
            arena.rows.arrays.clear()
        if self._token_table:
            self._token_table.close()
        if self._experts:
            from edge.backends.tvm.cpu.expert_trace import save_trace

            save_trace(self._file, self._experts.trace)
            self._experts.close()
            self._experts = None
        self.stages = None
        self._arrays.clear()
        self._weights = self._floats = self._integers = np.zeros(0, np.uint8)
        self._others = None
        self._temperatures = self._inputs = self._adapters.memory = np.zeros(0, np.uint8)
        self._normals = self._behind_layers = self._given = np.zeros((0, 0), np.float32)

    def _check_weights(self) -> None:
        mapped = getattr(self._weights.base, "obj", None)  # None once the engine is closed
        if isinstance(mapped, mmap.mmap):
            check_whole("a file of packed weights in the cache folder", mapped.size(), self._layout.nbytes)

    def _run(
        self, sequence: NativeSequence, tokens: IntArray, wanted: int, given: GivenRows | None = None,
        places: Places | None = None, then: Callable[[], None] = lambda: None,
    ) -> FloatArray:  # fmt: skip
        """Run tokens of one sequence, at most a chunk. Returns the last `wanted` rows of logits. places: see
        GivenEngine. then: called before the new rows are recorded, so that an interruption leaves none."""
        kv, count = sequence.kv, tokens.size
        self._begin(tokens, sequence.adapters, given)
        check_positions(self.spec, kv.next_position + count)
        sequence.prepare(count)
        encoder = self._layout.shape.encoder
        alone = count == 1 and not encoder
        if encoder and places:
            columns = (places.sees, places.begins, places.positions, places.types)
            for at, column in enumerate(columns, start=1):
                self._tokens[at * count : (at + 1) * count] = 0 if column is None else column
        elif not alone:
            self._tokens[count : 2 * count] = places.sees if places else np.arange(count)
        if self._temperature:
            positions = kv.next_position + np.arange(count)
            self._temperatures[:count] = temperatures(self._temperature, positions)
        angles = sequence.angles if count <= ROPE_AHEAD else self._chunk_angles
        reads = sequence.reads if alone else 0
        self._pages[:] = pages_read(reads), kv.store.bounded
        if places is None or places.consecutive or not self._layout.network.ropes:
            angle = angles.row(kv.rope.rotation, kv.next_rope_position, count)
        else:
            base = kv.next_rope_position - kv.next_position
            angle = self._chunk_angles.place(kv.rope.rotation, places.positions + base)
        self._finish(
            count, kind=Job.STEP if alone else Job.CHUNK, position=kv.next_position,
            angle=angle, wanted=wanted,
            observed=min(count, sequence.observed), votes=int(sequence.votes), sequence=sequence.number, drafts=0,
        )  # fmt: skip
        then()
        kv.appended(count, None if encoder else places)
        if reads:
            kv.store.stepped(reads)
        self._end()
        return self._logits_of(max(wanted, 0))

    def _run_top(self, sequence: NativeSequence, tokens: IntArray, count: int) -> list[tuple[IntArray, FloatArray]]:
        """Run a token of a sequence, or verify several. Returns the `count` largest logits after each: ids, values."""
        stages, workers, rows = self.stages, self._workers, tokens.size
        if stages is None or workers is None:
            raise EngineError("the engine is closed")
        if not stages.pays(count):
            whole = self._run(sequence, tokens, 1) if rows == 1 else self._verify(sequence, tokens)
            return [largest_of(each, count) for each in whole]
        tiles = np.zeros(0, np.int32)

        def rescore() -> None:
            nonlocal tiles
            tiles = stages.survivors(count, rows)
            workers.run(kind=Job.RESCORE, count=tiles.size, wanted=rows)

        (self._run if rows == 1 else self._verify)(sequence, tokens, Job.ESTIMATED, then=rescore)
        logits = self._logits.reshape(-1, self._padded_vocab)
        return [stages.largest(logits[row], tiles, count) for row in range(rows)]

    def _run_batch(self, tokens: IntArray, sequences: Sequence[NativeSequence]) -> FloatArray:
        """Run one token each of several sequences. Returns their logits."""
        count = tokens.size
        self._begin(tokens, sequences[0].adapters)
        positions, observed = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for place, sequence in enumerate(sequences):
            kv = sequence.kv
            sequence.prepare(1, place)
            positions[place] = kv.next_position
            observed[place] = 1 + sequence.votes if sequence.observed else 0
            row = sequence.angles.row(kv.rope.rotation, kv.next_rope_position, 1)
            self._angles[:, self._batch_angles + place] = self._angles[:, row]
        return self._run_together(positions, observed, self._batch_angles, [(each, 1) for each in sequences])

    def _run_together(
        self, positions: IntArray, observed: IntArray, angle: int, sequences: Sequence[tuple[NativeSequence, int]],
        drafts: int = 0, wanted: int | None = None, then: Callable[[], None] = lambda: None,
    ) -> FloatArray:  # fmt: skip
        """Run the tokens of `_begin`, each as if it ran alone. angle: the row of the first token's angles. sequences:
        each with the number of its new rows. wanted, then: as for `_verify`. Returns the tokens' logits."""
        count = positions.size
        numbers = np.repeat([each.number for each, _ in sequences], [rows for _, rows in sequences])
        self._tokens[count : 4 * count] = np.concatenate([positions, observed, numbers])
        if self._temperature:
            self._temperatures[:count] = temperatures(self._temperature, positions)
        fitting = (at for at, size in enumerate(self._batches) if size >= count)
        self._finish(
            count, kind=Job.BATCH + next(fitting, len(self._batches) - 1), position=0, angle=angle,
            wanted=count if wanted is None else wanted, observed=int(observed.any()), votes=0,
            sequence=sequences[0][0].number, drafts=drafts,
        )  # fmt: skip
        then()
        for sequence, rows in sequences:
            sequence.kv.appended(rows)
        self._end()
        return self._logits_of(count)

    def _begin(self, tokens: IntArray, adapters: int | None, given: GivenRows | None = None) -> None:
        if self._workers is None:
            raise EngineError("the engine is closed")
        self._check_weights()
        if given is not None:  # they go where the pass puts embeddings
            beyond = tokens >= self.spec.vocab
            self._behind_layers[: tokens.size][beyond] = given.rows(tokens)
            tokens = np.where(beyond, np.int32(-1), tokens)
        self._tokens[: tokens.size] = tokens
        self._adapters.run(adapters)
        self._look_up(tokens)

    def _finish(self, count: int, **numbers: int) -> None:
        """Run a pass, whose rows have been prepared."""
        assert self._workers is not None
        if self._experts:
            self._experts.begin(count)
        self._ran = count
        self._workers.run(count=count, disk=self._disk.wanted(), **numbers)
        if self._experts:
            self._experts.check()

    def _end(self) -> None:
        """Raise a deferred KeyboardInterrupt, after the pass's rows were recorded."""
        if self._experts:
            self._experts.interrupt()

    def _logits_of(self, count: int) -> FloatArray:
        return self._logits.reshape(-1, self._padded_vocab)[:count, : self.spec.vocab]

    def _look_up(self, tokens: IntArray) -> None:
        """Write the table's share of the tokens' vectors for each layer (`PerLayerInput`): of given rows, token 0's."""
        if self._token_table is None:
            return
        size, layers = self._layout.shape.layer_inputs, self.spec.layers
        for part, rows in self._token_table.read(np.maximum(tokens, 0)):
            self._inputs[part, :, :size] = rows.reshape(-1, layers, size) * np.float32(math.sqrt(size / 2))

    def _pointers(self) -> tuple[Any, ...]:
        """The arguments of a pass, in the order of `generator.pointers_of`."""
        rings = [f"{RING}{name}" for name in RINGS] if self._rings else []
        optional = [
            name for name in (*STATES, *TIMES, *LORA, *PAGES) if name in self._arrays and self._arrays[name].size
        ]
        return ctypes.c_void_p(self._base), *(pointer(self._arrays[name]) for name in (*_ARRAYS, *rings, *optional))


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

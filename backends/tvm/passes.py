"""Compiled passes: their arguments, their scratch memory, and one call of compiled code each.

A sequence writes the inputs with `begin`, calls `run`, and reads `logits` or `largest`. Of sequences, passes know only
the numbers.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_whole
from edge.backends.rope import Rotation
from edge.backends.token_table import TokenTable
from edge.backends.tvm.adapters import Adapters
from edge.backends.tvm.cpu.arguments import CROSS, LORA, PAGES, POINTERS, RINGS, STATES, TIMES, Job, Table
from edge.backends.tvm.cpu.elf import Image
from edge.backends.tvm.cpu.memory import PassMemory
from edge.backends.tvm.cpu.streaming import Disk
from edge.backends.tvm.cpu.table import Streams, fill_table
from edge.backends.tvm.cpu.timing import thread_words
from edge.backends.tvm.cpu.two_stages import TwoStages
from edge.backends.tvm.cpu.workers import Workers
from edge.backends.tvm.design import Design
from edge.backends.tvm.kv.balance import find_balances
from edge.backends.tvm.kv.memory import RING
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.memory import aligned_zeros, pointer, release
from edge.backends.tvm.packing.layout import TABLE, PackedLayout
from edge.backends.tvm.packing.shape import ROPE_AHEAD
from edge.backends.tvm.packing.weights import PackedWeights
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import temperatures
from edge.model.parts.given import GivenRows
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

if TYPE_CHECKING:
    from edge.backends.fixed_state import FixedState
    from edge.backends.tvm.cpu.slots import ExpertSlots

_ARRAYS = tuple(name for name in POINTERS if name not in ("job", "lines", "weights"))
_NORMED = 256  # states that are normalised at a time


class Angles:
    """Rows of the table of rotary angles from `first` on, for consecutive positions, computed ahead.

    table: float32 [kinds of layers, rows, 2 · head].
    """

    def __init__(self, table: FloatArray, first: int = 0) -> None:
        self._table, self._first = table, first
        self._rotation: Rotation | None = None
        self._from = self._count = 0  # positions

    def row(self, rotation: Rotation, position: int, count: int) -> int:
        """The row of the table where the next `count` positions begin."""
        if self._rotation is not rotation:
            self._rotation, self._count = rotation, 0
        if not self._from <= position <= position + count <= self._from + self._count:
            ahead = max(count, ROPE_AHEAD)
            self.place(rotation, np.arange(position, position + ahead))
            self._from, self._count = position, ahead
        return self._first + position - self._from

    def place(self, rotation: Rotation, positions: AnyArray) -> int:
        """The row where the angles of these positions begin, [n] or [n, components]."""
        self._count = 0
        for kind, table in enumerate(self._table):
            cos, sin = rotation.tables(kind, positions)
            pairs = np.stack([-sin, sin], axis=-1).reshape(len(sin), -1)
            rows = np.concatenate([np.repeat(cos, 2, axis=1), pairs], axis=1)  # all cosines, −sin and +sin of each pair
            table[self._first : self._first + len(positions)] = rows
        return self._first


class Passes:
    """All memory is allocated here, at load; passes allocate only temporaries.

    arrays: the arguments of compiled code, by name. states: of the last pass's tokens behind the last layer, and where
    given rows stand before the first one, [tokens, hidden]. drafted: the fixed state whose drafts' inputs are kept.
    """

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, layout: PackedLayout, design: Design, image: Image,
        packed: PackedWeights, streams: Streams | None, slots: int, main: Passes | None,
        shared: Mapping[str, AnyArray] | None = None,
    ) -> None:  # fmt: skip
        """streams: of streamed weights. slots: bytes of the slots of experts, 0: without. main: the passes that a layer
        for multi-token prediction shares embedding and head with. shared: arrays of rows, and of their places, that
        take the place of its own."""
        self.spec, self.layout, shape = spec, layout, layout.shape
        self.weights, self._others = packed.bytes, None if main is None else main.weights
        base, placed = self.weights.ctypes.data, layout
        if main is not None:
            at, others_at = base, main.weights.ctypes.data
            base = min(at, others_at)
            placed = layout.beside(main.layout, at - base, others_at - base)
        self.memory = memory = PassMemory.of(spec, config, design.target, design.estimates * (1 + config.drafts))
        self.arrays = arrays = memory.allocate() | dict(shared or {})
        scratch, self.floats, self.integers = memory.scratch, arrays["floats"], arrays["integers"]
        reads = 0
        if slots:
            from edge.backends.tvm.cpu.slots import ExpertSlots, reads_size

            reads = reads_size(layout)
        self.balances = find_balances(file, layout, config.kv_dtype)
        numbers = fill_table(placed, memory, streams, reads, self.balances)
        self.table = arrays["table"] = aligned_zeros(len(numbers), "int64")
        self.table[:] = numbers
        at = Table.of(shape).slot("pages")
        self.pages = self.table[at : at + 2]  # "pages" and "bounded"
        self.adapters = Adapters(layout, self.table, arrays["lora"], config, exact=design.exact)
        self._may_adapt = config.lora_rank > 0
        self.experts: ExpertSlots | None = None
        if slots:
            address = self.weights.ctypes.data
            self.experts = ExpertSlots(packed.path, layout, scratch, self.table, self.integers, slots, address)

        def of_floats(name: str, *shape: int) -> FloatArray:
            return scratch.array(self.floats, name).reshape(-1, *shape)

        self.normals = of_floats("normals", shape.padded_head)
        self.states = of_floats("x", shape.padded_hidden)[:, : spec.hidden]
        self._given = of_floats("given", shape.padded_hidden)
        core = layout.network.features
        self._features = of_floats("features", core.size if core else 1)
        self._fuses = self.table[(at := Table.of(shape).slot("fuses")) : at + 1]
        self._embeddings: FloatArray | None = None  # of the next pass, in place of its tokens
        self._taps = of_floats("taps", max(1, len(config.taps)), shape.padded_hidden)[:, :, : spec.hidden]
        self._deepstack = of_floats("deepstack", max(1, shape.deepstack), shape.padded_hidden)[..., : spec.hidden]
        self.stages: TwoStages | None = None  # of the head; counts are those of all sequences
        if design.estimates and not config.resident:
            self.stages = TwoStages.of(spec.vocab, scratch, self.floats, self.integers)
        self._tiles: IntArray = np.zeros(0, np.int32)  # of the head, whose logits the last pass computed
        self._inputs = of_floats("layer_inputs", shape.layers, max(1, shape.padded_inputs))
        self._token_table = TokenTable(file, f"{TABLE}.weight") if shape.layer_inputs else None
        self._temperature = next((core.temperature for core in layout.network.attention if core), None)
        self._temperatures = of_floats("temperatures")
        self.tokens, self._batches = arrays["tokens"], design.batches
        self.angles = arrays["rope"].reshape(memory.arrays["rope"].shape)
        self.chunk_angles = Angles(self.angles)
        self._logits = arrays["logits"].reshape(memory.arrays["logits"].shape)
        self._ran = 0  # tokens of the last pass
        self.drafted: FixedState | None = None
        arrays["times"] = aligned_zeros(config.threads * thread_words(shape.layers) if design.timed else 0, "int64")
        self._disk = Disk() if streams else None
        rings = [f"{RING}{name}" for name in RINGS] if len(memory.kv.arenas) > 1 else []
        optional = [name for name in (*STATES, *TIMES, *LORA, *PAGES, *CROSS) if name in arrays and arrays[name].size]
        pointers = (pointer(arrays[name]) for name in (*_ARRAYS, *rings, *optional))  # as `generator.pointers_of`
        self.workers: Workers | None = Workers(
            image, config.threads, (ctypes.c_void_p(base), *pointers), fixed=bool(design.timed or streams or slots)
        )
        weakref.finalize(self, self.workers.close)  # also at exit: threads must not outlive the interpreter

    def check_open(self) -> Workers:
        """The threads. Raises EngineError once the engine is closed."""
        if self.workers is None:
            raise EngineError("the engine is closed")
        return self.workers

    def begin(self, tokens: IntArray, sequence: int, given: GivenRows | None = None) -> None:
        """Write the tokens of a pass, and look up their vectors. sequence: whose adapters apply."""
        self.check_open()
        mapped = getattr(self.weights.base, "obj", None)
        if isinstance(mapped, mmap.mmap):
            check_whole("a file of packed weights in the cache folder", mapped.size(), self.layout.nbytes)
        if given is not None:  # they go where the pass puts embeddings
            beyond = tokens >= self.spec.vocab
            first, *others = given.parts(tokens)
            self.states[: tokens.size][beyond] = first
            for layer, part in enumerate(others):
                self._deepstack[: tokens.size][beyond, layer] = part
            tokens = np.where(beyond, np.int32(-1), tokens)
        if self._embeddings is not None:
            self.states[: tokens.size], tokens = self._embeddings, np.full(tokens.size, -1, np.int32)
            self._embeddings = None
        self.tokens[: tokens.size] = tokens
        if self._may_adapt:
            self.adapters.run(sequence)
        if self._token_table:  # each layer's share of the vectors (`PerLayerInput`): of given rows, token 0's
            size, layers = self.layout.shape.layer_inputs, self.spec.layers
            for part, rows in self._token_table.read(np.maximum(tokens, 0)):
                self._inputs[part, :, :size] = rows.reshape(-1, layers, size) * np.float32(math.sqrt(size / 2))

    def run(self, count: int, position: int, top: int = 0, **numbers: int) -> None:
        """Run the `count` tokens of `begin`, the first at `position`. numbers: others of the `Job`. top: compute only
        the logits among which the `top` largest are.

        Whoever calls records the new rows next, then calls `finish`: so an interruption leaves none, or all.
        """
        if self._temperature:
            self._temperatures[:count] = temperatures(self._temperature, position + np.arange(count))
        self._run(count, top, position=position, **numbers)

    def run_together(
        self, positions: IntArray, observed: IntArray, sequences: IntArray, angle: int, top: int = 0, drafts: int = 0
    ) -> None:
        """As `run`, with all logits, each token as if it ran alone. observed: see `Job`. sequences: the numbers of the
        tokens' sequences. angle: the row of the first token's angles. drafts: a value of `Job.drafts`."""
        count = positions.size
        self.tokens[count : 4 * count] = np.concatenate([positions, observed, sequences])
        if self._temperature:
            self._temperatures[:count] = temperatures(self._temperature, positions)
        fitting = (at for at, size in enumerate(self._batches) if size >= count)
        self._run(
            count, top, kind=Job.BATCH + next(fitting, len(self._batches) - 1), position=0, angle=angle, wanted=count,
            observed=int(observed.any()), votes=0, sequence=int(sequences[0]), drafts=drafts,
        )  # fmt: skip

    def _run(self, count: int, top: int, *, wanted: int, **numbers: int) -> None:
        if self.experts:
            self.experts.begin(count)
        self._ran, workers = count, self.check_open()
        workers.run(
            count=count,
            disk=self._disk.wanted() if self._disk else 0,
            wanted=Job.ESTIMATED if top else wanted,
            **numbers,
        )
        if self.experts:
            self.experts.check()
        if top:
            assert self.stages is not None
            self._tiles = self.stages.survivors(top, count)
            workers.run(kind=Job.RESCORE, count=self._tiles.size, wanted=count)

    def finish(self) -> None:
        """Raise a KeyboardInterrupt that came while experts were read."""
        if self.experts:
            self.experts.interrupt()

    def logits(self, count: int) -> FloatArray:
        """The first `count` rows of logits of the last pass."""
        return self._logits[:count, : self.spec.vocab]

    def largest(self, rows: int, count: int) -> list[tuple[IntArray, FloatArray]]:
        """The `count` largest logits of each of `rows` tokens, if the last pass ran with `top=count`."""
        assert self.stages is not None
        return [self.stages.largest(self._logits[row], self._tiles, count) for row in range(rows)]

    def apply(self, sequence: int, count: int) -> None:
        """Add the first `count` tokens of the last verification to a sequence's fixed state."""
        self.check_open().run(kind=Job.APPLY, count=count, sequence=sequence, drafts=Job.APPLIED)

    def normed_states(self, count: int) -> FloatArray:
        """See MTPEngine: the last pass's states, normalised as for the head."""
        states = self.states[max(0, self._ran - count) : self._ran]
        if self.layout.network.features:
            return np.array(states)
        shape, floats = self.layout.shape, self.weights.view(np.float32)

        def vector(name: str) -> FloatArray:
            at = self.layout.places[name].quants // floats.itemsize
            return np.asarray(floats[at : at + shape.hidden])

        found: FloatArray = np.empty(states.shape, np.float32)
        for at in range(0, len(states), _NORMED):
            part, out = states[at : at + _NORMED], found[at : at + _NORMED]
            if shape.norm == "layer":
                part = part - part.mean(axis=-1, keepdims=True)
            squares = np.mean(np.square(part), axis=-1, keepdims=True)
            np.divide(part, np.sqrt(squares + np.float32(shape.norm_eps)), out=out)
            out *= vector("output_norm")
            if shape.output_norm_bias:
                out += vector("output_norm.bias")
        return found

    def set_crossed(self, states: FloatArray) -> None:
        """See CrossEngine."""
        workers, most, step = self.check_open(), self.memory.cross_stride, len(self.states)
        if len(states) > most:
            raise EngineError(f"{len(states)} states to read across, and there is room for {most}")
        for at in range(0, len(states), step):
            part = states[at : at + step]
            self.states[: len(part)] = part
            workers.run(kind=Job.CROSS, count=len(part), position=at, wanted=0)
        self.table[self._cross_rows] = len(states)

    def rest(self) -> None:
        """See CrossEngine."""
        normals = self.normals.copy()  # of keys, among the floats
        across = [self.arrays[name] for name in CROSS if name in self.arrays]
        for array in (self.weights, self.floats, self.integers, *across):
            release(array)
        if normals.any():
            self.normals[:] = normals

    def crossed(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """See CrossEngine."""
        self.check_open()
        core = self.layout.network.attention[layer]
        assert core is not None
        row, stride, count = core.row, self.memory.cross_stride, int(self.table[self._cross_rows])
        first = self.memory.cross_row(self.layout.network, layer)
        keys, values = (
            self.arrays[name].reshape(-1, self.memory.arrays[name].shape[1])[first : first + row.heads * stride]
            .reshape(row.heads, stride, -1) for name in CROSS
        )  # fmt: skip
        in_tiles = keys.reshape(row.heads, stride // TILE, -1, TILE).swapaxes(2, 3).reshape(keys.shape)
        found = in_tiles[:, :count, : row.key], values[:, :count, : row.value]
        return np.asarray(found[0], np.float32), np.asarray(found[1], np.float32)

    @property
    def _cross_rows(self) -> int:
        return Table.of(self.layout.shape).slot("cross_rows")

    def layer_states(self, count: int) -> FloatArray:
        """See StatesEngine."""
        found = self._taps[max(0, self._ran - count) : self._ran]
        return np.asarray(found.reshape(len(found), -1))

    def give(self, states: FloatArray, embeddings: FloatArray | None = None) -> None:
        """See MTPEngine."""
        if len(states) > len(self._given):  # no room if no layer reads states, and once the engine is closed
            raise EngineError(f"{len(states)} states are given, and there is room for {len(self._given)}")
        self._embeddings = embeddings
        if fuses := len(self._features) > 0 and states.shape[1] == self._features.shape[1]:
            self._features[: len(states)] = states
        else:
            self._given[: len(states), : self.spec.hidden] = states
        self._fuses[:] = fuses

    def close(self, file: GGUFFile) -> None:
        """End the threads, and free all memory; safe to call twice. file: of the model."""
        if self.workers is not None:
            self.workers.close()
        self.workers = None
        if self._token_table:
            self._token_table.close()
        if self.experts:
            from edge.backends.tvm.cpu.expert_trace import save_trace

            save_trace(file, self.experts.trace)
            self.experts.close()
        self.experts = self.stages = self._others = None
        self.arrays.clear()
        self.weights = self.floats = self.integers = self.adapters.memory = np.zeros(0, np.uint8)
        self._temperatures = self._inputs = np.zeros(0, np.float32)
        self.normals = self.states = self._given = self._features = self._fuses = np.zeros((0, 0), np.float32)
        self._taps = np.zeros((0, 1, 1), np.float32)
        self._deepstack = np.zeros((0, 1, 1), np.float32)

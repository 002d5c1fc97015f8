"""The passes of a program on a device: their buffers, their inputs and their results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_positions
from edge.backends.head_kv import HeadKV
from edge.backends.rope import Rotation
from edge.backends.token_table import TokenTable
from edge.backends.tvm.gpu.crossing import CrossRows
from edge.backends.tvm.gpu.design import ANGLES_AHEAD, CROSS, RING_MOVE, Design, RowForm, State, input_stride
from edge.backends.tvm.gpu.hosts import Buffer, Device, Recording
from edge.backends.tvm.gpu.kv import DeviceRows
from edge.backends.tvm.gpu.memory import DeviceMemory
from edge.backends.tvm.gpu.program import Program
from edge.backends.tvm.gpu.state import DeviceState
from edge.backends.tvm.kv.memory import RING, ArenaSize
from edge.backends.tvm.kv.store import Arena, NativeStore
from edge.backends.tvm.packing.layout import TABLE
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import temperatures
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray

DeviceKV = HeadKV[NativeStore[DeviceRows]]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a pass. wanted: the last ones whose logits are wanted. rows: those that this pass and the ones that
    follow on the device append. observed, votes: see `State`."""

    ids: IntArray
    wanted: int = 0
    rows: int = 0
    places: Places | None = None
    observed: int = 0
    votes: bool = False


class DevicePasses:
    """All buffers are allocated here, at load. recordings: of the program's passes, by name. adapted: the matrices that
    LoRA adapters change. normals: of the keys' reflections."""

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, design: Design, device: Device, program: Program
    ) -> None:
        self.spec, self.config, self.design, self.device, self.program = spec, config, design, device, program
        self.network = network = find_network(spec)
        self.memory = memory = DeviceMemory.of(spec, config, design.tables)
        shape = design.shape
        arrays = {name: array.zeros() for name, array in memory.kv.bookkeeping().items()}
        heads = shape.layers * shape.kv_heads if design.tables.normal else 0
        self.normals = normals = np.zeros((heads, shape.padded_head), np.float32)

        def make_arena(size: ArenaSize) -> Arena[DeviceRows]:
            observes, kernel = config.observes and not size.prefix, RING_MOVE if size.prefix else "edge_move"
            rows = DeviceRows(
                device, size.rows, RowForm.of(size.core, config.kv_dtype), observes=observes,
                normals=normals[:, : size.row.key], kernel=kernel,
            )  # fmt: skip
            return Arena(shape, rows, arrays, size.prefix)

        self.arena, *rings = map(make_arena, memory.kv.arenas)
        self.rings = rings[0] if rings else None
        size = sum(network.fixed_values)
        self.state = DeviceState(device, size) if size else None
        self.across = CrossRows(device, design, network, config) if network.crossings else None
        self._token_table = TokenTable(file, f"{TABLE}.weight") if shape.layer_inputs else None
        self.buffers = self._make_buffers()
        self.recordings: dict[str, Recording] = {}
        self.adapted = design.adapters.all_of(design.weights)
        self._words = np.zeros(design.tables.angles, np.uint32)  # the state, starts, lengths and places
        self._placed = self.rings or self.arena
        self._sent = np.zeros(self._placed.positions.size, np.int32)  # positions as the device has them
        self._rotation: Rotation | None = None  # of the angles that the device has
        self._angles_from = self._angles_known = 0
        self.closed = False

    def _make_buffers(self) -> dict[str, Buffer]:
        weights, adapters = self.design.weights, self.design.adapters
        sizes = weights.buffers | adapters.buffers(weights)
        sizes |= {name: buffer.nbytes for name, buffer in self.memory.buffers.items()}
        made = self._row_buffers() | ({"states": self.state.buffer} if self.state else {})
        return made | {name: self.device.create(size) for name, size in sizes.items() if name not in made}

    def _row_buffers(self) -> dict[str, Buffer]:
        arenas = self._row_arenas()
        return {mark + name: buffer for mark, rows in arenas.items() for name, buffer in rows.buffers.items()}

    def _row_arenas(self) -> dict[str, DeviceRows]:
        """All arenas' rows, by what stands before the names of their buffers."""
        found = {"": self.arena, RING: self.rings, CROSS: self.across}
        return {mark: arena.rows for mark, arena in found.items() if arena}

    def record(self) -> None:
        """Record all passes again, after buffers or adapters have changed."""
        for rows in self._row_arenas().values():
            rows.record()
        self.buffers |= self._row_buffers()
        passes = {name: self.program.dispatches(name, self.adapted) for name in self.program.passes}
        passes |= {name.replace("step", "greedy"): passes[name] + passes["picked"] for name in passes if "step" in name}
        for name, dispatches in passes.items():
            self.recordings[name] = self.device.record(dispatches, self.buffers)

    def write(self, name: str, words: AnyArray, at: int = 0) -> None:
        """Write 4-byte elements of a buffer from element `at` on."""
        self.device.write(self.buffers[name], 4 * at, words)

    def check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")

    def prepare(self, tokens: Tokens, kv: DeviceKV, banned: Sequence[int] = ()) -> None:
        """Prepare a pass over tokens of one sequence."""
        count, words, places = tokens.ids.size, self._words, tokens.places
        self._announce(kv, tokens.rows)
        apart = None if places is None or places.consecutive else places
        angle = self._angles_of(kv, apart) if apart else self._angle_row(kv, tokens.rows)
        words[State.APPENDED], words[State.ANGLE], words[State.PICKED] = 0, angle, 0
        words[State.POSITION], words[State.WANTED] = kv.next_position, tokens.wanted
        words[State.OBSERVED], words[State.VOTES] = min(count, tokens.observed), int(tokens.votes)
        words[State.BANNED] = len(banned)
        words[State.BANS :][: len(banned)] = banned
        words[State.SPAN], words[State.SPAN_STOP] = (0, 0) if places is None else span_of(places)
        self._upload(tokens.ids, kv.next_position + np.arange(count))

    def prepare_batch(self, ids: IntArray, caches: Sequence[DeviceKV]) -> None:
        """Prepare a pass over the next token of each of several sequences."""
        self._words[State.ANGLE] = 0
        for place, kv in enumerate(caches):
            self._announce(kv, 1, place)
            self._write_angles(kv.rope.rotation, np.array([kv.next_rope_position]), place)
        self._angles_known = 0
        self._upload_alone(ids, np.array([kv.next_position for kv in caches]))

    def prepare_drafts(self, ids: IntArray, kv: DeviceKV) -> None:
        """Prepare a pass over tokens of a sequence that run as if one after the other."""
        self._announce(kv, ids.size)
        self.arena.follow(ids.size)
        self._words[State.ANGLE] = self._angle_row(kv, ids.size)
        self._upload_alone(ids, kv.next_position + np.arange(ids.size))

    def _announce(self, kv: DeviceKV, rows: int, place: int = 0) -> None:
        """Announce rows of a sequence, the `place`-th of a pass."""
        self.check_open()
        check_positions(self.spec, kv.next_position + rows)
        if self.arena.rows.changed:
            self.record()
        for store in kv.stores:
            store.place_in_pass = place
        kv.prepare(rows)

    def _upload_alone(self, ids: IntArray, positions: AnyArray) -> None:
        words = self._words
        words[self.design.tables.places :][: ids.size] = positions
        self._upload(ids, positions)

    def _upload(self, ids: IntArray, positions: AnyArray) -> None:
        """Upload the kernels' inputs: tokens, the state, the heads' rows, and positions."""
        design, words, arena, placed = self.design, self._words, self.arena, self._placed
        if temperature := self.network.temperature:
            factors = temperatures(temperature, positions)
            self.write("tables", factors.astype(np.float32), design.tables.temperatures)
        if (moved := np.flatnonzero(placed.positions != self._sent)).size:
            first, last = int(moved[0]), int(moved[-1]) + 1
            self._sent[first:last] = placed.positions[first:last]
            self.write("tables", self._sent[first:last], design.tables.positions + first)
        words[State.COUNT] = ids.size
        words[design.tables.starts :][: arena.starts.size] = arena.starts
        words[design.tables.lengths :][: arena.lengths.size] = arena.lengths
        if self.across:
            self.across.place(words)
        if self._token_table:
            self.write("layer_inputs", self._looked_up(self._token_table, ids))
        self.write("tables", words)
        self.write("tokens", ids)

    def prepare_states(self, states: FloatArray) -> None:
        """Prepare the pass `cross` over states, float32 [n, hidden]."""
        assert self.across
        self._words[State.COUNT], self._words[State.APPENDED] = len(states), 0
        self.across.place(self._words)
        self.write("tables", self._words)
        padding = self.design.shape.padded_hidden - self.spec.hidden
        self.write("x", np.pad(states, ((0, 0), (0, padding))).astype(np.float32))

    def _looked_up(self, table: TokenTable, tokens: IntArray) -> FloatArray:
        """The table's share of the tokens' vectors for each layer (`PerLayerInput`)."""
        size, layers = self.design.shape.layer_inputs, self.spec.layers
        found = np.zeros((tokens.size, layers, input_stride(size)), np.float32)
        for part, rows in table.read(np.maximum(tokens, 0)):  # of given rows, token 0's
            found[part, :, :size] = rows.reshape(-1, layers, size) * np.float32(math.sqrt(size / 2))
        return found

    def _angle_row(self, kv: DeviceKV, count: int) -> int:
        """The row of the RoPE table where the next `count` positions begin."""
        first, rotation = kv.next_rope_position, kv.rope.rotation
        if self._rotation is not rotation:
            self._rotation, self._angles_known = rotation, 0
        if not self._angles_from <= first <= first + count <= self._angles_from + self._angles_known:
            self._angles_from = first
            self._angles_known = min(count + ANGLES_AHEAD, self.design.tables.angle_rows)
            self._write_angles(rotation, np.arange(first, first + self._angles_known))
        return first - self._angles_from

    def _angles_of(self, kv: DeviceKV, places: Places) -> int:
        """The row of the RoPE table where the angles of these places begin."""
        self._angles_known, base = 0, kv.next_rope_position - kv.next_position
        self._write_angles(kv.rope.rotation, places.positions + base)
        return 0

    def _write_angles(self, rotation: Rotation, positions: AnyArray, row: int = 0) -> None:
        tables = self.design.tables
        for kind in range(len(rotation.angles)):
            angles = np.stack(rotation.tables(kind, positions), axis=1)  # [positions, 2, pairs]
            self.write("tables", angles, tables.angle_row(kind) + 2 * tables.pairs * row)

    def write_given(self, places: Sequence[int], parts: FloatArray) -> None:
        """Write the rows of tokens that have no embeddings, and parts for the first layers, [parts, n, hidden]."""
        padded = self.design.shape.padded_hidden
        parts = np.pad(parts, [(0, 0), (0, 0), (0, padded - parts.shape[2])])
        first, *others = parts
        for number, token in enumerate(places):
            self.write("x", first[number], padded * token)
            for layer, part in enumerate(others):
                self.write("deepstack", part[number], padded * (layer * self.design.chunk + token))

    def logits(self, rows: int) -> FloatArray:
        """Logits of the last pass, float32 [rows, vocab]."""
        values: AnyArray = self.device.read(self.buffers["logits"], 0, 4 * rows * self.spec.vocab)
        return values.view(np.float32).reshape(rows, -1)

    def close(self) -> None:
        self.closed = True
        self.device.close()
        if self._token_table:
            self._token_table.close()


def spans_of(places: Places) -> AnyArray:
    """The last tokens of the spans that see all of themselves."""
    return np.flatnonzero(np.bincount(places.sees) > 1)


def span_of(places: Places) -> tuple[int, int]:
    """First token, and the token behind the last, of a pass's only span; 0 and 0 if there is none."""
    ends = spans_of(places)
    return (int(np.argmax(places.sees == ends[0])), int(ends[0]) + 1) if ends.size else (0, 0)

"""The GPU engine: tokens in, logits out, all kernels of a pass in one submission to the device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from edge.backends.base import EngineConfig, LoadProgress
from edge.backends.checks import check_lora, check_positions, check_tokens, divide
from edge.backends.head_kv import HeadKV
from edge.backends.kv_cache import state_key
from edge.backends.rope import CacheRope, Rotation
from edge.backends.token_table import TokenTable
from edge.backends.tvm.gpu import ENGINE, picking
from edge.backends.tvm.gpu.adapters import Adapted, pack_adapters
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.crossing import CrossRows
from edge.backends.tvm.gpu.design import ANGLES_AHEAD, CROSS, PICKS, RING_MOVE, Design, RowForm, State, input_stride
from edge.backends.tvm.gpu.hosts import Buffer, Recording, card_of, choose_adapter, open_device
from edge.backends.tvm.gpu.kv import DeviceRows
from edge.backends.tvm.gpu.memory import DeviceMemory
from edge.backends.tvm.gpu.program import Dispatch
from edge.backends.tvm.gpu.state import DeviceState
from edge.backends.tvm.gpu.weights import pack_weights
from edge.backends.tvm.kv.memory import RING, ArenaSize
from edge.backends.tvm.kv.store import Arena, NativeStore, append_rows, choose_normals, make_kv
from edge.backends.tvm.packing.layout import TABLE
from edge.backends.tvm.sources import source_hash
from edge.devices.power.estimate import gpu_work
from edge.errors import NOT_FINITE, EngineError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.adapters.lora import Lora
from edge.model.architectures.angles import temperatures
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors
from edge.types import AnyArray, FloatArray, IntArray

_COMPILED, _PREPARED = 0.3, 0.5  # of the time of loading


class GPUEngine:
    """The ObservedEngine, PickingEngine, AdaptedEngine and CrossEngine protocols over a program on a device. All memory
    is allocated at load."""

    capabilities = ENGINE.CAPABILITIES
    most_candidates, most_banned = picking.TOP, State.MOST_BANS

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: LoadProgress | None = None
    ) -> None:
        self.spec, self.config, self._network, self._file = spec, config, find_network(spec), file
        report = progress or (lambda _part, _doing="": None)
        adapter = choose_adapter(config.adapter or None)
        self.card = card_of(adapter)
        design = self.design = Design.of(file, spec, config, adapter)
        program = program_of(design, lambda part: report(_COMPILED * part, "making kernels for this GPU"))
        device = self._device = open_device(adapter)
        weakref.finalize(self, device.close)
        try:
            device.prepare(
                program.kernels,
                lambda part: report(_COMPILED + (_PREPARED - _COMPILED) * part, "compiling kernels for this GPU"),
            )
            self._kv = self._make_cache(file)
            self._token_table = TokenTable(file, f"{TABLE}.weight") if design.shape.layer_inputs else None
            self._buffers = self._make_buffers()
            done = 0
            for name, offset, words in pack_weights(file, spec, design.weights):
                device.write(self._buffers[name], offset, words)
                done += words.nbytes
                report(_PREPARED + (1 - _PREPARED) * done / design.weights.nbytes)
            self._program, self._passes = program, dict[str, Recording]()
            self._adapted = design.adapters.all_of(design.weights)
            self._record()
            self._tables = np.zeros(design.tables.angles, np.uint32)  # the state, starts and lengths
            self._sent = np.zeros(self._placed.positions.size, np.int32)  # positions as the device has them
            self._rotation: Rotation | None = None  # of the angles that the device has
            self._angles_from = self._angles_known = self._observed = 0
            self._votes = self._closed = False
            self._warm_up()
        except BaseException:
            device.close()
            raise

    def _warm_up(self) -> None:
        """Run every decode kernel once: some drivers compile on the first run, whose time, energy and memory belong to
        loading. If adapters are supported, they are zero here. Then choose the normals of the keys' reflections."""
        if self._across:
            self.set_crossed(np.zeros((1, self.spec.hidden), np.float32))
        for count in sorted({1, min(2, self.config.chunk, self._kv.free)}):
            self.forward(np.zeros(count, np.int32))
            if count == 1 and "long step" in self._passes:
                self._device.run(self._passes["long step"])
            self._kv.truncate(0)
        for name in ("picked", "top"):
            self._device.run(self._passes[name])
        self._device.read(self._buffers["tokens"], 0, 4)
        if self._adapted:
            self._adapted = frozenset()
            self._record()
        if self._normals.size:
            choose_normals(self._kv, self.forward, self.spec.vocab)
            self._model_key = self._kv.settings
            self._device.write(self._buffers["tables"], 4 * self.design.tables.normals, self._normals)

    def _make_cache(self, file: GGUFFile) -> HeadKV[NativeStore[DeviceRows]]:
        spec, config, shape, network = self.spec, self.config, self.design.shape, self._network
        positions = spec.context if config.per_head else config.capacity  # gaps stay open while the context allows
        rope = CacheRope(file, network, positions, halves=network.halves)
        memory = self._memory = DeviceMemory.of(spec, config, self.design.tables)
        arrays = {name: array.zeros() for name, array in memory.kv.bookkeeping().items()}
        heads = shape.layers * shape.kv_heads if self.design.tables.normal else 0
        self._normals = normals = np.zeros((heads, shape.padded_head), np.float32)

        def make_arena(size: ArenaSize) -> Arena[DeviceRows]:
            observes, kernel = config.observes and not size.prefix, RING_MOVE if size.prefix else "edge_move"
            rows = DeviceRows(
                self._device, size.rows, RowForm.of(size.core, config.kv_dtype), observes=observes,
                normals=normals[:, : size.row.key], kernel=kernel,
            )  # fmt: skip
            return Arena(shape, rows, arrays, size.prefix)

        self._arena, *rings = map(make_arena, memory.kv.arenas)
        self._rings = rings[0] if rings else None
        self._placed = self._rings or self._arena
        size = sum(network.fixed_values)
        self._state = DeviceState(self._device, size) if size else None
        self._across = CrossRows(self._device, self.design, network, config) if network.crossings else None
        key = state_key(f"{ENGINE.NAME} {source_hash('gpu', 'kv')}", file, spec, config.kv_dtype)
        self._model_key = key
        return make_kv(self._arena, memory.kv.kinds, *memory.kv.regions(), rope, key, config, self._state, self._rings)

    def _make_buffers(self) -> dict[str, Buffer]:
        weights, adapters = self.design.weights, self.design.adapters
        sizes = weights.buffers | adapters.buffers(weights)
        sizes |= {name: buffer.nbytes for name, buffer in self._memory.buffers.items()}
        made = self._row_buffers() | ({"states": self._state.buffer} if self._state else {})
        return made | {name: self._device.create(size) for name, size in sizes.items() if name not in made}

    def _row_buffers(self) -> dict[str, Buffer]:
        arenas = self._row_arenas()
        return {mark + name: buffer for mark, rows in arenas.items() for name, buffer in rows.buffers.items()}

    def _row_arenas(self) -> dict[str, DeviceRows]:
        """All arenas' rows, by what stands before the names of their buffers."""
        found = {"": self._arena, RING: self._rings, CROSS: self._across}
        return {mark: arena.rows for mark, arena in found.items() if arena}

    def _record(self) -> None:
        for rows in self._row_arenas().values():
            rows.record()
        self._buffers |= self._row_buffers()
        passes = {name: self._program.dispatches(name, self._adapted) for name in self._program.passes}
        passes |= {name.replace("step", "greedy"): passes[name] + passes["picked"] for name in passes if "step" in name}
        for name, dispatches in passes.items():
            self._passes[name] = self._device.record(dispatches, self._buffers)

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Products that no adapter changes run the kernels without adapters."""
        check_lora(lora, self.config)
        if self._closed:
            raise EngineError("the engine is closed")
        self._kv.truncate(0)
        self._kv.settings, self._adapted = self._model_key, frozenset()
        try:
            if lora:
                self._adapted = self._write_adapters(lora)
                self._kv.settings += f" {lora.key}"
        finally:
            self._record()

    def _write_adapters(self, lora: Lora) -> Adapted:
        """Upload adapters; returns the matrices that they change."""
        tensors, design, changed = find_tensors(self._file, self.spec), self.design, Adapted()
        for (name, offset, words), more in pack_adapters(lora, tensors, design.weights, design.adapters):
            self._device.write(self._buffers[name], offset, words)
            changed |= more
        return changed

    def set_crossed(self, states: FloatArray) -> None:
        """See CrossEngine."""
        across, padded = self._open_across(), self.design.shape.padded_hidden

        def run(part: FloatArray) -> None:
            self._tables[State.COUNT], self._tables[State.APPENDED] = len(part), 0
            across.place(self._tables)
            self._device.write(self._buffers["tables"], 0, self._tables)
            rows = np.pad(part, ((0, 0), (0, padded - self.spec.hidden))).astype(np.float32)
            self._device.write(self._buffers["x"], 0, rows)
            self._device.run(self._passes["cross"], len(part))

        with gpu_work(self.config.threads):
            across.fill(states, run)

    def crossed(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """See CrossEngine."""
        return self._open_across().read(layer)

    def rest(self) -> None:
        """See CrossEngine: buffers stay."""

    def _open_across(self) -> CrossRows:
        if self._closed:
            raise EngineError("the engine is closed")
        assert self._across
        return self._across

    @property
    def kv(self) -> HeadKV[NativeStore[DeviceRows]]:
        return self._kv

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See `ObservedEngine`. Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`."""
        if queries and not self.config.observes:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self._observed, self._votes = queries, votes

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        with gpu_work(self.config.threads):
            self._forward(tokens, given, places)
            last: FloatArray = self._logits(1)[0]
        return last

    def _forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> None:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free, given)
        for part, own in self._divide(tokens, self.config.chunk, given, places):
            self._run(tokens[part], given, own, wanted=int(part.stop == tokens.size))

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free, given)
        logits = np.empty((tokens.size, self.spec.vocab), np.float32)
        step = min(self.config.logits_rows, self.config.chunk)
        with gpu_work(self.config.threads):
            for part, own in self._divide(tokens, step, given, places):
                self._run(tokens[part], given, own, wanted=part.stop - part.start)
                logits[part] = self._logits(part.stop - part.start)
        return logits

    def _divide(
        self, tokens: IntArray, most: int, given: GivenRows | None, places: Places | None
    ) -> list[tuple[slice, Places | None]]:
        """Announce tokens, and divide them into passes of at most `most`. Raises UnsupportedError for rows and places
        that kernels do not know."""
        network = self._network
        if given and network.learned_positions and (tokens >= self.spec.vocab).any():
            raise UnsupportedError("the gpu engine gives rows no learned positions: use --backend=cpu")
        found = divide("gpu", self._kv, network, tokens.size, most, places)
        return [each for part, own in found for each in _single_spans(part, own)]

    def append_rows(self, rows: FloatArray) -> None:
        """See GivenEngine."""
        append_rows(self._kv, rows, self._kv.prepare)

    def run_greedy(self, token: int, count: int, banned: IntArray) -> IntArray:
        """See PickingEngine: all steps are one submission, in which each writes the next one's token."""
        kv, tables = self._kv, self._tables
        tokens = check_tokens(np.full(count, token), self.spec.vocab, kv.free)
        count, length = self._steps(count), kv.length
        kv.announce(count)
        tables[State.BANNED] = banned.size
        tables[State.BANS :][: banned.size] = banned
        self._prepare(tokens[:1], wanted=1, rows=count)
        with gpu_work(self.config.threads):
            self._device.run(self._pass("greedy"), times=count)
            kv.appended(count)
            picked = self._device.read(self._buffers["tokens"], 4 * self.config.chunk, 4 * count).view(np.int32)
        damaged = np.flatnonzero(picked < 0)
        if damaged.size == 0:
            return picked
        kv.truncate(length + max(1, int(damaged[0])))
        if damaged[0] == 0:
            raise EngineError(NOT_FINITE)
        return picked[: damaged[0]]

    def _steps(self, count: int) -> int:
        """The number of these tokens that can run step by step in one submission."""
        if self._network.temperature or self._token_table:  # the host computes their inputs for each token
            return 1
        most = min(count, self.design.tables.angle_rows, PICKS, self._kv.at_once(count))
        if self._network.learned_positions:
            most = min(most, self.spec.context - self._kv.next_position)
        if (few := self._rows_until_long()) > 0:  # all of them run the same kernels as when they run one by one
            most = min(most, few)
        return max(1, most)

    def _rows_until_long(self) -> int:
        """Rows of the longest head that are to come before steps run as `long step`; 0 or less: they do."""
        if "long step" not in self._passes:
            return self.config.capacity
        return self.design.tuning.split_from - self._kv.length

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """See TopEngine."""
        with gpu_work(self.config.threads):
            self._forward(tokens)
            self._device.run(self._passes["top"])
            found = self._device.read(self._buffers["found"], picking.top_offset(self.spec.vocab), 8 * picking.TOP)
        return picking.candidates(found.view(np.uint32), min(count, self.spec.vocab))

    def time_pass(self, tokens: IntArray) -> list[tuple[Dispatch, float]]:
        """Run `forward` and return the seconds of every dispatch."""
        tokens, found = check_tokens(tokens, self.spec.vocab, self._kv.free), list[tuple[Dispatch, float]]()
        for start in range(0, tokens.size, self.config.chunk):
            part = tokens[start : start + self.config.chunk]
            self._prepare(part, 1, part.size)
            names = [self._sized("step" if part.size == 1 else "chunk")]
            if part.size > 1 and start + part.size == tokens.size:
                names.append("last")
            for name in names:
                seconds = self._device.time(self._passes[name], part.size)
                found += zip(self._program.dispatches(name, self._adapted), seconds, strict=True)
            self._kv.appended(part.size)
        return found

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._closed = self._kv.closed = True
        self._device.close()
        if self._token_table:
            self._token_table.close()

    def _run(
        self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None, *, wanted: int
    ) -> None:
        count = tokens.size
        beyond = np.flatnonzero(tokens >= self.spec.vocab)
        self._prepare(np.where(tokens < self.spec.vocab, tokens, np.int32(-1)), wanted, count, places)
        added = given is not None and beyond.size > 0 and self.design.shape.deepstack > 0  # chunks add parts of rows
        if given is not None and beyond.size:
            self._write_given(beyond.tolist(), given.parts(tokens))
        name = "step" if count == 1 and not added else "chunk"
        self._device.run(self._pass(name), count)
        if name == "chunk" and wanted:
            self._device.run(self._passes["last" if wanted == 1 else "rows"], wanted)
        self._kv.appended(count, places)

    def _write_given(self, places: list[int], parts: FloatArray) -> None:
        """Write the rows of tokens that have no embeddings, and parts for the first layers, [parts, n, hidden]."""
        padded = self.design.shape.padded_hidden
        parts = np.pad(parts, [(0, 0), (0, 0), (0, padded - parts.shape[2])])
        first, *others = parts
        for number, token in enumerate(places):
            self._device.write(self._buffers["x"], 4 * padded * token, first[number])
            for layer, part in enumerate(others):
                at = layer * self.config.chunk + token
                self._device.write(self._buffers["deepstack"], 4 * padded * at, part[number])

    def _pass(self, name: str) -> Recording:
        """The recording of a pass, with accumulation of attention if requested."""
        name = self._sized(name)
        if not self._observed:
            return self._passes[name]
        self._arena.rows.observed = True
        return self._passes[f"observed {name}"]

    def _sized(self, name: str) -> str:
        """The name of a pass, of steps behind so many rows."""
        return f"long {name}" if name in ("step", "greedy") and self._rows_until_long() <= 0 else name

    def _prepare(self, tokens: IntArray, wanted: int, rows: int, places: Places | None = None) -> None:
        """Prepare a pass. rows: the number that this pass and those that follow on the device append. places: of its
        tokens; None: consecutive ones."""
        if self._closed:
            raise EngineError("the engine is closed")
        check_positions(self.spec, self._kv.next_position + rows)
        if self._arena.rows.changed:
            self._record()
        self._kv.prepare(rows)
        self._upload(tokens, wanted, rows, places)

    def _upload(self, tokens: IntArray, wanted: int, rows: int, places: Places | None) -> None:
        """Upload the kernels' inputs: tokens, the state, the heads' rows, positions and angles."""
        kv, count, design, device = self._kv, tokens.size, self.design, self._device
        angle = self._angle_row(rows) if places is None or places.consecutive else self._angles_of(places)
        if temperature := self._network.temperature:
            factors = temperatures(temperature, kv.next_position + np.arange(count))
            device.write(self._buffers["tables"], 4 * design.tables.temperatures, factors.astype(np.float32))
        if (moved := np.flatnonzero(self._placed.positions != self._sent)).size:
            first, last = int(moved[0]), int(moved[-1]) + 1
            self._sent[first:last] = self._placed.positions[first:last]
            device.write(self._buffers["tables"], 4 * (design.tables.positions + first), self._sent[first:last])
        state, heads = self._tables, self._arena.starts.size
        state[State.COUNT], state[State.APPENDED], state[State.ANGLE] = count, 0, angle
        state[State.POSITION], state[State.WANTED] = kv.next_position, wanted
        state[State.OBSERVED], state[State.VOTES] = min(count, self._observed), int(self._votes)
        state[State.PICKED] = 0
        state[State.SPAN], state[State.SPAN_STOP] = (0, 0) if places is None else _span(places)
        state[design.tables.starts :][:heads] = self._arena.starts
        state[design.tables.lengths :][:heads] = self._arena.lengths
        if self._across:
            self._across.place(state)
        if self._token_table:
            device.write(self._buffers["layer_inputs"], 0, self._looked_up(self._token_table, tokens))
        device.write(self._buffers["tables"], 0, state)
        device.write(self._buffers["tokens"], 0, tokens)

    def _looked_up(self, table: TokenTable, tokens: IntArray) -> FloatArray:
        """The table's share of the tokens' vectors for each layer (`PerLayerInput`)."""
        size, layers = self.design.shape.layer_inputs, self.spec.layers
        found = np.zeros((tokens.size, layers, input_stride(size)), np.float32)
        for part, rows in table.read(np.maximum(tokens, 0)):  # of given rows, token 0's
            found[part, :, :size] = rows.reshape(-1, layers, size) * np.float32(math.sqrt(size / 2))
        return found

    def _angle_row(self, count: int) -> int:
        """The row of the RoPE table where the next `count` positions begin."""
        first, rotation = self._kv.next_rope_position, self._kv.rope.rotation
        if self._rotation is not rotation:
            self._rotation, self._angles_known = rotation, 0
        if not self._angles_from <= first <= first + count <= self._angles_from + self._angles_known:
            self._angles_from = first
            self._angles_known = min(count + ANGLES_AHEAD, self.design.tables.angle_rows)
            self._write_angles(rotation, np.arange(first, first + self._angles_known))
        return first - self._angles_from

    def _angles_of(self, places: Places) -> int:
        """The row of the RoPE table where the angles of these places begin."""
        self._angles_known, base = 0, self._kv.next_rope_position - self._kv.next_position
        self._write_angles(self._kv.rope.rotation, places.positions + base)
        return 0

    def _write_angles(self, rotation: Rotation, positions: AnyArray) -> None:
        for kind in range(len(rotation.angles)):
            angles = np.stack(rotation.tables(kind, positions), axis=1)  # [positions, 2, pairs]
            self._device.write(self._buffers["tables"], 4 * self.design.tables.angle_row(kind), angles)

    def _logits(self, rows: int) -> FloatArray:
        """Logits of the last pass, float32 [rows, vocab]."""
        values: AnyArray = self._device.read(self._buffers["logits"], 0, 4 * rows * self.spec.vocab)
        return values.view(np.float32).reshape(rows, -1)


def _spans(places: Places) -> AnyArray:
    """The last tokens of the spans that see all of themselves."""
    return np.flatnonzero(np.bincount(places.sees) > 1)


def _span(places: Places) -> tuple[int, int]:
    """First token, and the token behind the last, of a pass's only span; 0 and 0 if there is none."""
    ends = _spans(places)
    return (int(np.argmax(places.sees == ends[0])), int(ends[0]) + 1) if ends.size else (0, 0)


def _single_spans(part: slice, places: Places | None) -> Iterator[tuple[slice, Places | None]]:
    """Divide a pass behind each of its spans but the last: kernels know one."""
    bounds = [0, *(_spans(places)[:-1] + 1).tolist(), part.stop - part.start] if places else [0, part.stop - part.start]
    for start, stop in pairwise(bounds):
        own = None if places is None else places.part(slice(start, stop))
        yield slice(part.start + start, part.start + stop), own

"""The native engine's KV cache: every head keeps its own rows, in place, in its region of memory.

What rows are where, and at which positions, is booked by backends/slots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge.backends.base import KVState, check_capacity, check_range, check_rows, check_state
from edge.backends.longrope import LongRope
from edge.backends.slots import Anchors, Lines, at_once
from edge.backends.tvm.cpu.loading import Call, Image
from edge.backends.tvm.kv.householder import find_normals
from edge.backends.tvm.kv.regions import Move, Regions
from edge.backends.tvm.kv.rotations import Rotation
from edge.backends.tvm.kv.rows import Rows, row_bytes, with_spare
from edge.backends.tvm.memory import aligned_zeros, pointer, release
from edge.backends.tvm.packing.layout import Shape
from edge.errors import EngineError, InputError, UnsupportedError
from edge.types import AnyArray, FloatArray, IntArray

_BASE_BYTES = 8  # a saved state begins with `base`: its keys are turned by position + base


class NativeKV:
    """HeadKVCache protocol. `arrays` are what compiled code works on; `image` has the function that moves rows in them.

    rotations: of texts within the original context, and of longer ones; `choice` says which.
    `lines`: one while all heads keep the same rows, else one per head of every layer.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        regions: Regions,
        rotations: Sequence[Rotation],
        choice: LongRope,
        key: str,
        image: Image,
        observes: bool,
        mirrors: FloatArray,
        pinned: int,
    ) -> None:
        self.shape, self.dtype, self.capacity, self.regions = shape, dtype, regions.capacity, regions
        self._heads = shape.layers * shape.kv_heads
        self._stored = Rows(regions.size, shape.padded_head, dtype, mirrors)
        self.arrays = self._stored.arrays
        self.lengths = aligned_zeros(self._heads, "int32")
        # By row of the arena: positions for sliding windows, attention for policies.
        self.row_positions = with_spare(regions.size if shape.windowed else 0, "int32")
        self.row_attention = with_spare(regions.size if observes else 0, "float32")
        self.nbytes = self._stored.nbytes + self.row_positions.nbytes + self.row_attention.nbytes
        self._lines = Lines(regions.longest)
        self._anchors = Anchors(self._heads, shape.padded_head, pinned)
        self._rotations, self._choice, self._key, self._image = rotations, choice, key, image
        self.closed = False

    @property
    def key(self) -> str:
        return self._key + self._choice.suffix

    @property
    def rotation(self) -> Rotation:
        """What the next keys are turned by."""
        return self._rotations[self._choice.long]

    @property
    def length(self) -> int:
        return int(self.lengths.max())

    @property
    def free(self) -> int:
        return int((self.regions.limits - self.lengths).min())

    @property
    def longest(self) -> int:
        return self.regions.longest

    @property
    def positions(self) -> IntArray:
        """int32 [length]; once heads keep different rows [layers, KV heads, length], -1 behind a head's last."""
        positions: IntArray = self._lines.positions(self.length).astype(np.int32)
        if len(self._lines) > 1:
            return self._by_head(np.where(self._used(), positions, np.int32(-1)))
        only: IntArray = positions[0]
        return only

    @property
    def attention(self) -> FloatArray:
        """What every row got from the observed queries, float32 [layers, KV heads, length]; 0 behind a head's last."""
        if self.row_attention.size == 0:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        used = self._used()
        rows = np.where(used, self.regions.rows(self._lines.slots[:, : self.length]), 0)
        return self._by_head(np.where(used, self.row_attention[rows], np.float32(0)))

    @property
    def head_lengths(self) -> IntArray:
        return np.array(self.lengths).reshape(self.shape.layers, self.shape.kv_heads)

    @property
    def ages(self) -> IntArray:
        shape = (self.shape.layers, self.shape.kv_heads, self.length)
        positions = self.positions
        if positions.ndim == 1:
            positions = np.asarray(np.broadcast_to(positions, shape))
        ages: IntArray = np.where(positions < 0, 0, self.next_position - positions).astype(np.int32)
        return ages

    def keys(self, layer: int) -> FloatArray:
        first = layer * self.shape.kv_heads
        keys = np.zeros((self.shape.kv_heads, self.length, self.shape.padded_head), np.float32)
        for head, length in enumerate(self.lengths[first : first + len(keys)].tolist()):
            line = (first + head) % len(self._lines)
            rows = self.regions.starts[first + head] + self._lines.slots[line, :length]
            keys[head, :length] = self._stored.keys(rows, first + head)
        return keys

    def clear_attention(self) -> None:
        self.row_attention[:] = 0

    def choose_mirrors(self, run: Callable[[IntArray], object], runs: IntArray) -> None:
        """By the keys of these runs of tokens, int32 [runs, n]. Empties the cache."""

        def keys_of(tokens: IntArray) -> FloatArray:
            self.truncate(0)
            run(tokens)
            return self._stored.keys(self.regions.rows(self._lines.slots[0, : tokens.size]))

        self._stored.mirrors[:] = find_normals(map(keys_of, runs), self.rotation)
        self.truncate(0)
        self._key += f":{runs.shape[1]}"  # rows are nothing without their mirrors

    @property
    def next_position(self) -> int:
        """As callers count."""
        return self._lines.next_position

    @property
    def next_turn(self) -> int:
        """What RoPE turns the next key by."""
        return self._lines.next

    def expect(self, count: int) -> None:
        self._check_open()
        if not self._choice.outgrown_by(self.next_position + count):
            return
        self._choice.lengthen(self.length)
        short, long = self._rotations
        between, lines = long.less(short), self._lines
        self._anchors.forget()
        if len(lines) == 1:
            for part in at_once(self.length):
                alike = self.regions.rows(lines.slots[0, : self.length][part])
                self._stored.set_keys(
                    alike, between.turn(self._stored.keys(alike), lines.turned[0, : self.length][part])
                )
            return
        for head, length in enumerate(self.lengths.tolist()):
            slots, turned = lines.slots[head, :length], lines.turned[head, :length]
            for part in at_once(length):
                rows = self.regions.starts[head] + slots[part]
                keys = between.turn_head(head // self.shape.kv_heads, self._stored.keys(rows, head), turned[part])
                self._stored.set_keys(rows, keys, head)

    def announce(self, count: int) -> None:
        """Prepare the slots of `count` rows that are about to be written."""
        if self.row_positions.size == 0 and self.row_attention.size == 0:
            return
        rows = (self.regions.starts + self.lengths)[:, None] + np.arange(count)
        if self.row_positions.size:
            self.row_positions[rows] = self.next_position + np.arange(count)
        if self.row_attention.size:
            self.row_attention[rows] = 0

    def appended(self, count: int) -> None:
        """Book `count` rows that a pass has written behind the last slots."""
        self._lines.book(self.lengths.tolist(), count)
        self.lengths += count

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self._check_open()
        rows = check_rows(rows, int(self.lengths.min()))
        if close_gaps and len(self._lines) > 1:
            raise UnsupportedError("gaps cannot be closed once heads keep different rows")
        self._anchors.forget(rows)
        self._retain([rows] * len(self._lines))
        if close_gaps:
            self._turn(*self._lines.close_gaps(rows.size))
        self._note_positions()

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """Evict, for every head of every layer (layer by layer), all rows but its own, in place.

        Heads may keep different numbers of rows, at most `capacity` on average. Kept rows keep their positions.
        Raises InputError as `keep` does.
        """
        self._check_open()
        if len(rows) != self._heads:
            raise InputError(f"rows for {self._heads} heads are wanted, not for {len(rows)}")
        checked = [check_rows(each, length) for each, length in zip(rows, self.lengths.tolist(), strict=True)]
        self._lines.split(self._heads)
        self._anchors.forget()
        self._retain(checked)
        if self.regions.uneven:
            self._share_out()
        self._note_positions()

    def renumber(self) -> None:
        self._check_open()
        longest, lines = self.length, self._lines
        for head, length in enumerate(self.lengths.tolist()):
            slots, turned = (each[head % len(lines), :length] for each in (lines.slots, lines.turned))
            wanted = np.arange(length) + longest - length  # the newest rows of all heads are level
            rows = self.regions.starts[head] + slots
            if self.row_attention.size:
                younger = (longest - wanted) / (lines.next - turned)
                self.row_attention[rows] *= younger.astype(np.float32)
            moved = np.flatnonzero(wanted != turned)
            if moved.size:
                layer, by = head // self.shape.kv_heads, (wanted - turned)[moved]
                keys = self._stored.keys(rows[moved], head)
                self._stored.set_keys(rows[moved], self.rotation.turn_head(layer, keys, by), head)
        lines.turned[:, :longest] = np.arange(longest) + longest - self.lengths[: len(lines), None]
        lines.base, lines.next = 0, longest
        self._anchors.forget()
        self._note_positions()

    def truncate(self, length: int) -> None:
        self._check_open()
        dropped = self.length - length
        if not 0 <= length <= self.length or (length and dropped > int(self.lengths.min())):
            raise InputError(f"cannot truncate {self.length} rows to {length}")
        if length == 0:
            self._lines.clear()
            self.lengths[:] = 0
            self.regions.make_even()
            self._anchors.forget()
            self._choice.clear()
        elif dropped:
            lengths = self.lengths[: len(self._lines)].tolist()
            self._lines.drop(length, dropped)
            self._anchors.forget(np.arange(length, dtype=np.int32))
            self._retain([np.arange(each - dropped, dtype=np.int32) for each in lengths])
            self._note_positions()

    def shrink(self, capacity: int) -> None:
        self._check_open()
        check_capacity(capacity, self)
        if capacity >= self.capacity:
            return
        self._follow(self.regions.shrink(capacity, self.lengths))
        self.capacity, used = capacity, self.regions.used
        self._stored.release(used)
        self.nbytes = self._stored.nbytes
        for array in (self.row_positions, self.row_attention):
            if array.size:
                release(array[used:])
                self.nbytes += used * array.itemsize
        self._note_positions()

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        self._check_open()
        if len(self._lines) > 1:
            raise UnsupportedError("a cache whose heads keep different rows cannot be saved yet")
        last = check_range(first, last, self.length)
        rows, positions = self.regions.rows(self._lines.slots[0, first:last]), self.positions
        next_position = int(positions[last]) if last < self.length else self.next_position
        parts = [np.int64(self._lines.base).tobytes(), *(self._stored.save(name, rows) for name in self.arrays)]
        return KVState(self.key, positions[first:last].copy(), next_position, b"".join(parts))

    def append(self, state: KVState) -> None:
        self._check_open()
        if not self.length:
            self._choice.adopt(state.key, self._key)
        check_state(state, self, self.next_position)
        first, count = self.length, state.positions.size
        if len(state.data) != _BASE_BYTES + count * row_bytes(self.shape, self.dtype):
            raise InputError("the saved KV rows are damaged")
        base = int(np.frombuffer(state.data, np.int64, 1)[0])
        if len(self._lines) > 1 or (first and base != self._lines.base):
            raise InputError("the saved KV rows do not fit behind rows that were evicted since")
        at, rows = _BASE_BYTES, self.regions.rows(np.arange(first, first + count))
        for name, array in self.arrays.items():
            part = np.frombuffer(state.data, array.dtype, rows.size * self._stored.width(name), at)
            self._stored.restore(name, rows, part)
            at += part.nbytes
        self._lines.book_saved(first, state.positions, base, state.next_position)
        self.lengths[:] = first + count
        self._note_positions()
        if self.row_attention.size:
            self.row_attention[rows] = 0

    # Slots

    def _retain(self, rows: list[IntArray]) -> None:
        """Keep these rows of each line."""
        per_line = self._heads // len(rows)
        starts = self.regions.starts.reshape(len(rows), per_line, 1, 1)
        moves = [(first + pairs).reshape(-1, 2) for first, pairs in zip(starts, self._lines.retain(rows), strict=True)]
        pairs = np.ascontiguousarray(np.concatenate(moves), np.int32)
        if pairs.size:
            arrays = (pointer(array) for array in self.arrays.values())
            Call(self._image, "move", (*arrays, pointer(pairs), len(pairs)))()
            if self.row_attention.size:
                self.row_attention[pairs[:, 1]] = self.row_attention[pairs[:, 0]]
        self.lengths[:] = [kept.size for kept in rows] * per_line

    def _share_out(self) -> None:
        """Give every head a region as long as it needs."""
        self._follow(self.regions.share_out(self.lengths))

    def _follow(self, moves: list[Move]) -> None:
        """Move rows to where regions begin now."""
        for move in moves:
            self._stored.shift(move)
            if self.row_attention.size:
                source, target = (slice(at, at + move.count) for at in (move.source, move.target))
                self.row_attention[target] = self.row_attention[source]

    def _note_positions(self) -> None:
        """Tell sliding windows where rows lie now."""
        if self.row_positions.size:
            for head, length in enumerate(self.lengths.tolist()):
                line = head % len(self._lines)
                rows = self.regions.starts[head] + self._lines.slots[line, :length]
                self.row_positions[rows] = self._lines.positions(length)[line]

    def _used(self) -> AnyArray:
        """Whether a head has so many rows, [heads of all layers, length]."""
        return np.asarray(np.arange(self.length) < self.lengths[:, None])

    def _by_head(self, values: AnyArray) -> AnyArray:
        return values.reshape(self.shape.layers, self.shape.kv_heads, -1)

    def _turn(self, rows: AnyArray, turned: AnyArray, wanted: AnyArray) -> None:
        """Turn the keys of `rows`, which are turned to `turned`, to the positions `wanted`."""
        for part in at_once(rows.size):
            stored = self.regions.rows(self._lines.slots[0, rows[part]])
            keys, by = self._anchors.exact(rows[part], self._stored.keys(stored), turned[part], wanted[part])
            self._stored.set_keys(stored, self.rotation.turn(keys, by))

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")

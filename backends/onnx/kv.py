"""The ONNX engine's KV cache: one NumPy array that ONNX Runtime reads and writes, and evictions in it.

Three numbers are never one. A row's *order* is its place among the rows in use; its *slot* is where it lies in memory,
which attention does not care for: the last rows move into the holes that evicted ones leave. Its *position* is what
RoPE turned its key by. When gaps are closed, the few rows before a gap are turned forward rather than the many behind
it back, so turned positions grow for ever, and `base` is what separates them from the positions that callers see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge.architectures.angles import Angles
from edge.backends.base import KVState, check_range, check_rows, check_state
from edge.backends.onnx.rope import tables, turn
from edge.backends.onnx.rows import NUMPY_TYPE, load_rows, row_values, store_rows
from edge.errors import EngineError, InputError, UnsupportedError
from edge.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

_BASE_BYTES = 8  # a saved state begins with `base`: its keys are turned by position + base
_ANCHORS = 16  # first rows whose exact keys are remembered once they are turned
_NO_ROWS = np.zeros(0, np.int32)


def row_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes that a token adds, in all layers."""
    width = row_values(spec.head_dim, dtype) * np.dtype(NUMPY_TYPE[dtype]).itemsize
    return 2 * spec.layers * spec.kv_heads * width


class OnnxKV:
    """HeadKVCache protocol. All heads keep equally many rows.

    array: keys and values, [2, layers, KV heads, capacity, stored values]. scales: of int8 and int4 rows, float32
    [2, layers, KV heads, 1, head]. `lines` of bookkeeping: one while all heads keep the same rows, else one per head.
    """

    def __init__(self, spec: ModelSpec, dtype: str, capacity: int, angles: Angles, key: str, observes: bool) -> None:
        self.spec, self.dtype, self.capacity = spec, dtype, capacity
        shape = (2, spec.layers, spec.kv_heads, capacity, row_values(spec.head_dim, dtype))
        self.array = np.zeros(shape, NUMPY_TYPE[dtype])
        self.scales = np.ones((2, spec.layers, spec.kv_heads, 1, spec.head_dim), np.float32)
        self.length = 0
        self.slot_attention = np.zeros((spec.layers, spec.kv_heads, capacity if observes else 0), np.float32)
        self.nbytes = self.array.nbytes + self.slot_attention.nbytes
        self._heads = spec.layers * spec.kv_heads
        self._slots = np.zeros((1, capacity), np.int32)  # by order
        self._turned = np.zeros((1, capacity), np.int64)
        self._base = 0
        self._next = 0
        self._anchors = np.zeros((self._heads, 0, spec.head_dim), np.float32)
        self._anchor_turns = np.zeros(0, np.int64)
        self._angles, self.key = replace(angles, magnitude=1.0), key
        self.closed = False

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        """int32 [length]; once heads keep different rows [layers, KV heads, length]."""
        positions = (self._turned[:, : self.length] - self._base).astype(np.int32)
        return positions[0] if len(positions) == 1 else self._by_head(positions)

    @property
    def head_lengths(self) -> IntArray:
        return np.full((self.spec.layers, self.spec.kv_heads), self.length, np.int32)

    @property
    def longest(self) -> int:
        return self.capacity

    @property
    def ages(self) -> IntArray:
        return self._by_head((self._next - self._turned[:, : self.length]).astype(np.int32))

    @property
    def attention(self) -> FloatArray:
        if self.slot_attention.size == 0:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        return np.take_along_axis(self.slot_attention, self._by_head(self._slots[:, : self.length]), axis=2)

    def clear_attention(self) -> None:
        self.slot_attention[:] = 0

    def keys(self, layer: int) -> FloatArray:
        slots = self._by_head(self._slots[:, : self.length])[layer]
        return load_rows(self.array[0, layer][_each(slots), slots], self.scales[0, layer], self.dtype)

    @property
    def next_position(self) -> int:
        """As callers count."""
        return self._next - self._base

    @property
    def next_turn(self) -> int:
        """What RoPE turns the next key by."""
        return self._next

    def appended(self, count: int) -> None:
        """Book `count` rows that a pass has written behind the last slots."""
        new = slice(self.length, self.length + count)
        self._slots[:, new] = np.arange(self.length, self.length + count)
        self._turned[:, new] = np.arange(self._next, self._next + count)
        self.slot_attention[:, :, new] = 0
        self.length += count
        self._next += count

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self._check_open()
        rows = check_rows(rows, self.length)
        if close_gaps and len(self._slots) > 1:
            raise UnsupportedError("gaps cannot be closed once heads keep different rows")
        self._forget_anchors(rows)
        self._retain([rows] * len(self._slots))
        if close_gaps:
            self._close_gaps(rows.size)

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """Evict, for every head of every layer (layer by layer), all rows but its own, in place.

        Kept rows keep their positions. Raises InputError as `keep` does, UnsupportedError if heads are to keep
        different numbers of rows.
        """
        self._check_open()
        if len(rows) != self._heads:
            raise InputError(f"rows for {self._heads} heads are wanted, not for {len(rows)}")
        checked = [check_rows(each, self.length) for each in rows]
        if len({each.size for each in checked}) > 1:
            raise UnsupportedError("the onnx engine keeps equally many rows in all heads")
        if len(self._slots) == 1:
            self._slots = np.repeat(self._slots, self._heads, axis=0)
            self._turned = np.repeat(self._turned, self._heads, axis=0)
        self._forget_anchors(_NO_ROWS)
        self._retain(checked)

    def renumber(self) -> None:
        self._check_open()
        length, lines = self.length, len(self._slots)
        wanted, attention = np.arange(length), self.slot_attention.reshape(self._heads, -1)
        for head in range(self._heads):
            slots, turned = self._slots[head % lines, :length], self._turned[head % lines, :length]
            if attention.size:
                attention[head, slots] *= ((length - wanted) / (self._next - turned)).astype(np.float32)
            moved = np.flatnonzero(wanted != turned)
            if moved.size:
                self._turn_head(head, slots[moved], (wanted - turned)[moved])
        self._turned[:, :length] = wanted
        self._base, self._next = 0, length
        self._forget_anchors(_NO_ROWS)

    def truncate(self, length: int) -> None:
        self._check_open()
        dropped = self.length - length
        if not 0 <= length <= self.length:
            raise InputError(f"cannot truncate {self.length} rows to {length}")
        if length == 0:
            self._slots, self._turned = self._slots[:1], self._turned[:1]
            self.length = self._base = self._next = 0
            self._forget_anchors(_NO_ROWS)
        elif dropped:
            # Where heads differ, the newest rows are what they have in common.
            uniform = len(self._slots) == 1
            self._next = int(self._turned[0, length - 1]) + 1 if uniform else self._next - dropped
            left = np.arange(length, dtype=np.int32)
            self._forget_anchors(left)
            self._retain([left] * len(self._slots))

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        self._check_open()
        if len(self._slots) > 1:
            raise UnsupportedError("a cache whose heads keep different rows cannot be saved yet")
        last, positions = check_range(first, last, self.length), self.positions
        next_position = int(positions[last]) if last < self.length else self.next_position
        data = np.int64(self._base).tobytes() + self.array[:, :, :, self._slots[0, first:last]].tobytes()
        return KVState(self.key, positions[first:last].copy(), next_position, data)

    def append(self, state: KVState) -> None:
        self._check_open()
        check_state(state, self, self.next_position)
        first, count = self.length, state.positions.size
        if len(state.data) != _BASE_BYTES + count * row_bytes(self.spec, self.dtype):
            raise InputError("the saved KV rows are damaged")
        base = int(np.frombuffer(state.data, np.int64, 1)[0])
        if len(self._slots) > 1 or (first and base != self._base):
            raise InputError("the saved KV rows do not fit behind rows that were evicted since")
        new = slice(first, first + count)
        rows = np.frombuffer(state.data, self.array.dtype, offset=_BASE_BYTES)
        self.array[:, :, :, new] = rows.reshape(*self.array.shape[:3], count, self.array.shape[-1])
        self._slots[0, new], self._turned[0, new] = (
            np.arange(first, first + count),
            state.positions.astype(np.int64) + base,
        )
        self.slot_attention[:, :, new] = 0
        self._base, self._next = base, base + state.next_position
        self.length = first + count

    # Slots

    def _by_head(self, lines: AnyArray) -> AnyArray:
        """[lines, …] as [layers, KV heads, …]."""
        shape = (self.spec.layers, self.spec.kv_heads, *lines.shape[1:])
        return np.asarray(np.broadcast_to(lines[0], shape) if len(lines) == 1 else lines.reshape(shape))

    def _retain(self, rows: Sequence[IntArray]) -> None:
        """Keep these rows of each line. Slots stay gapless: rows that lie beyond the new length move into holes."""
        moves = []
        for line, kept in enumerate(rows):
            slots, pairs = _fill_holes(self._slots[line, kept])
            self._slots[line, : kept.size] = slots
            self._turned[line, : kept.size] = self._turned[line, kept]
            moves.append(pairs)
        per_layer = len(rows) // self.spec.layers  # 0: one line for all
        for layer in range(self.spec.layers):
            self._move(layer, moves[layer * per_layer : (layer + 1) * per_layer] or moves)
        self.length = rows[0].size

    def _move(self, layer: int, moves: list[AnyArray]) -> None:
        """Copy rows of a layer from slot to slot: pairs [n, 2] for each head, or the same for all."""
        longest = max(map(len, moves))
        if not longest:
            return
        pairs = np.zeros((len(moves), longest, 2), np.int32)
        for head, each in enumerate(moves):
            if len(each):
                pairs[head] = each[-1]  # what is left over repeats the last move
                pairs[head, : len(each)] = each
        sources, targets = pairs[..., 0], pairs[..., 1]
        for array in (*self.array[:, layer], self.slot_attention[layer]):
            if array.size:
                array[_each(array), targets] = array[_each(array), sources]

    # Positions

    def _close_gaps(self, count: int) -> None:
        """Give the rows positions 0 … count − 1 by turning those whose distance to the last row changes."""
        if not count:
            self._base = self._next = 0
            return
        turned = self._turned[0, :count]
        self._base = int(turned[-1]) - (count - 1)
        wanted = self._base + np.arange(count)
        moved = np.flatnonzero(turned != wanted)
        if moved.size:
            self._turn(moved, wanted[moved])
            self._turned[0, moved] = wanted[moved]
        self._next = self._base + count

    def _turn(self, rows: AnyArray, wanted: AnyArray) -> None:
        """Turn the keys of `rows` to the positions `wanted`.

        The first rows are turned at every eviction for ever, and each time their keys would be rounded: theirs are
        turned from what they were at first.
        """
        slots, scales = self._slots[0, rows], self.scales[0]
        keys = np.array(load_rows(self.array[0][:, :, slots], scales, self.dtype)).reshape(self._heads, rows.size, -1)
        by = wanted - self._turned[0, rows]
        known = min(int(rows.size), _ANCHORS)
        if (rows[:known] == np.arange(known)).all():
            have = min(known, self._anchor_turns.size)
            keys[:, :have] = self._anchors[:, :have]
            by[:have] = wanted[:have] - self._anchor_turns[:have]
            if have < known:
                self._anchors = keys[:, :known].copy()
                self._anchor_turns = (wanted - by)[:known]
        turned = turn(keys, *tables(by, self._angles)).reshape(self.spec.layers, self.spec.kv_heads, rows.size, -1)
        self.array[0][:, :, slots] = store_rows(turned, scales, self.dtype)

    def _turn_head(self, head: int, slots: AnyArray, by: AnyArray) -> None:
        layer, head = divmod(head, self.spec.kv_heads)
        stored, scales = self.array[0, layer, head], self.scales[0, layer, head]
        keys = load_rows(stored[slots], scales, self.dtype)
        stored[slots] = store_rows(turn(keys, *tables(by, self._angles)), scales, self.dtype)

    def _forget_anchors(self, rows: IntArray) -> None:
        """Anchors stay with the first rows only as long as these stay the first."""
        known = min(self._anchor_turns.size, rows.size)
        same = np.flatnonzero(rows[:known] != np.arange(known))
        left = int(same[0]) if same.size else known
        self._anchors, self._anchor_turns = self._anchors[:, :left], self._anchor_turns[:left]

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")


def _each(array: AnyArray) -> IntArray:
    """Numbers of the first axis, to go with indices of the second."""
    return np.arange(len(array), dtype=np.int32)[:, None]


def _fill_holes(slots: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Slots of kept rows, pressed into the first ones: where each row lies then, and the moves, int32 [n, 2]."""
    beyond = slots >= slots.size
    sources = slots[beyond]
    if sources.size == 0:
        return slots, np.zeros((0, 2), np.int32)
    occupied = np.zeros(slots.size, bool)
    occupied[slots[~beyond]] = True
    targets = np.flatnonzero(~occupied).astype(np.int32)
    filled = slots.copy()
    filled[beyond] = targets
    return filled, np.stack([sources, targets], axis=1)

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
from edge.backends.base import KVState, check_rows
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
    """HeadKVCache protocol. All heads of a layer keep equally many rows; layers may differ.

    array: keys and values, [2, layers, KV heads, capacity, stored values]. scales: of int8 and int4 rows, float32
    [2, layers, KV heads, 1, head]. `lines` of bookkeeping: one while all heads keep the same rows, else one per head.
    """

    def __init__(
        self, spec: ModelSpec, dtype: str, capacity: int, angles: Angles, key: str, observes: bool
    ) -> None:
        self.spec, self.dtype, self.capacity = spec, dtype, capacity
        shape = (2, spec.layers, spec.kv_heads, capacity, row_values(spec.head_dim, dtype))
        self.array = np.zeros(shape, NUMPY_TYPE[dtype])
        self.scales = np.ones((2, spec.layers, spec.kv_heads, 1, spec.head_dim), np.float32)
        self.lengths = np.zeros(spec.layers, np.int32)
        self.slot_attention = np.zeros((spec.layers, spec.kv_heads, capacity if observes else 0), np.float32)
        self.nbytes = self.array.nbytes + self.slot_attention.nbytes
        self._heads = spec.layers * spec.kv_heads
        self._slots = np.zeros((1, capacity), np.int32)  # by order
        self._turned = np.zeros((1, capacity), np.int64)
        self._base = 0
        self._next = 0
        self._anchors = np.zeros((self._heads, 0, spec.head_dim), np.float32)
        self._anchor_turns = np.zeros(0, np.int64)
        self._angles, self._key = replace(angles, magnitude=1.0), key
        self.closed = False

    @property
    def length(self) -> int:
        """Rows in use; of the layer that keeps most, where they differ."""
        return int(self.lengths.max())

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        """int32 [length]; once heads keep different rows [layers, KV heads, length], -1 behind a head's last."""
        positions = (self._turned[:, : self.length] - self._base).astype(np.int32)
        if len(self._slots) == 1:
            return np.asarray(positions[0])
        return np.where(self._used(), positions.reshape(self.spec.layers, self.spec.kv_heads, -1), -1)

    @property
    def head_lengths(self) -> IntArray:
        return np.repeat(self.lengths[:, None], self.spec.kv_heads, axis=1)

    @property
    def ages(self) -> IntArray:
        positions = np.broadcast_to(self.positions, (self.spec.layers, self.spec.kv_heads, self.length))
        ages: IntArray = np.where(positions < 0, 0, self.next_position - positions).astype(np.int32)
        return ages

    @property
    def attention(self) -> FloatArray:
        if self.slot_attention.size == 0:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        gathered = np.take_along_axis(self.slot_attention, self._slots_by_head(), axis=2)
        return np.where(self._used(), gathered, np.float32(0))

    def clear_attention(self) -> None:
        self.slot_attention[:] = 0

    def keys(self, layer: int) -> FloatArray:
        slots = self._slots_by_head()[layer]
        keys = load_rows(self.array[0, layer][_each(slots), slots], self.scales[0, layer], self.dtype)
        return np.where(self._used()[layer, :, :, None], keys, np.float32(0))

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
        turned = np.arange(self._next, self._next + count)
        lines = len(self._slots)
        for line, length in enumerate(self._line_lengths().tolist()):
            self._slots[line, length : length + count] = np.arange(length, length + count)
            self._turned[line, length : length + count] = turned
        if self.slot_attention.size:
            for layer, length in enumerate(self.lengths.tolist()):
                self.slot_attention[layer, :, length : length + count] = 0
        assert lines in (1, self._heads)
        self.lengths += count
        self._next += count

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self._check_open()
        rows = check_rows(rows, int(self.lengths.min()))
        if close_gaps and len(self._slots) > 1:
            raise UnsupportedError("gaps cannot be closed once heads keep different rows")
        self._forget_anchors(rows)
        self._retain([rows] * len(self._slots))
        if close_gaps:
            self._close_gaps(rows.size)

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """Evict, for every head of every layer (layer by layer), all rows but its own, in place.

        Kept rows keep their positions. Raises InputError as `keep` does, UnsupportedError if the heads of a layer are
        to keep different numbers of rows.
        """
        self._check_open()
        if len(rows) != self._heads:
            raise InputError(f"rows for {self._heads} heads are wanted, not for {len(rows)}")
        lengths = np.repeat(self.lengths, self.spec.kv_heads).tolist()
        checked = [check_rows(each, length) for each, length in zip(rows, lengths, strict=True)]
        counts = np.array([each.size for each in checked]).reshape(self.spec.layers, -1)
        if (counts != counts[:, :1]).any():
            raise UnsupportedError("the onnx engine keeps equally many rows in all heads of a layer")
        if len(self._slots) == 1:
            self._slots = np.repeat(self._slots, self._heads, axis=0)
            self._turned = np.repeat(self._turned, self._heads, axis=0)
        self._forget_anchors(_NO_ROWS)
        self._retain(checked)

    def renumber(self) -> None:
        self._check_open()
        longest, lines = self.length, len(self._slots)
        attention = self.slot_attention.reshape(self._heads, -1)
        for head, length in enumerate(np.repeat(self.lengths, self.spec.kv_heads).tolist()):
            slots, turned = self._slots[head % lines, :length], self._turned[head % lines, :length]
            wanted = np.arange(length) + longest - length  # the newest rows of all heads are level
            if attention.size:
                younger = (longest - wanted) / (self._next - turned)
                attention[head, slots] *= younger.astype(np.float32)
            moved = np.flatnonzero(wanted != turned)
            if moved.size:
                self._turn_head(head, slots[moved], (wanted - turned)[moved])
        self._turned[:, :longest] = np.arange(longest) + longest - self._line_lengths()[:, None]
        self._base, self._next = 0, longest
        self._forget_anchors(_NO_ROWS)

    def truncate(self, length: int) -> None:
        self._check_open()
        dropped = self.length - length
        if not 0 <= length <= self.length or (length and dropped > int(self.lengths.min())):
            raise InputError(f"cannot truncate {self.length} rows to {length}")
        if length == 0:
            self._slots, self._turned = self._slots[:1], self._turned[:1]
            self.lengths[:] = 0
            self._base = self._next = 0
            self._forget_anchors(_NO_ROWS)
        elif dropped:
            # Where heads differ, the newest rows are what they have in common.
            uniform = len(self._slots) == 1
            self._next = int(self._turned[0, length - 1]) + 1 if uniform else self._next - dropped
            self._forget_anchors(np.arange(length, dtype=np.int32))
            left = self._line_lengths() - dropped
            self._retain([np.arange(each, dtype=np.int32) for each in left.tolist()])

    def save(self) -> KVState:
        self._check_open()
        if len(self._slots) > 1:
            raise UnsupportedError("a cache whose heads keep different rows cannot be saved yet")
        rows = self.array[:, :, :, self._slots[0, : self.length]]
        data = np.int64(self._base).tobytes() + rows.tobytes()
        return KVState(self._key, self.positions.copy(), self.next_position, data)

    def restore(self, state: KVState) -> None:
        self._check_open()
        count = state.positions.size
        size = _BASE_BYTES + count * row_bytes(self.spec, self.dtype)
        if state.key != self._key or count > self.capacity or len(state.data) != size:
            raise InputError("the saved KV state belongs to another model, engine, KV dtype or capacity")
        self.truncate(0)
        rows = np.frombuffer(state.data, self.array.dtype, offset=_BASE_BYTES)
        self.array[:, :, :, :count] = rows.reshape(*self.array.shape[:3], count, self.array.shape[-1])
        self._base = int(np.frombuffer(state.data, np.int64, 1)[0])
        self._slots[0, :count], self._turned[0, :count] = np.arange(count), state.positions.astype(np.int64) + self._base
        self.lengths[:] = count
        self._next = self._base + state.next_position
        self.clear_attention()

    # Slots

    def _line_lengths(self) -> IntArray:
        return self.lengths[:1] if len(self._slots) == 1 else np.repeat(self.lengths, self.spec.kv_heads)

    def _slots_by_head(self) -> IntArray:
        """[layers, KV heads, length]."""
        shape = (self.spec.layers, self.spec.kv_heads, self.length)
        slots = self._slots[:, : self.length]
        return np.asarray(np.broadcast_to(slots, shape) if len(slots) == 1 else slots.reshape(shape))

    def _used(self) -> AnyArray:
        """Whether a head has so many rows, bool [layers, KV heads, length]."""
        used = np.arange(self.length) < self.lengths[:, None, None]
        return np.broadcast_to(used, (self.spec.layers, self.spec.kv_heads, self.length))

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
        counts = [kept.size for kept in rows]
        self.lengths[:] = counts[:: self.spec.kv_heads] if per_layer else counts[0]

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
    return np.arange(len(array))[:, None]


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

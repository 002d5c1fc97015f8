"""The native engine's KV cache: every head keeps its own rows, in place.

Three numbers are never one. A row's *order* is its place among the rows in use; its *slot* is where it lies in
memory: evicted rows are overwritten by the last ones, so that most rows never move; its *position* is what RoPE turned
its key by. When gaps are closed, the few rows before a gap are turned forward rather than the many behind it back, so
turned positions grow for ever, and `base` is what separates them from the positions that callers see.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.backends.base import KVState, check_rows
from edge.backends.tvm.layout import Shape, round_up
from edge.backends.tvm.loading import Call, Image
from edge.backends.tvm.memory import aligned_zeros, pointer
from edge.backends.tvm.rope import Rotation
from edge.errors import EngineError, InputError, UnsupportedError
from edge.types import AnyArray, FloatArray, IntArray

NUMPY_TYPE = {"f32": "float32", "f16": "float16", "int8": "int8"}
_SPARE_ROWS = 64  # behind the last head: scores are computed for up to 4 tiles of 16 rows at once
_BASE_BYTES = 8  # a saved state begins with `base`: its keys are turned by position + base
_ANCHORS = 16  # first rows whose exact keys are remembered once they are turned


def allocated_rows(capacity: int) -> int:
    """Whole tiles."""
    return round_up(capacity, 16)


def row_bytes(shape: Shape, dtype: str) -> int:
    """Bytes that a token adds, in all layers."""
    heads = shape.layers * shape.kv_heads
    scales = 8 if dtype == "int8" else 0
    return heads * (2 * shape.padded_head * np.dtype(NUMPY_TYPE[dtype]).itemsize + scales)


class NativeKV:
    """KVCache protocol, and `keep_heads`. `arrays` are what compiled code works on; `image` has the function that
    moves rows in them.

    `lines` of bookkeeping: one while all heads keep the same rows, else one per head of every layer.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: str,
        capacity: int,
        rotation: Rotation,
        key: str,
        image: Image,
        observes: bool,
    ) -> None:
        self.shape, self.dtype, self.capacity = shape, dtype, capacity
        self._heads = shape.layers * shape.kv_heads
        self._rows = allocated_rows(capacity)
        count, memory = self._heads * self._rows, NUMPY_TYPE[dtype]
        scales = count if dtype == "int8" else 0
        self.arrays = {
            "keys": _with_spare(count, shape.padded_head, memory),
            "values": _with_spare(count, shape.padded_head, memory),
            "key_scales": _with_spare(scales, 1, "float32"),
            "value_scales": _with_spare(scales, 1, "float32"),
        }
        self.lengths = aligned_zeros(self._heads, "int32")
        self.slot_positions = _with_spare(count if shape.windowed else 0, 1, "int32")  # by slot, for sliding windows
        self.slot_attention = _with_spare(count if observes else 0, 1, "float32")
        self.nbytes = sum(array.nbytes for array in (*self.arrays.values(), self.slot_positions, self.slot_attention))
        self._slots = np.zeros((1, capacity), np.int32)  # by order
        self._turned = np.zeros((1, capacity), np.int64)
        self._base = 0
        self._next = 0
        self._anchors = np.zeros((self._heads, 0, shape.padded_head), np.float32)
        self._anchor_turns = np.zeros(0, np.int64)
        self._rotation, self._key, self._image = rotation, key, image
        self.closed = False

    @property
    def length(self) -> int:
        """Rows in use; of the head that keeps most, where they differ."""
        return int(self.lengths.max())

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        """int32 [length]; once heads keep different rows [layers, KV heads, length], -1 behind a head's last."""
        if len(self._slots) == 1:
            return (self._turned[0, : self.length] - self._base).astype(np.int32)
        used = np.arange(self.length) < self.lengths[:, None]
        positions = np.where(used, self._turned[:, : self.length] - self._base, -1)
        return positions.astype(np.int32).reshape(self.shape.layers, self.shape.kv_heads, -1)

    @property
    def attention(self) -> FloatArray:
        """What every row got from the observed queries, float32 [layers, KV heads, length]; 0 behind a head's last."""
        if self.slot_attention.size == 0:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        by_slot, slots = self.slot_attention.reshape(self._heads, -1), self._slots[:, : self.length]
        used = np.arange(self.length) < self.lengths[:, None]
        gathered = np.take_along_axis(by_slot, np.broadcast_to(slots, used.shape), axis=1)
        return np.where(used, gathered, np.float32(0)).reshape(self.shape.layers, self.shape.kv_heads, -1)

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
            line = (first + head) % len(self._slots)
            keys[head, :length] = self._head_keys(first + head, self._slots[line, :length])
        return keys

    def clear_attention(self) -> None:
        self.slot_attention[:] = 0

    @property
    def next_position(self) -> int:
        """As callers count."""
        return self._next - self._base

    @property
    def next_turn(self) -> int:
        """What RoPE turns the next key by."""
        return self._next

    def announce(self, count: int) -> None:
        """Prepare the slots of `count` rows that are about to be written."""
        if self.slot_positions.size == 0 and self.slot_attention.size == 0:
            return
        slots = self.lengths[:, None] + np.arange(count)
        if self.slot_positions.size:
            np.put_along_axis(
                self.slot_positions.reshape(self._heads, -1), slots, self.next_position + np.arange(count), axis=1
            )
        if self.slot_attention.size:
            np.put_along_axis(self.slot_attention.reshape(self._heads, -1), slots, 0, axis=1)

    def appended(self, count: int) -> None:
        """Book `count` rows that a pass has written behind the last slots."""
        turned = np.arange(self._next, self._next + count)
        for line, length in enumerate(self.lengths[: len(self._slots)].tolist()):
            self._slots[line, length : length + count] = np.arange(length, length + count)
            self._turned[line, length : length + count] = turned
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
        self._note_positions()

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """Evict, for every head of every layer (layer by layer), all rows but its own, in place.

        Heads may keep different numbers of rows. Kept rows keep their positions. Raises InputError as `keep` does.
        """
        self._check_open()
        if len(rows) != self._heads:
            raise InputError(f"rows for {self._heads} heads are wanted, not for {len(rows)}")
        checked = [check_rows(each, length) for each, length in zip(rows, self.lengths.tolist(), strict=True)]
        if len(self._slots) == 1:
            self._slots = np.repeat(self._slots, self._heads, axis=0)
            self._turned = np.repeat(self._turned, self._heads, axis=0)
        self._forget_anchors(np.zeros(0, np.int32))
        self._retain(checked)
        self._note_positions()

    def renumber(self) -> None:
        self._check_open()
        longest, lines = self.length, len(self._slots)
        for head, length in enumerate(self.lengths.tolist()):
            slots, turned = self._slots[head % lines, :length], self._turned[head % lines, :length]
            wanted = np.arange(length) + longest - length  # the newest rows of all heads are level
            if self.slot_attention.size:
                younger = (longest - wanted) / (self._next - turned)
                self.slot_attention.reshape(self._heads, -1)[head, slots] *= younger.astype(np.float32)
            moved = np.flatnonzero(wanted != turned)
            if moved.size:
                self._turn_head(head, slots[moved], (wanted - turned)[moved])
        self._turned[:, :longest] = np.arange(longest) + longest - self.lengths[:lines, None]
        self._base, self._next = 0, longest
        self._forget_anchors(np.zeros(0, np.int32))
        self._note_positions()

    def truncate(self, length: int) -> None:
        self._check_open()
        dropped = self.length - length
        if not 0 <= length <= self.length or (length and dropped > int(self.lengths.min())):
            raise InputError(f"cannot truncate {self.length} rows to {length}")
        if length == 0:
            self._slots, self._turned = self._slots[:1], self._turned[:1]
            self.lengths[:] = 0
            self._base = self._next = 0
            self._forget_anchors(np.zeros(0, np.int32))
        elif dropped:
            lengths = self.lengths[: len(self._slots)].tolist()
            # Where heads differ, the newest rows are what they have in common.
            self._next = int(self._turned[0, length - 1]) + 1 if len(lengths) == 1 else self._next - dropped
            self._forget_anchors(np.arange(length, dtype=np.int32))
            self._retain([np.arange(each - dropped, dtype=np.int32) for each in lengths])
            self._note_positions()

    def save(self) -> KVState:
        self._check_open()
        if len(self._slots) > 1:
            raise UnsupportedError("a cache whose heads keep different rows cannot be saved yet")
        slots = self._slots[0, : self.length]
        parts = [np.int64(self._base).tobytes(), *(self._gather(name, slots).tobytes() for name in self.arrays)]
        return KVState(self._key, self.positions.copy(), self.next_position, b"".join(parts))

    def restore(self, state: KVState) -> None:
        self._check_open()
        count = state.positions.size
        size = _BASE_BYTES + count * row_bytes(self.shape, self.dtype)
        if state.key != self._key or count > self.capacity or len(state.data) != size:
            raise InputError("the saved KV state belongs to another model, engine, KV dtype or capacity")
        self.truncate(0)
        at, slots = _BASE_BYTES, np.arange(count)
        for name, array in self.arrays.items():
            part = np.frombuffer(state.data, array.dtype, self._heads * count * self._width(name), at)
            self._scatter(name, slots, part.reshape(self._heads, count, self._width(name)))
            at += part.nbytes
        self._base = int(np.frombuffer(state.data, np.int64, 1)[0])
        self._slots[0, :count], self._turned[0, :count] = slots, state.positions.astype(np.int64) + self._base
        self.lengths[:] = count
        self._next = self._base + state.next_position
        self._note_positions()
        self.clear_attention()

    # Slots

    def _retain(self, rows: list[IntArray]) -> None:
        """Keep these rows of each line. Slots stay gapless: rows that lie beyond the new length move into holes."""
        moves = []
        for line, kept in enumerate(rows):
            slots, pairs = _fill_holes(self._slots[line, kept])
            self._slots[line, : kept.size] = slots
            self._turned[line, : kept.size] = self._turned[line, kept]
            moves.append(pairs)
        longest = max(map(len, moves))
        if longest:
            pairs = np.zeros((len(moves), longest, 2), np.int32)
            for line, each in enumerate(moves):
                if len(each):
                    pairs[line] = each[-1]  # what is left over repeats the last move
                pairs[line, : len(each)] = each
            stride = 0 if len(moves) == 1 else longest
            arrays = (pointer(array) for array in self.arrays.values())
            Call(self._image, "move", (*arrays, pointer(pairs), longest, stride, self._rows))()
            if self.slot_attention.size:
                attention = self.slot_attention.reshape(self._heads, -1)
                sources, targets = (np.broadcast_to(pairs[:, :, end], (self._heads, longest)) for end in (0, 1))
                moved = np.take_along_axis(attention, sources, axis=1)
                np.put_along_axis(attention, targets, moved, axis=1)
        self.lengths[:] = [kept.size for kept in rows] * (self._heads // len(rows))

    def _note_positions(self) -> None:
        """Tell sliding windows where rows lie now."""
        if self.slot_positions.size:
            by_slot = self.slot_positions.reshape(self._heads, -1)
            for head, length in enumerate(self.lengths.tolist()):
                line = head % len(self._slots)
                by_slot[head, self._slots[line, :length]] = self._turned[line, :length] - self._base

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
        keys = self._keys(self._slots[0, rows])
        by = wanted - self._turned[0, rows]
        known = min(int(rows.size), _ANCHORS)
        if (rows[:known] == np.arange(known)).all():
            have = min(known, self._anchor_turns.size)
            keys[:, :have] = self._anchors[:, :have]
            by[:have] = wanted[:have] - self._anchor_turns[:have]
            if have < known:
                self._anchors = keys[:, :known].copy()
                self._anchor_turns = (wanted - by)[:known]
        self._set_keys(self._slots[0, rows], self._rotation.turn(keys, by))

    def _turn_head(self, head: int, slots: AnyArray, by: AnyArray) -> None:
        tiles, scales = self._view("keys")[head], self._view("key_scales")[head]
        keys = self._rotation.turn_head(head // self.shape.kv_heads, self._head_keys(head, slots), by)
        if self.dtype == "int8":
            scales[slots] = np.abs(keys).max(axis=-1, keepdims=True) / np.float32(127)
            keys = np.rint(keys / np.where(scales[slots] > 0, scales[slots], 1))
        tiles[slots // 16, :, slots % 16] = keys

    def _head_keys(self, head: int, slots: AnyArray) -> FloatArray:
        """float32 [n, head]."""
        keys: FloatArray = self._view("keys")[head, slots // 16, :, slots % 16].astype(np.float32)
        return keys * self._view("key_scales")[head, slots] if self.dtype == "int8" else keys

    def _forget_anchors(self, rows: IntArray) -> None:
        """Anchors stay with the first rows only as long as these stay the first."""
        known = min(self._anchor_turns.size, rows.size)
        same = np.flatnonzero(rows[:known] != np.arange(known))
        left = int(same[0]) if same.size else known
        self._anchors, self._anchor_turns = self._anchors[:, :left], self._anchor_turns[:left]

    def _keys(self, slots: AnyArray) -> FloatArray:
        """float32 [heads of all layers, n, head]."""
        keys = self._gather("keys", slots).astype(np.float32)
        return keys * self._gather("key_scales", slots) if self.dtype == "int8" else keys

    def _set_keys(self, slots: AnyArray, keys: FloatArray) -> None:
        if self.dtype == "int8":
            scales = np.abs(keys).max(axis=-1, keepdims=True) / np.float32(127)
            self._scatter("key_scales", slots, scales)
            keys = np.rint(keys / np.where(scales > 0, scales, 1))
        self._scatter("keys", slots, keys.astype(NUMPY_TYPE[self.dtype]))

    # Arrays, as [heads of all layers, rows, width]

    def _width(self, name: str) -> int:
        return self.shape.padded_head if name in ("keys", "values") else int(self.dtype == "int8")

    def _gather(self, name: str, slots: AnyArray) -> AnyArray:
        if self._width(name) == 0:
            return np.zeros((self._heads, slots.size, 0), np.float32)
        if name != "keys":
            return np.asarray(self._view(name)[:, slots])
        return np.ascontiguousarray(self._view(name)[:, slots // 16, :, slots % 16].swapaxes(0, 1))

    def _scatter(self, name: str, slots: AnyArray, rows: AnyArray) -> None:
        if self._width(name) == 0:
            return
        if name != "keys":
            self._view(name)[:, slots] = rows
        else:
            self._view(name)[:, slots // 16, :, slots % 16] = rows.swapaxes(0, 1)

    def _view(self, name: str) -> AnyArray:
        array = self.arrays[name]
        if name == "keys":
            return array.reshape(self._heads, self._rows // 16, self.shape.padded_head, 16)
        return array.reshape(self._heads, self._rows, self._width(name))

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")


def _with_spare(rows: int, width: int, dtype: str) -> AnyArray:
    return aligned_zeros((rows + _SPARE_ROWS) * width, dtype)[: rows * width]


def _fill_holes(slots: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Slots of kept rows, pressed into the first ones: where each row lies then, and the moves, int32 [n, 2]."""
    count = slots.size
    beyond = slots >= count
    sources = slots[beyond]
    if sources.size == 0:
        return slots, np.zeros((0, 2), np.int32)
    occupied = np.zeros(count, bool)
    occupied[slots[~beyond]] = True
    targets = np.flatnonzero(~occupied).astype(np.int32)
    filled = slots.copy()
    filled[beyond] = targets
    return filled, np.stack([sources, targets], axis=1)

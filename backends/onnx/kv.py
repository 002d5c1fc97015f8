"""The ONNX engine's KV cache: one NumPy array that ONNX Runtime reads and writes, and evictions in it.

Attention does not care for the order in which rows lie. What rows are where, and at which positions, is booked by
backends/slots.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from edge.backends.base import KVState, check_capacity, check_range, check_rows, check_state
from edge.backends.longrope import LongRope
from edge.backends.onnx.rope import Ropes
from edge.backends.onnx.rows import NUMPY_TYPE, load_rows, row_values, store_rows
from edge.backends.slots import Anchors, Lines, at_once
from edge.devices.memory import release_pages
from edge.errors import EngineError, InputError, UnsupportedError
from edge.model.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

_BASE_BYTES = 8  # a saved state begins with `base`: its keys are turned by position + base


def row_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes that a token adds, in all layers."""
    width = row_values(spec.head_dim, dtype) * np.dtype(NUMPY_TYPE[dtype]).itemsize
    return 2 * spec.layers * spec.kv_heads * width


class OnnxKV:
    """HeadKVCache protocol. All heads keep equally many rows.

    array: keys and values, [2, layers, KV heads, capacity, stored values]. scales: of int8 and int4 rows, float32
    [2, layers, KV heads, 1, head]. ropes: of texts within the original context, and of longer ones; `choice` says
    which. `lines`: one while all heads keep the same rows, else one per head.
    """

    def __init__(
        self, spec: ModelSpec, dtype: str, capacity: int, ropes: Sequence[Ropes], choice: LongRope, key: str,
        observes: bool, pinned: int,
    ) -> None:  # fmt: skip
        self.spec, self.dtype, self.capacity = spec, dtype, capacity
        shape = (2, spec.layers, spec.kv_heads, capacity, row_values(spec.head_dim, dtype))
        self.array = np.zeros(shape, NUMPY_TYPE[dtype])
        self.scales = np.ones((2, spec.layers, spec.kv_heads, 1, spec.head_dim), np.float32)
        self.length = 0
        self.slot_attention = np.zeros((spec.layers, spec.kv_heads, capacity if observes else 0), np.float32)
        self.nbytes = self.array.nbytes + self.slot_attention.nbytes
        self._heads = spec.layers * spec.kv_heads
        self._lines = Lines(capacity)
        self._anchors = Anchors(self._heads, spec.head_dim, pinned)
        self._ropes, self._choice = ropes, choice
        self.settings = key  # without what `choice` adds
        self.closed = False
        self.settle: Callable[[], None] = lambda: None  # add up attention that waits: before it is read, or rows move

    @property
    def key(self) -> str:
        return self.settings + self._choice.suffix

    @property
    def ropes(self) -> Ropes:
        """What the next keys are turned by."""
        return self._ropes[self._choice.long]

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        """int32 [length]; once heads keep different rows [layers, KV heads, length]."""
        positions = self._lines.positions(self.length).astype(np.int32)
        return positions[0] if len(positions) == 1 else self._by_head(positions)

    @property
    def head_lengths(self) -> IntArray:
        return np.full((self.spec.layers, self.spec.kv_heads), self.length, np.int32)

    @property
    def longest(self) -> int:
        return self.capacity

    @property
    def ages(self) -> IntArray:
        return self._by_head((self._lines.next - self._lines.turned[:, : self.length]).astype(np.int32))

    @property
    def attention(self) -> FloatArray:
        if self.slot_attention.size == 0:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self.settle()
        return np.take_along_axis(self.slot_attention, self._by_head(self._lines.slots[:, : self.length]), axis=2)

    def clear_attention(self) -> None:
        self.settle()
        self.slot_attention[:] = 0

    def keys(self, layer: int) -> FloatArray:
        slots = self._by_head(self._lines.slots[:, : self.length])[layer]
        return load_rows(self.array[0, layer][_each(slots), slots], self.scales[0, layer], self.dtype)

    @property
    def next_position(self) -> int:
        """As callers count."""
        return self._lines.next_position

    @property
    def next_turn(self) -> int:
        """What RoPE turns the next key by."""
        return self._lines.next

    @property
    def alike(self) -> bool:
        """Whether all heads keep the same rows."""
        return len(self._lines) == 1

    def turned_by_slot(self, count: int) -> AnyArray:
        """What the keys in each slot are turned by, those of the next `count` rows too: int64 [1, rows], or once heads
        keep different rows [heads of all layers, rows]."""
        lines, length = self._lines, self.length
        turned = np.empty((len(lines), length + count), np.int64)
        np.put_along_axis(turned, lines.slots[:, :length].astype(np.int64), lines.turned[:, :length], axis=1)
        turned[:, length:] = lines.next + np.arange(count)
        return turned

    def expect(self, count: int) -> None:
        self._check_open()
        if not self._choice.outgrown_by(self.next_position + count):
            return
        self.settle()
        self._choice.lengthen(self.length)
        short, long = self._ropes
        between, scales = long.less(short), self.scales[0]
        slots, turned = self._lines.slots[:, : self.length], self._lines.turned[:, : self.length]
        self._anchors.forget()
        for part in at_once(self.length):
            if self.alike:
                keys = load_rows(self.array[0][:, :, slots[0, part]], scales, self.dtype)
                self.array[0][:, :, slots[0, part]] = store_rows(
                    between.turn(keys, turned[0, part]), scales, self.dtype
                )
            else:
                for head in range(self._heads):
                    self._turn_head(head, slots[head, part], turned[head, part], between)

    def appended(self, count: int) -> None:
        """Book `count` rows that a pass has written behind the last slots."""
        self._lines.book_level(self.length, count)
        self.slot_attention[:, :, self.length : self.length + count] = 0
        self.length += count

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self._check_open()
        self.settle()
        rows = check_rows(rows, self.length)
        if close_gaps and len(self._lines) > 1:
            raise UnsupportedError("gaps cannot be closed once heads keep different rows")
        self._anchors.forget(rows)
        self._retain([rows] * len(self._lines))
        if close_gaps:
            self._turn(*self._lines.close_gaps(rows.size))

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """Evict, for every head of every layer (layer by layer), all rows but its own, in place.

        Kept rows keep their positions. Raises InputError as `keep` does, UnsupportedError if heads are to keep
        different numbers of rows.
        """
        self._check_open()
        self.settle()
        if len(rows) != self._heads:
            raise InputError(f"rows for {self._heads} heads are wanted, not for {len(rows)}")
        checked = [check_rows(each, self.length) for each in rows]
        if len({each.size for each in checked}) > 1:
            raise UnsupportedError("the onnx engine keeps equally many rows in all heads")
        self._lines.split(self._heads)
        self._anchors.forget()
        self._retain(checked)

    def renumber(self) -> None:
        self._check_open()
        self.settle()
        length, lines = self.length, self._lines
        wanted, attention = np.arange(length), self.slot_attention.reshape(self._heads, -1)
        for head in range(self._heads):
            slots, turned = (each[head % len(lines), :length] for each in (lines.slots, lines.turned))
            if attention.size:
                attention[head, slots] *= ((length - wanted) / (lines.next - turned)).astype(np.float32)
            moved = np.flatnonzero(wanted != turned)
            if moved.size:
                self._turn_head(head, slots[moved], (wanted - turned)[moved], self.ropes)
        lines.turned[:, :length] = wanted
        lines.base, lines.next = 0, length
        self._anchors.forget()

    def truncate(self, length: int) -> None:
        self._check_open()
        self.settle()
        dropped = self.length - length
        if not 0 <= length <= self.length:
            raise InputError(f"cannot truncate {self.length} rows to {length}")
        if length == 0:
            self._lines.clear()
            self.length = 0
            self._anchors.forget()
            self._choice.clear()
        elif dropped:
            self._lines.drop(length, dropped)
            left = np.arange(length, dtype=np.int32)
            self._anchors.forget(left)
            self._retain([left] * len(self._lines))

    def shrink(self, capacity: int) -> None:
        self._check_open()
        check_capacity(capacity, self)
        if capacity >= self.capacity:
            return
        self.settle()
        self.array = self._packed(self.array, capacity)
        self.slot_attention = self.slot_attention[:, :, :capacity].copy()
        self.capacity, self.nbytes = capacity, self.array.nbytes + self.slot_attention.nbytes

    def _packed(self, array: AnyArray, capacity: int) -> AnyArray:
        """The same memory with fewer rows per head: what is behind them is given back."""
        shape, flat = (*array.shape[:3], capacity, array.shape[4]), array.reshape(-1)
        packed = flat[: math.prod(shape)].reshape(shape)
        for before in np.ndindex(shape[:3]):  # the first first: none lies where an earlier one goes
            packed[before][: self.length] = array[before][: self.length]
        rest = flat[packed.size :]
        release_pages(rest.ctypes.data, rest.nbytes)
        return packed

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        self._check_open()
        if len(self._lines) > 1:
            raise UnsupportedError("a cache whose heads keep different rows cannot be saved yet")
        last, positions = check_range(first, last, self.length), self.positions
        next_position = int(positions[last]) if last < self.length else self.next_position
        data = np.int64(self._lines.base).tobytes() + self.array[:, :, :, self._lines.slots[0, first:last]].tobytes()
        return KVState(self.key, positions[first:last].copy(), next_position, data)

    def append(self, state: KVState) -> None:
        self._check_open()
        if not self.length:
            self._choice.adopt(state.key, self.settings)
        check_state(state, self, self.next_position)
        first, count = self.length, state.positions.size
        if len(state.data) != _BASE_BYTES + count * row_bytes(self.spec, self.dtype):
            raise InputError("the saved KV rows are damaged")
        base = int(np.frombuffer(state.data, np.int64, 1)[0])
        if len(self._lines) > 1 or (first and base != self._lines.base):
            raise InputError("the saved KV rows do not fit behind rows that were evicted since")
        new = slice(first, first + count)
        rows = np.frombuffer(state.data, self.array.dtype, offset=_BASE_BYTES)
        self.array[:, :, :, new] = rows.reshape(*self.array.shape[:3], count, self.array.shape[-1])
        self._lines.book_saved(first, state.positions, base, state.next_position)
        self.slot_attention[:, :, new] = 0
        self.length = first + count

    # Slots

    def _by_head(self, lines: AnyArray) -> AnyArray:
        """[lines, …] as [layers, KV heads, …]."""
        shape = (self.spec.layers, self.spec.kv_heads, *lines.shape[1:])
        return np.asarray(np.broadcast_to(lines[0], shape) if len(lines) == 1 else lines.reshape(shape))

    def _retain(self, rows: Sequence[IntArray]) -> None:
        """Keep these rows of each line."""
        moves = self._lines.retain(rows)
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

    def _turn(self, rows: AnyArray, turned: AnyArray, wanted: AnyArray) -> None:
        """Turn the keys of `rows`, which are turned to `turned`, to the positions `wanted`."""
        for part in at_once(rows.size):
            slots, scales = self._lines.slots[0, rows[part]], self.scales[0]
            keys = np.array(load_rows(self.array[0][:, :, slots], scales, self.dtype))
            shape = keys.shape  # [layers, KV heads, n, head]
            keys = keys.reshape(self._heads, *shape[2:])
            keys, by = self._anchors.exact(rows[part], keys, turned[part], wanted[part])
            self.array[0][:, :, slots] = store_rows(self.ropes.turn(keys.reshape(shape), by), scales, self.dtype)

    def _turn_head(self, head: int, slots: AnyArray, by: AnyArray, ropes: Ropes) -> None:
        layer, head = divmod(head, self.spec.kv_heads)
        stored, scales = self.array[0, layer, head], self.scales[0, layer, head]
        keys = load_rows(stored[slots], scales, self.dtype)
        stored[slots] = store_rows(ropes.turn_head(layer, keys, by), scales, self.dtype)

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")


def _each(array: AnyArray) -> IntArray:
    """Numbers of the first axis, to go with indices of the second."""
    return np.arange(len(array), dtype=np.int32)[:, None]

"""The cache of the reference engine."""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_capacity, check_range, check_rows, check_state
from edge.backends.fixed_state import FixedState
from edge.backends.kv_cache import KVState, RewindError, position_behind, state_key
from edge.backends.rope import CacheRope, Rotation
from edge.backends.row_lists import without_gaps
from edge.errors import InputError
from edge.formats.gguf import GGUFFile
from edge.model.cores import RowShape
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.types import FloatArray, IntArray


class ReferenceKV:
    """Rotated keys, and values, of each layer: float32 [KV heads, capacity, size], no heads without own rows. Values
    that are a part of their keys (`RowShape.shared`) have no memory of their own."""

    def __init__(self, name: str, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> None:
        """name: of the engine, for `key`."""
        network = find_network(spec)
        self._rows = [row or RowShape(0, 0, 0) for row in network.rows]
        rows = config.capacity
        self.keys = [np.zeros((row.heads, rows, row.key), np.float32) for row in self._rows]
        self.values = self._values([np.zeros((row.heads, rows, row.stored_value), np.float32) for row in self._rows])
        self.fixed_state = FixedState(network.fixed_values)
        self.has_tail, self.fixed = bool(self.fixed_state), self.fixed_state.nbytes
        self.capacity = config.capacity
        self.next_position = 0
        self._positions = np.zeros(config.capacity, np.int32)
        self._length = 0
        self.rope = CacheRope(file, network, config.capacity, halves=network.halves)
        self._make_key = partial(state_key, name, file, spec, config.kv_dtype)
        self.lora = ""  # names the adapters

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays) + self.fixed

    @property
    def _arrays(self) -> list[FloatArray]:
        """Keys, and values with memory of their own."""
        return [*self.keys, *(own for own, row in zip(self.values, self._rows, strict=True) if not row.shared)]

    def _values(self, own: list[FloatArray]) -> list[FloatArray]:
        """These arrays, but views of keys where they are shared."""
        layers = zip(own, self.keys, self._rows, strict=True)
        return [keys[..., : row.value] if row.shared else values for values, keys, row in layers]

    @property
    def key(self) -> str:
        return self._settings + self.rope.suffix

    @property
    def _settings(self) -> str:
        return self._model_key + self.lora

    @cached_property
    def _model_key(self) -> str:
        """Made when rows are first saved: that may read the whole file."""
        return self._make_key()

    @property
    def foresight(self) -> int:
        return self.rope.foresight(self.next_position)

    def announce(self, count: int) -> None:
        if self.rope.is_outgrown_by(self.next_position + count):
            self._rotate(self.rope.lengthen(self._length), self.positions)

    def _rotate(self, rotation: Rotation, by: IntArray) -> None:
        """Rotate the keys in use, row i by `by[i]` more positions."""
        for layer, keys in enumerate(self.keys):
            if not len(keys):
                continue
            keys[:, : self._length] = rotation.rotate_cached(keys[:, : self._length], by, layer)

    @property
    def length(self) -> int:
        return self._length

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def earliest(self) -> int:
        return self._length + (not self.fixed_state.whole) if self.has_tail else 0

    @property
    def positions(self) -> IntArray:
        return self._positions[: self._length]

    def reserve(self, places: Places) -> slice:
        """Reserve the next rows, for tokens at these places."""
        self.fixed_state.prepare()
        rows = slice(self._length, self._length + len(places.sees))
        self._positions[rows] = places.numbers
        self._length, self.next_position = rows.stop, places.next_position
        return rows

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        rows = check_rows(rows, self._length)
        count = rows.size
        for array in filter(len, self._arrays):
            array[:, :count] = array[:, rows]
        self._positions[:count] = self._positions[rows]
        self._length = count
        if close_gaps:
            moved = without_gaps(self._positions[:count]).astype(np.int32) - self._positions[:count]
            self._rotate(self.rope.rotation, moved)
            self._positions[:count] += moved
            self.next_position = int(self._positions[count - 1]) + 1 if count else 0

    def truncate(self, length: int, end: KVState | None = None) -> None:
        if not 0 <= length <= self._length:
            raise InputError(f"cannot truncate {self._length} rows to {length}")
        if 0 < length < self._length and self.has_tail:
            self._rewind(length, end)
        if length < self._length or length == 0:
            self.next_position = int(self._positions[length - 1]) + 1 if length else 0
        self._length = length
        if not length:
            self.rope.clear()
            self.fixed_state.clear()

    def _rewind(self, length: int, end: KVState | None) -> None:
        if end is None or end.tail is None:
            raise RewindError("the state of recurrent layers is gone so far back: run the tokens again")
        if (end.key, end.next_position) != (self.key, int(self._positions[length - 1]) + 1):
            raise RewindError("rows were evicted since the end was saved: run the tokens again")
        self.fixed_state.check(end.tail)
        self.fixed_state.restore(end.tail)

    def shrink(self, capacity: int) -> None:
        check_capacity(capacity, self)
        self.capacity = min(self.capacity, capacity)
        self.keys, values = ([each[:, : self.capacity].copy() for each in a] for a in (self.keys, self.values))
        self.values = self._values(values)

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        last = check_range(first, last, self._length)
        positions = self.positions[first:last].copy()
        next_position = self.next_position if last == self._length else position_behind(self.positions, last)
        rows = [array[:, first:last].tobytes() for array in self._arrays]
        tail = self.fixed_state.save() if self.has_tail and last == self._length else None
        return KVState(self.key, positions, next_position, b"".join(rows), tail)

    def append(self, state: KVState) -> None:
        if not self._length:
            self.rope.adopt(state.key, self._settings)
        check_state(state, self, self.next_position)
        first, last = self._length, self._length + state.positions.size
        sizes = [array[:, first:last].size for array in self._arrays]
        if len(state.data) != 4 * sum(sizes):
            raise InputError("the saved KV rows are damaged")
        data, at = np.frombuffer(state.data, np.float32), 0
        if self.has_tail and state.tail is not None:
            self.fixed_state.check(state.tail)
        for array, size in zip(self._arrays, sizes, strict=True):
            array[:, first:last] = data[at : at + size].reshape(array[:, first:last].shape)
            at += size
        self._positions[first:last], self._length, self.next_position = state.positions, last, state.next_position
        if self.has_tail and (state.positions.size or state.tail is not None):
            self.fixed_state.restore(state.tail)


@dataclass(frozen=True)
class SharedRows:
    """The rows of a layer that the next token sees, in any order: keys and values of each KV head, float32 [n, size],
    and the token's RoPE position. order: value i of a key is value `order[i]` in the order of the model's file."""

    keys: list[FloatArray]
    values: list[FloatArray]
    next_position: int
    order: IntArray

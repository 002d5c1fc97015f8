"""llama.cpp's KV cache: its rows, and the cells that llama.cpp has chosen for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_capacity, check_range, check_rows, check_state
from edge.backends.kv_cache import KVState, RewindError, state_key
from edge.backends.llamacpp import ENGINE, KV_VALUE_BYTES, allocated_rows, row_values, state_bytes
from edge.backends.llamacpp.library import LOG, version
from edge.backends.llamacpp.scores import Scores
from edge.backends.llamacpp.trial import shifts_wrongly
from edge.errors import EngineError, InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

_STATE_HEADER = 8  # bytes before any saved sequence
_STATE_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
SEQUENCE, _SPARE = 0, 1  # the second is used only while rows are saved or restored


class LlamaCppKV:
    """The KVCache protocol over llama.cpp's unified cache; rows are numbered in the order of their positions.

    With `scores` it is a HeadKVCache without `keys`: one head of one layer represents all. The tail of saved rows is
    the recurrent state of a model that has one.
    """

    def __init__(
        self,
        low_level: Any,
        context: Any,
        file: GGUFFile,
        spec: ModelSpec,
        config: EngineConfig,
        settle: Callable[[], None],
        new_context: Callable[[int], Any],
        scores: Scores | None,
    ):
        self._lib, self._context = low_level, context
        self.memory = low_level.llama_get_memory(context)
        self._can_shift = bool(low_level.llama_memory_can_shift(self.memory)) and not shifts_wrongly(file)
        self._settle, self._replace = settle, new_context
        self.has_tail, self._lacks_tail = spec.recurrent, False
        self._value_bytes = row_values(spec, config) * KV_VALUE_BYTES[config.kv_dtype]
        self.fixed = state_bytes(spec)
        self._scores = scores
        # With LongRoPE, llama.cpp chooses the factors by the rows that it allocates. They must not change later.
        ropes = spec.network.ropes if spec.network else ()
        original = next((rope.original_context for rope in ropes if rope.has_long), allocated_rows(config.capacity))
        self._long = allocated_rows(config.capacity) > original
        self._least = original + 1 if self._long else 1
        self._state_key = partial(state_key, f"{ENGINE.NAME} {version()}", file, spec, config.kv_dtype)
        self.capacity = config.capacity
        self.nbytes = int(allocated_rows(config.capacity) * self._value_bytes) + self.fixed
        self._positions = np.zeros(config.capacity + 1, np.int32)  # one more for `_settle`
        self._ends = np.zeros(config.capacity + 1, np.int32)  # the position of a token behind each row
        self._cells = np.zeros(config.capacity + 1, np.int32)  # of the rows, if there are scores
        self._length = 0
        self.next_position = 0
        self._shift_pending = False
        self.closed = False
        self.lora = ""  # names the adapters

    @property
    def key(self) -> str:
        return self._model_key + self.lora

    @cached_property
    def _model_key(self) -> str:
        """A key of the model, computed when rows are first saved, because that may read the whole file.

        An observing engine turns flash attention off, which stores values in another order.
        """
        return self._state_key() + ":long" * self._long + ":observed" * bool(self._scores)

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")

    @property
    def length(self) -> int:
        return self._length

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        return self._positions[: self._length]

    @property
    def earliest(self) -> int:
        """The length itself for recurrent states, which cannot go back."""
        return self._length + self._lacks_tail if self.has_tail else 0

    @property
    def longest(self) -> int:
        return self.capacity

    @property
    def head_lengths(self) -> IntArray:
        return np.array([[self._length]], np.int32)

    @property
    def ages(self) -> IntArray:
        return (self.next_position - self.positions)[None, None]

    @property
    def attention(self) -> FloatArray:
        return self._observed().by_cell[self._cells[: self._length]][None, None]

    def clear_attention(self) -> None:
        self._observed().by_cell[:] = 0

    def keys(self, layer: int) -> FloatArray:
        raise UnsupportedError("llama.cpp does not show its keys")

    def _observed(self) -> Scores:
        if self._scores is None:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        return self._scores

    @property
    def foresight(self) -> int:
        return 0

    def announce(self, count: int) -> None:
        """Does nothing: llama.cpp chooses RoPE's factors by its context's capacity, at construction."""

    def appended(self, positions: IntArray, cells: IntArray | None) -> None:
        """Record rows that the engine has just run, at positions of one component, [n], or of several. By llama.cpp's
        positions, of which the first component is one, the rows of a picture stand together."""
        count, several = len(positions), positions.ndim > 1
        part = slice(self._length, self._length + count)
        largest = positions.max(axis=1) if several else positions
        self._ends[part] = np.maximum.accumulate(np.maximum(largest + 1, self.next_position))
        if cells is not None:
            self._cells[part] = cells
        self._positions[part] = positions[:, 0] if several else positions
        self._length += count
        self.next_position = int(self._ends[self._length - 1])
        self._shift_pending = False

    def _check_divides(self, rows: AnyArray) -> None:
        """Raise UnsupportedError if one of these rows shares the position of the row before it: llama.cpp selects rows
        by positions."""
        rows = rows[(rows > 0) & (rows < self._length)]
        if (self._positions[rows] == self._positions[rows - 1]).any():
            raise UnsupportedError("llama.cpp keeps or removes the rows of a picture at one position together")

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self._check_open()
        rows = check_rows(rows, self._length)
        if not close_gaps and self._length and (rows.size == 0 or rows[-1] != self._length - 1):
            raise UnsupportedError("llama.cpp cannot leave a gap before the next token: keep the newest row")
        if close_gaps and not self._can_shift:
            raise UnsupportedError("llama.cpp cannot shift the positions of this model: use --kv-policy=full")
        if self.has_tail and rows.size < self._length:
            raise UnsupportedError("a recurrent state sums up all tokens: use --kv-policy=full")
        evicted = np.ones(self._length, bool)
        evicted[rows] = False
        self._check_divides(1 + np.flatnonzero(evicted[1:] != evicted[:-1]))
        for first, last in _runs(np.flatnonzero(evicted), np.diff(np.flatnonzero(evicted)) != 1):
            self._remove(SEQUENCE, int(self._positions[first]), int(self._positions[last]) + 1)
        self._positions[: rows.size] = self._positions[rows]
        self._ends[: rows.size] = self._ends[rows]
        self._cells[: rows.size] = self._cells[rows]
        self._length = rows.size
        if close_gaps:
            self._renumber()

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        if len(rows) != 1:
            raise InputError(f"rows for 1 head are wanted, not for {len(rows)}: all of llama.cpp's keep the same")
        self.keep(rows[0], close_gaps=False)

    def renumber(self) -> None:
        self._check_open()
        if not self._can_shift:
            raise UnsupportedError(
                "llama.cpp cannot shift the positions of this model, which have reached the end of its context"
            )
        cells, ages = self._cells[: self._length], self.ages[0, 0]
        self._renumber()
        self._observed().by_cell[cells] *= (self.ages[0, 0] / ages).astype(np.float32)

    def _renumber(self) -> None:
        """Give the rows positions 0…n-1. llama.cpp rotates the whole cache for any shift, so the window moves down and
        positions stay small: its RoPE is float32, which cannot represent position 10^7 well."""
        positions = self._positions[: self._length]
        moved = positions - np.arange(self._length, dtype=np.int32)
        for first, last in _runs(np.arange(self._length), np.diff(moved) != 0):
            if moved[first]:
                start, end = int(positions[first]), int(positions[last]) + 1
                self._lib.llama_memory_seq_add(self.memory, SEQUENCE, start, end, -int(moved[first]))
                self._shift_pending = True
        self._positions[: self._length] = np.arange(self._length)
        self._ends[: self._length] = 1 + np.arange(self._length)
        self.next_position = self._length

    def truncate(self, length: int, end: KVState | None = None) -> None:
        self._check_open()
        if not 0 <= length <= self._length:
            raise InputError(f"cannot truncate {self._length} rows to {length}")
        self._check_divides(np.array([length]))
        if self.has_tail and 0 < length < self._length:
            self._rewind(length, end)
            return
        if length == 0:
            self._lib.llama_memory_clear(self.memory, False)
            self._shift_pending = self._lacks_tail = False
        elif length < self._length:
            self._remove(SEQUENCE, int(self._positions[length]), -1)
        self._length = length
        self.next_position = int(self._ends[length - 1]) if length else 0

    def _rewind(self, length: int, end: KVState | None) -> None:
        """Restore a saved recurrent state, then remove rows: llama.cpp refuses to remove rows that the state
        includes."""
        if end is None or end.tail is None:
            raise RewindError("a recurrent state cannot go back to an earlier token: run the tokens again")
        if (end.key, end.next_position) != (self.key, int(self._ends[length - 1])):
            raise RewindError("the saved recurrent state is that of other tokens: run the tokens again")
        self._set(np.frombuffer(end.tail, np.uint8), SEQUENCE, _STATE_ONLY)
        self._remove(SEQUENCE, end.next_position, -1)
        self._lacks_tail = False
        self._length, self.next_position = length, end.next_position

    def forget_last(self, position: int) -> None:
        """Remove tokens from `position` on that ran but were not recorded; if that is impossible, remove all rows."""
        if not self._lib.llama_memory_seq_rm(self.memory, SEQUENCE, position, -1):
            self.truncate(0)

    def _remove(self, sequence: int, first: int, end: int) -> None:
        """Remove rows. Raises EngineError if llama.cpp keeps them."""
        if not self._lib.llama_memory_seq_rm(self.memory, sequence, first, end):
            raise EngineError("llama.cpp could not evict rows of this model: use --kv-policy=full")

    def shrink(self, capacity: int) -> None:
        """Move the rows in use to a new context, since llama.cpp cannot free rows. It allocates 256 at a time."""
        self._check_open()
        check_capacity(capacity, self)
        before, self.capacity = self.capacity, max(min(self.capacity, capacity), min(self.capacity, self._least))
        if allocated_rows(self.capacity) == allocated_rows(before):
            return
        if self._shift_pending:
            self._settle()
        data = self._sequence(SEQUENCE) if self._length else None
        self._context = self._replace(self.capacity)
        self.memory = self._lib.llama_get_memory(self._context)
        if data is not None and not self._lib.llama_state_seq_set_data(
            self._context, _bytes_of(data), data.size, SEQUENCE
        ):
            raise EngineError(f"llama.cpp could not take its rows over: {LOG.reason()}")
        self._note_order()
        self.nbytes = int(allocated_rows(self.capacity) * self._value_bytes) + self.fixed

    def replace_context(self) -> None:
        """Empty the cache by creating a new context."""
        self.truncate(0)
        self._context = self._replace(self.capacity)
        self.memory = self._lib.llama_get_memory(self._context)

    def _note_order(self) -> None:
        """Record that rows now occupy the first cells, in the order of their previous cells."""
        cells = self._cells[: self._length]
        if self._scores:
            paid = self._scores.by_cell[np.sort(cells)]
            self._scores.by_cell[:] = 0
            self._scores.by_cell[: paid.size] = paid
        cells[:] = np.argsort(np.argsort(cells))

    def _sequence(self, number: int, flags: int = 0) -> AnyArray:
        """A sequence's rows in llama.cpp's own format, followed by its recurrent state; or the state alone."""
        size = self._lib.llama_state_seq_get_size_ext(self._context, number, flags)
        data = np.empty(size, np.uint8)
        if self._lib.llama_state_seq_get_data_ext(self._context, _bytes_of(data), size, number, flags) != size:
            raise EngineError(f"llama.cpp could not save its state: {LOG.reason()}")
        return data

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        self._check_open()
        last = check_range(first, last, self._length)
        self._check_divides(np.array([first, last]))
        if self._shift_pending:  # llama.cpp would save the new positions, but keys that it has not rotated yet
            self._settle()
        if not self._in_order():
            raise UnsupportedError("a cache whose rows were evicted by their attention cannot be saved yet")
        positions = self._positions[first:last].copy()
        next_position = int(self._positions[last]) if last < self._length else self.next_position
        tail = None
        if self.has_tail and last == self._length and not self._lacks_tail:
            tail = self._sequence(SEQUENCE, _STATE_ONLY).data
        if first == last:
            return KVState(self.key, positions, next_position, b"", tail)
        # It saves whole sequences only, so the rows are in a second one, too, for a moment.
        self._lib.llama_memory_seq_cp(self.memory, SEQUENCE, _SPARE, int(positions[0]), int(positions[-1]) + 1)
        try:
            data = self._sequence(_SPARE)
            if self.has_tail:
                data = data[: data.size - self._sequence(_SPARE, _STATE_ONLY).size + _STATE_HEADER]
        finally:
            self._remove(_SPARE, -1, -1)
        return KVState(self.key, positions, next_position, data.data, tail)

    def _in_order(self) -> bool:
        """Whether rows occupy the first cells in order, so that the cells of saved or restored rows are known."""
        return self._scores is None or bool((self._cells[: self._length] == np.arange(self._length)).all())

    def append(self, state: KVState) -> None:
        self._check_open()
        check_state(state, self, self.next_position)
        if state.positions.size == 0:
            if self.has_tail and state.tail is not None:
                self._set(np.frombuffer(state.tail, np.uint8), SEQUENCE, _STATE_ONLY)
                self._lacks_tail = False
            return
        if not self._in_order():
            raise InputError("the saved KV rows do not fit behind rows that were evicted since")
        if self._shift_pending:
            self._settle()  # it would also rotate the new rows
        first, last = self._length, self._length + state.positions.size
        data = np.frombuffer(state.data, np.uint8)
        if self.has_tail:  # without one, that of a sequence without tokens
            tail = self._sequence(_SPARE, _STATE_ONLY) if state.tail is None else np.frombuffer(state.tail, np.uint8)
            data = np.concatenate([data, tail[_STATE_HEADER:]])
        try:
            self._set(data, _SPARE)
            self._lib.llama_memory_seq_cp(self.memory, _SPARE, SEQUENCE, -1, -1)
        finally:
            self._remove(_SPARE, -1, -1)
        self._positions[first:last] = state.positions
        behind = np.append(state.positions[1:], state.next_position)
        shared = np.append(False, state.positions[1:] == state.positions[:-1])  # rows of a picture
        self._ends[first:last] = np.where(shared, behind, state.positions + 1)
        self._cells[first:last] = np.arange(first, last)
        if self._scores:
            self._scores.by_cell[first:last] = 0
        self._length, self.next_position = last, state.next_position
        self._lacks_tail = self.has_tail and state.tail is None

    def _set(self, data: AnyArray, number: int, flags: int = 0) -> None:
        taken = self._lib.llama_state_seq_set_data_ext(self._context, _bytes_of(data), data.size, number, flags)
        if taken != data.size or not taken:
            raise InputError("the saved KV rows are damaged")


def _bytes_of(array: AnyArray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _runs(values: AnyArray, breaks: AnyArray) -> list[tuple[int, int]]:
    """First and last of each unbroken run of `values`; breaks[i]: whether a run ends between i and i+1."""
    if values.size == 0:
        return []
    ends = np.flatnonzero(breaks)
    firsts, lasts = np.r_[0, ends + 1], np.r_[ends, values.size - 1]
    return [(int(values[first]), int(values[last])) for first, last in zip(firsts, lasts, strict=True)]

"""Slots: memory for some of the experts, into which a pass reads those that its router chooses.

All layers share the slots. Between the router and the experts, thread 0 calls `ExpertSlots` here, which assigns each
chosen expert a slot and lists those to be read; all threads then read them from the packed file
(`phases/experts.py`), where the matrices of an expert lie side by side. The experts chosen least often of late are
evicted, by counts of choices that are halved every `HALF_LIFE` tokens.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from edge.backends.counts import ExpertCounts
from edge.backends.tvm.cpu.arguments import Table
from edge.backends.tvm.cpu.scratch import Scratch
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.layout import SECTOR, PackedLayout
from edge.devices.memory import memory_limit
from edge.devices.power import memory_root
from edge.errors import EngineError
from edge.records import dataclass
from edge.types import AnyArray, IntArray

HALF_LIFE = 32  # tokens: of 8 to 256, hits most in texts of topics (tests/native/test_slots.py)
_TRACE = 512  # tokens whose choices are recorded
_LARGEST, _COMING = 1e200, 1e250  # weights stay below; experts that are needed soon count more than any others
_HUGEPAGE = 14  # of Linux's madvise

_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def slot_bytes(expert: int) -> int:
    """Bytes of a slot for experts of this size, which begin anywhere in a sector."""
    return round_up(expert, SECTOR) + SECTOR


def slots_within(layout: PackedLayout, nbytes: int) -> int:
    """The number of slots that fit in `nbytes`, at most one for each expert."""
    return min(nbytes // _largest(layout), sum(each.number for each in layout.experts.values()))


def _largest(layout: PackedLayout) -> int:
    return slot_bytes(max(each.stride for each in layout.experts.values()))


class Slots:
    """The experts in slots. Rows are the layers that have experts."""

    def __init__(self, rows: int, experts: int, count: int) -> None:
        self.count = count
        self._experts = experts
        self._slot_of = np.full(rows * experts, -1, np.int64)
        self._uses: AnyArray = np.zeros(rows * experts + 1)  # weighted counts; the last one stands for an empty slot
        self._uses[-1] = -1.0
        self._weight = 1.0  # of a choice now: grows, instead of older counts shrinking
        self.clear()

    def clear(self) -> None:
        """Empty all slots. Counts stay."""
        self._slot_of[:] = -1
        self._held = np.full(self.count, -1, np.int64)  # by slot: row · experts + expert, −1: none

    def age(self, tokens: int) -> None:
        """Announce new tokens, which make older choices count less."""
        grows = 2.0 ** min(tokens / HALF_LIFE, 500)  # the limit, too, forgets all older choices
        if self._weight * grows > _LARGEST:
            self._uses[:-1] /= self._weight
            self._weight = 1.0
        self._weight *= grows

    def take(self, row: int, wanted: AnyArray, tokens: AnyArray | int = 1, later: AnyArray | None = None) -> AnyArray:
        """Assign slots to these experts of a row; there must be enough. Returns the experts to read, int64 [n, 2]:
        expert and slot.

        tokens: how many chose each. later: experts that the row needs next, evicted only if all others are wanted.
        """
        keys = wanted + row * self._experts
        self._uses[keys] += self._weight * tokens
        missing = keys[self._slot_of[keys] < 0]
        if not missing.size:
            return np.zeros((0, 2), np.int64)
        uses = self._uses[self._held]
        for each, bonus in ((keys, np.inf), (None if later is None else later + row * self._experts, _COMING)):
            if each is not None:
                slots = self._slot_of[each]
                uses[slots[slots >= 0]] += bonus
        if missing.size == 1:
            slots = np.array([uses.argmin()])
        else:
            slots = np.argpartition(uses, missing.size - 1)[: missing.size]
        evicted = self._held[slots]
        self._slot_of[evicted[evicted >= 0]] = -1
        self._held[slots], self._slot_of[missing] = missing, slots
        return np.stack([missing - row * self._experts, slots], axis=1)


def count_hits(trace: AnyArray, experts: int, count: int) -> float:
    """The share of choices that find their expert in one of `count` slots, in the second half of a trace, [tokens,
    rows, choices]."""
    slots, hits, tokens = Slots(trace.shape[1], experts, count), 0, len(trace)
    for number, token in enumerate(trace):
        slots.age(1)
        for row, chosen in enumerate(token):
            missed = len(slots.take(row, chosen))
            hits += (len(chosen) - missed) * (number >= tokens // 2)
    return hits / max(1, trace[tokens // 2 :].size)


@dataclass(frozen=True)
class _Row:
    """A layer's experts in the packed file, and their numbers in the table."""

    at: int
    stride: int
    moves: AnyArray


class ExpertSlots:
    """The slots of an engine: their memory, the file that they are read from, and the callback of compiled code."""

    def __init__(
        self, path: Path, layout: PackedLayout, scratch: Scratch, table: AnyArray, integers: IntArray, nbytes: int,
        weights: int,
    ) -> None:  # fmt: skip
        """table: of a pass; it ends with `reads_size` numbers for reads. nbytes: of the slots, at most. weights: the
        address of the mapped weights. Raises EngineError if the file cannot be opened, or if a token's experts do not
        fit."""
        size, count = _largest(layout), slots_within(layout, nbytes)
        number, used = max(each.number for each in layout.experts.values()), layout.experts_used
        if count < used:
            raise EngineError(f"{nbytes} bytes have no room for the {used} experts of a token, of {size} bytes each")
        self._slots, self._size = Slots(len(layout.experts), number, count), size
        self._number, self._used = number, used
        self._memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            self._memory.madvise(_HUGEPAGE)
        self._base = np.frombuffer(self._memory, np.uint8).ctypes.data - weights
        names = Table.of(layout.shape)
        self._row_of = {layer: row for row, layer in enumerate(layout.experts)}
        self._rows = []
        for layer, each in layout.experts.items():
            at = int(table[names.place(layer, "expert_moves")])
            self._rows.append(_Row(each.at, each.stride, table[at : at + each.number]))
        at_once = min(number, max(used, (count - used) // 2))
        reads = len(table) - reads_size(layout)
        self._reads, self._integers = table[reads:], integers
        self._at = {name: scratch.offsets[name] for name in ("chosen", "starts", "waves")}
        self._file = _open(path, direct=memory_limit(memory_root()).bytes < layout.nbytes + nbytes)
        self._reads[1] = self._file.fileno()
        self._function = _Function(self._fetch)
        table[names.slot("experts_at_once")] = at_once
        table[names.slot("reads")] = reads
        table[names.slot("fetch")] = ctypes.cast(self._function, ctypes.c_void_p).value
        self.counts = ExpertCounts(count, sum(each.number for each in layout.experts.values()))
        self._trace = np.zeros((_TRACE, len(self._rows), used), np.int16)
        self._tokens = 0  # recorded so far
        self._error: BaseException | None = None
        self._interrupt: KeyboardInterrupt | None = None

    @property
    def trace(self) -> AnyArray:
        """Choices of the last single-token passes, int16 [tokens, rows, choices]."""
        first = self._tokens % _TRACE if self._tokens > _TRACE else 0
        return np.roll(self._trace, -first, axis=0)[: self._tokens]

    def begin(self, tokens: int) -> None:
        """Announce a pass."""
        self._slots.age(tokens)
        self.counts.steps += tokens == 1
        self._reads[0] = self._reads[2] = 0

    def check(self) -> None:
        """Check a finished pass. Raises EngineError if experts could not be read, which invalidates its results."""
        error, self._error = self._error, None
        if error is not None or self._reads[2]:
            self._slots.clear()
            raise error or EngineError("experts could not be read from the packed weights: load the model again")

    def interrupt(self) -> None:
        """Raise the KeyboardInterrupt that came during the pass, if any."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt:
            raise interrupt

    def close(self) -> None:
        """Safe to call twice, and only while no pass runs."""
        self._file.close()
        self._memory.close()

    def _fetch(self, layer: int, wave: int, single: int) -> int:
        """The callback of compiled code. Defers an interrupt to the end of the pass, whose results stay valid."""
        try:
            try:
                self._fill(layer, wave, single=bool(single))
            except KeyboardInterrupt as error:
                self._interrupt = error
                self._slots.clear()
                self._fill(layer, wave, single=bool(single))
        except BaseException as error:
            self._error, self._reads[0] = error, 0
        return 0

    def _fill(self, layer: int, wave: int, *, single: bool) -> None:
        index = self._row_of[layer]
        row = self._rows[index]
        if single:
            at = self._at["chosen"]
            wanted = self._integers[at : at + self._used].astype(np.int64)
            misses = self._slots.take(index, wanted)
            self._trace[self._tokens % _TRACE, index] = wanted
            self._tokens += index + 1 == len(self._rows)
        else:
            starts, waves = (self._integers[self._at[name] :] for name in ("starts", "waves"))
            tokens = np.diff(starts[: self._number + 1])
            first, stop = waves[1 + wave], waves[2 + wave]
            wanted, later = first + np.flatnonzero(tokens[first:stop]), stop + np.flatnonzero(tokens[stop:])
            misses = self._slots.take(index, wanted, tokens[wanted], later)
        self.counts.add(wanted.size, len(misses), len(misses) * row.stride, single=single)
        for number, (expert, slot) in enumerate(misses.tolist()):
            at = row.at + expert * row.stride
            source, target = at // SECTOR * SECTOR, self._base + slot * self._size
            row.moves[expert] = target + at - source - row.at
            self._reads[3 + 3 * number : 6 + 3 * number] = source, target, round_up(at + row.stride, SECTOR) - source
        self._reads[0] = len(misses)


def reads_size(layout: PackedLayout) -> int:
    """How many numbers a table ends with for reads: their count, the file, failures; and for each read the offset in
    the file, the target, relative to the weights, and the bytes."""
    return 3 + 3 * max((each.number for each in layout.experts.values()), default=0)


def _open(path: Path, *, direct: bool) -> io.FileIO:
    """Open a file for reading. direct: bypass the system's page cache, if the file system supports that."""
    ways: Sequence[int] = [getattr(os, "O_DIRECT", 0), 0] if direct else [0]
    for way in ways:
        try:
            return io.FileIO(path, opener=lambda name, flags, way=way: os.open(name, flags | way))  # type: ignore[misc]
        except OSError as error:
            failed = error.strerror
    raise EngineError(f"the packed weights {path}: {failed}")

"""Reclaiming a session's memory when it is short, the least missed first.

While a prompt runs, its chunks become shorter (it takes longer). The prompt cache frees its memory and keeps its files
(a later prompt takes longer), then a conversation frees its snapshots (it cannot return to an earlier turn without
running it again), and last the policy evicts KV rows (the model forgets). Mapped weights need no reclaiming: the system
drops their pages when it needs memory, and reads them again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge.devices.memory import release_free_memory
from edge.plan.candidates import EVICTED_SHARE
from edge.plan.checks import SMALLEST_ROWS, least_rows
from edge.plan.plan import Plan
from edge.run.decoding.generation import Generation
from edge.run.report import Action, Given
from edge.run.sequences.sequence import TokenSequence

ROWS_STEP = 64  # KV rows
SMALLEST_CHUNK = 16  # tokens


class Reclaimer:
    """Returns memory to the system; this session never takes it again. `actions` records each step.

    sequences: all that have rows; they share a prompt cache. run: the generation in progress; None between generations,
    and while several run.
    """

    def __init__(self, sequences: Sequence[TokenSequence]) -> None:
        self.sequences = list(sequences)
        self.needed = self._plan.bytes.total  # the planned peak of the process, in bytes
        # The smallest capacity of a cache, in rows: here, since `spare` is read between tokens.
        self._fewest = min(self._plan.config.capacity, max(SMALLEST_ROWS, least_rows(self._plan.sinks)))
        self.run: Generation | None = None
        self.actions: list[Action] = []

    @property
    def _plan(self) -> Plan:
        return self.sequences[0].plan

    @property
    def spare(self) -> int:
        """Bytes of `needed` that can be returned."""
        return self._cached() + sum(self._snapshots(each) + self._spare_rows(each) for each in self.sequences)

    def trim(self, level: float) -> None:
        """As `Session.trim`, between two passes."""
        for each in self.sequences:
            each.settle()
        self.give(round(level * self.spare), "trim")

    def take_actions(self) -> tuple[Action, ...]:
        """The steps since the last call."""
        taken, self.actions = tuple(self.actions), []
        return taken

    def give(self, nbytes: int, cause: str) -> None:
        """Return about `nbytes` to the system, or all that can be spared."""
        run, only = self.run, self.sequences[0]
        if nbytes > 0 and run is not None and run.tokens.cut and only.chunk > SMALLEST_CHUNK:
            only.halve_chunk(SMALLEST_CHUNK)  # memory is then checked sooner, too
            self._note("chunk", 0, only.chunk, cause)
        nbytes -= self._give_cached(nbytes, cause)
        for left, each in zip(range(len(self.sequences), 0, -1), self.sequences, strict=True):
            freed = self._give_snapshots(each, -(-nbytes // left), cause)
            nbytes -= freed + self._give_rows(each, -(-(nbytes - freed) // left), cause)
        release_free_memory()

    def _give_cached(self, nbytes: int, cause: str) -> int:
        cached, prompt_cache = self._cached(), self.sequences[0].rows.prompt_cache
        if prompt_cache is None or not cached or nbytes <= 0:
            return 0
        prompt_cache.shrink(max(0, cached - nbytes))
        self._note("prompt cache", freed := cached - self._cached(), self._cached(), cause)
        return freed

    def _give_snapshots(self, sequence: TokenSequence, nbytes: int, cause: str) -> int:
        snapshots, planned = sequence.rows.snapshots, self._snapshots(sequence)
        if not planned or nbytes <= 0:
            return 0
        snapshots.shrink(max(0, snapshots.most - -(-nbytes * snapshots.most // planned)))
        self._note("snapshots", freed := planned - self._snapshots(sequence), snapshots.most, cause)
        return freed

    def _give_rows(self, sequence: TokenSequence, nbytes: int, cause: str) -> int:
        kv, evicts = sequence.engine.kv, sequence.policy.evicts
        before, floor = kv.nbytes, self._floor(sequence)
        while (lacking := nbytes - (before - kv.nbytes)) > 0 and kv.capacity > floor:  # llama.cpp: 256 rows or none
            rows = kv.capacity - -(-lacking * kv.capacity // (kv.nbytes - kv.fixed))
            rows = max(floor, rows // ROWS_STEP * ROWS_STEP)
            if evicts and kv.capacity - kv.free > rows:
                sequence.rows.shrink(rows - max(1, rows // EVICTED_SHARE))
            kv.shrink(rows)
        if kv.nbytes < before:
            self._note("shrink", before - kv.nbytes, kv.capacity, cause)
        return before - kv.nbytes

    def _cached(self) -> int:
        prompt_cache = self.sequences[0].rows.prompt_cache
        return 0 if prompt_cache is None else prompt_cache.memory

    def _snapshots(self, sequence: TokenSequence) -> int:
        plan, most = self._plan, sequence.rows.snapshots.most
        return plan.bytes.snapshots * most // plan.snapshots // plan.config.sequences if most else 0

    def _spare_rows(self, sequence: TokenSequence) -> int:
        """The bytes of KV rows that can be returned."""
        kv = sequence.engine.kv
        return (kv.capacity - self._floor(sequence)) * (kv.nbytes - kv.fixed) // kv.capacity

    def _floor(self, sequence: TokenSequence) -> int:
        """The smallest capacity to which the sequence's cache may shrink, in rows."""
        kv = sequence.engine.kv
        searches = self.run is not None and self.run.request.beams is not None  # a search returns to all of its rows
        used = kv.capacity - kv.free if searches or not sequence.policy.evicts else 0
        return min(kv.capacity, max(self._fewest, used))

    def _note(self, what: Given, freed: int, left: int, cause: str) -> None:
        run = self.run
        token, seconds = (0, 0.0) if run is None else (run.generated, time.perf_counter() - run.started)
        self.needed -= freed
        self.actions.append(Action(token, seconds, what, freed, left, cause))

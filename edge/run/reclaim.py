"""Reclaiming a session's memory when it is short, the least missed first.

First the prompt cache frees its memory, and keeps its files (a later prompt takes longer), and a conversation its
snapshots (it cannot return to an earlier turn without running it again); then, while a prompt runs,
its chunks become shorter (it takes longer); then the policy evicts KV rows (the model forgets). Mapped weights need not
be reclaimed: the system drops their pages when it needs memory, and reads them again.
"""

from __future__ import annotations

import time

from edge.devices.memory import release_free_memory
from edge.plan.candidates import EVICTED_SHARE
from edge.plan.checks import SMALLEST_ROWS, least_rows
from edge.run.generation import Generation
from edge.run.report import Action, Given
from edge.run.sequence import TokenSequence

ROWS_STEP = 64  # KV rows
SMALLEST_CHUNK = 16  # tokens


class Reclaimer:
    """Memory once returned is not taken again in this session. `actions` records each step.

    run: the generation in progress, None between two of them.
    """

    def __init__(self, sequence: TokenSequence) -> None:
        plan, kv = sequence.plan, sequence.engine.kv
        self._sequence, self._kv, self._prompt_cache = sequence, kv, sequence.prompt_cache
        self._evicts = sequence.policy.evicts
        self._fewest = min(kv.capacity, max(SMALLEST_ROWS, least_rows(plan.sinks)))
        self.needed = plan.bytes.total  # the planned peak of the process, in bytes
        self.run: Generation | None = None
        self.actions: list[Action] = []

    @property
    def spare(self) -> int:
        """Bytes of `needed` that can be returned."""
        rows = self._kv.capacity - self._floor()
        return self._cached() + self._snapshots() + rows * (self._kv.nbytes - self._kv.fixed) // self._kv.capacity

    def trim(self, level: float) -> None:
        """As `Session.trim`, between two passes."""
        self._sequence.settle()
        self.give(round(level * self.spare), "trim")

    def take_actions(self) -> tuple[Action, ...]:
        """The steps since the last call."""
        taken, self.actions = tuple(self.actions), []
        return taken

    def give(self, nbytes: int, cause: str) -> None:
        """Return about `nbytes` to the system, or all that can be spared."""
        sequence, run = self._sequence, self.run
        if nbytes > 0 and run is not None and run.tokens.cut and sequence.chunk > SMALLEST_CHUNK:
            sequence.halve_chunk(SMALLEST_CHUNK)  # and memory is checked again sooner
            self._note("chunk", 0, sequence.chunk, cause)
        nbytes -= self._give_cached(nbytes, cause)
        nbytes -= self._give_snapshots(nbytes, cause)
        self._give_rows(nbytes, cause)
        release_free_memory()

    def _give_cached(self, nbytes: int, cause: str) -> int:
        cached = self._cached()
        if self._prompt_cache is None or not cached or nbytes <= 0:
            return 0
        self._prompt_cache.shrink(max(0, cached - nbytes))
        self._note("prompt cache", freed := cached - self._cached(), self._cached(), cause)
        return freed

    def _give_snapshots(self, nbytes: int, cause: str) -> int:
        snapshots, planned = self._sequence.snapshots, self._snapshots()
        if not planned or nbytes <= 0:
            return 0
        snapshots.shrink(max(0, snapshots.most - -(-nbytes * snapshots.most // planned)))
        self._note("snapshots", freed := planned - self._snapshots(), snapshots.most, cause)
        return freed

    def _give_rows(self, nbytes: int, cause: str) -> None:
        kv, before, floor = self._kv, self._kv.nbytes, self._floor()
        while (lacking := nbytes - (before - kv.nbytes)) > 0 and kv.capacity > floor:  # llama.cpp: 256 rows or none
            rows = kv.capacity - -(-lacking * kv.capacity // (kv.nbytes - kv.fixed))
            rows = max(floor, rows // ROWS_STEP * ROWS_STEP)
            if self._evicts and kv.capacity - kv.free > rows:
                self._sequence.shrink(rows - max(1, rows // EVICTED_SHARE))
            kv.shrink(rows)
        if kv.nbytes < before:
            self._note("shrink", before - kv.nbytes, kv.capacity, cause)

    def _cached(self) -> int:
        return 0 if self._prompt_cache is None else self._prompt_cache.memory

    def _snapshots(self) -> int:
        plan, most = self._sequence.plan, self._sequence.snapshots.most
        return plan.bytes.snapshots * most // plan.snapshots if most else 0

    def _floor(self) -> int:
        """The smallest capacity."""
        used = 0 if self._evicts else self._kv.capacity - self._kv.free
        return min(self._kv.capacity, max(self._fewest, used))

    def _note(self, what: Given, freed: int, left: int, cause: str) -> None:
        run = self.run
        token, seconds = (0, 0.0) if run is None else (run.generated, time.perf_counter() - run.started)
        self.needed -= freed
        self.actions.append(Action(token, seconds, what, freed, left, cause))

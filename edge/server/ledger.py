"""The memory of the server's process in bytes: models by their plans, and the claims of requests."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import field

from edge.devices.memory import memory_use
from edge.plan.plan import PlanBytes
from edge.records import dataclass
from edge.server.refusal import RefusedError

_SHARE = 16  # the server's own part of a budget is 1 / _SHARE
_LEAST, _MOST = 16 << 20, 64 << 20
_WAITING = 0.75  # share of them that requests may take before they run: what they make then has room
COMPARED = 1 << 20  # for each model: prompts that new ones are compared with


@dataclass
class Ledger:
    """An account of the process's memory."""

    budget: int | None  # of the process; None: none was stated
    base: int = field(default_factory=lambda: memory_use().rss)  # before the first model
    models: dict[str, PlanBytes] = field(default_factory=dict)  # by their plans
    taken: dict[str, int] = field(default_factory=dict)  # by model: bytes that it adds to the process
    prompts: dict[str, int] = field(default_factory=dict)  # by model: most bytes of earlier prompts' rows
    claims: Counter[str] = field(default_factory=Counter)  # by kind: bodies, grammars, answers on their way
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def reserve(self) -> int:
        """Bytes for requests and answers: claims beyond them are refused."""
        return _MOST if self.budget is None else min(_MOST, max(_LEAST, self.budget // _SHARE))

    @property
    def to_come(self) -> int:
        """The most bytes that the process will take in addition to its present ones, by these figures."""
        compared = (len(self.models) + 1) * COMPARED
        return max(0, self.base + sum(self.taken.values()) - memory_use().rss) + self.reserve + compared

    def enter(self, name: str, counted: PlanBytes, before: int, prompts: int) -> None:
        """Record a loaded model. before: bytes of the process before the load. prompts: as in `self.prompts`."""
        self.models[name], self.taken[name], self.prompts[name] = counted, max(0, counted.total - before), prompts

    def leave(self, name: str) -> None:
        """Remove an unloaded model."""
        for figures in (self.models, self.taken, self.prompts):
            figures.pop(name, None)

    def figures(self) -> dict[str, int]:
        """Bytes by use; also `resident`, `peak` and `budget` (0: none)."""
        plans = list(self.models.values())  # a model may enter meanwhile
        found = {
            "weights": sum(each.weights + each.lora for each in plans),
            "kv": sum(each.kv + each.snapshots for each in plans),
            "prompts": sum(self.prompts.values()),
            "scratch": sum(each.scratch for each in plans) - sum(self.prompts.values()),
            "requests": self.reserve,
            "requests_now": self.claims.total(),
            "process": self.base,
        }
        use = memory_use()
        return found | {"resident": use.rss, "peak": use.peak, "budget": self.budget or 0}


class Claim:
    """The memory of one request, or of one of its answers, claimed part by part before it is taken, from any thread.
    It is given back once every holder has released it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._counts, self._holders = ledger, Counter[str](), 1

    def add(self, kind: str, count: int, *, waits: bool = False) -> None:
        """Claim `count` bytes more. waits: the request has not begun to run. Raises RefusedError if there is no room
        now, or never."""
        ledger = self._ledger
        most = round(ledger.reserve * (_WAITING if waits else 1))
        with ledger._lock:
            mine = self._counts.total() + count
            if mine > most:
                message = f"the request takes {mine} bytes of memory, {most} are the most: use a larger --memory"
                raise RefusedError(413, message, code="too_large")
            if ledger.claims.total() + count > most:
                raise RefusedError(429, "the memory for requests is taken: try again", code="memory", retry=1)
            ledger.claims[kind] += count
            self._counts[kind] += count

    def hold(self) -> Claim:
        """The claim, with one holder more."""
        with self._ledger._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """One holder less."""
        with self._ledger._lock:
            self._holders -= 1
            if not self._holders:
                self._ledger.claims.subtract(self._counts)
                self._counts.clear()

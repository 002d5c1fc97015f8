"""The memory of the server's process in bytes: models by their plans, and the claims of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field

from edge.devices.memory import memory_use
from edge.plan.plan import PlanBytes
from edge.records import dataclass
from edge.server.refusal import RefusedError

_SHARE = 16  # the server's own part of a budget is 1 / _SHARE
_LEAST, _MOST = 16 << 20, 64 << 20


@dataclass
class Ledger:
    """An account of the process's memory."""

    budget: int | None  # of the process; None: none was stated
    base: int = field(default_factory=lambda: memory_use().rss)  # before the first model
    models: dict[str, PlanBytes] = field(default_factory=dict)  # by their plans
    taken: dict[str, int] = field(default_factory=dict)  # by model: bytes that it adds to the process
    prompts: dict[str, int] = field(default_factory=dict)  # by model: most bytes of earlier prompts' rows
    claims: Counter[str] = field(default_factory=Counter)  # by kind: requests' bodies, answers on their way

    @property
    def reserve(self) -> int:
        """Bytes for requests and answers: claims beyond them are refused."""
        return _MOST if self.budget is None else min(_MOST, max(_LEAST, self.budget // _SHARE))

    @property
    def to_come(self) -> int:
        """The most bytes that the process will take in addition to its present ones, by these figures."""
        return max(0, self.base + sum(self.taken.values()) - memory_use().rss) + self.reserve

    def enter(self, name: str, counted: PlanBytes, before: int, prompts: int) -> None:
        """Record a loaded model. before: bytes of the process before the load. prompts: as in `self.prompts`."""
        self.models[name], self.taken[name], self.prompts[name] = counted, max(0, counted.total - before), prompts

    def leave(self, name: str) -> None:
        """Remove an unloaded model."""
        for figures in (self.models, self.taken, self.prompts):
            figures.pop(name, None)

    @contextmanager
    def claim(self, kind: str, count: int) -> Iterator[None]:
        """Hold `count` bytes for a request. Raises RefusedError if there is no room now."""
        if count > self.reserve:
            raise RefusedError(
                413, f"the request takes {count} bytes of memory, {self.reserve} are the most", code="too_large"
            )
        if self.claims.total() + count > self.reserve:
            raise RefusedError(429, "the memory for requests is taken: try again", code="memory", retry=1)
        self.claims[kind] += count
        try:
            yield
        finally:
            self.claims[kind] -= count

    def figures(self) -> dict[str, int]:
        """Bytes by use; also `resident`, `peak` and `budget` (0: none)."""
        plans = self.models.values()
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

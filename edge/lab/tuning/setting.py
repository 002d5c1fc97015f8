"""A tuning task, and the measurer of its candidates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from edge.backends.tuning import Field, Values, relevant
from edge.devices.records import Subject

_MOST_LOADED = 4  # the best and the candidate, for decode and for prefill

Loaded = TypeVar("Loaded")


class Measurer(Protocol):
    """Times candidates, on the engine here or on a remote device."""

    def measure(self, values: Values, part: str) -> float:
        """Seconds of one part of the score. Raises EngineError if the values do not compile."""
        ...


@dataclass(frozen=True)
class Setting:
    """A tuning task."""

    subject: Subject
    space: tuple[Field, ...]
    score: str  # the timed workload, in words
    # starts the measurer; its argument is called before each compilation
    open: Callable[[Callable[[], None]], AbstractContextManager[Measurer]]
    sources: str = ""  # hash of the engine's code, which invalidates trials of other code
    versions: dict[str, str] = field(default_factory=dict)  # of the compiler


@dataclass
class Pool(Generic[Loaded]):
    """An LRU pool of loaded candidates. Candidates with the same values for a part of the score share one."""

    space: tuple[Field, ...]
    load: Callable[[Values], Loaded]
    unload: Callable[[Loaded], None]
    _held: list[tuple[Values, Loaded]] = field(default_factory=list)  # the most recently used last

    def get(self, values: Values, part: str) -> Loaded:
        """A candidate that shares the values that affect this part."""
        wanted = relevant(self.space, values, (part,))
        for index, (held, loaded) in enumerate(self._held):
            if relevant(self.space, held, (part,)) == wanted:
                self._held.append(self._held.pop(index))
                return loaded
        while len(self._held) >= _MOST_LOADED:
            self.unload(self._held.pop(0)[1])
        loaded = self.load(values)
        self._held.append((values, loaded))
        return loaded

    def close(self) -> None:
        while self._held:
            self.unload(self._held.pop()[1])

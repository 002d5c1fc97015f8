"""The few candidates that are loaded at once. Those that agree in what a part of the score depends on are one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edge.backends.tvm.tuning.space import Field, Values, relevant

_MOST = 4  # the best and the candidate, for decode and for prefill

Loaded = TypeVar("Loaded")


@dataclass
class Pool(Generic[Loaded]):
    """Loads what is asked for, and unloads what was not used for longest."""

    space: tuple[Field, ...]
    load: Callable[[Values], Loaded]
    unload: Callable[[Loaded], None]
    _held: list[tuple[Values, Loaded]] = field(default_factory=list)  # last used last

    def get(self, values: Values, part: str) -> Loaded:
        """A candidate whose values are these, as far as this part is concerned."""
        wanted = relevant(self.space, values, (part,))
        for index, (held, loaded) in enumerate(self._held):
            if relevant(self.space, held, (part,)) == wanted:
                self._held.append(self._held.pop(index))
                return loaded
        while len(self._held) >= _MOST:
            self.unload(self._held.pop(0)[1])
        loaded = self.load(values)
        self._held.append((values, loaded))
        return loaded

    def close(self) -> None:
        while self._held:
            self.unload(self._held.pop()[1])

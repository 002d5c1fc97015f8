"""Which rows of the KV cache stay when it is full: the protocol that every policy follows.

A policy knows nothing of engines. It is told how many rows there are and how many may stay, and names those that
do. The session asks it after every chunk of prefill and during decode, so that
`rows + incoming tokens ≤ capacity` holds at every moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge.types import IntArray


@dataclass(frozen=True)
class KVView:
    """What a policy may look at: the rows in use, in order of their positions."""

    length: int


class Policy(Protocol):
    """name: as in --kv-policy. evicts: whether it ever gives rows up. close_gaps: see `KVCache.keep`."""

    @property
    def name(self) -> str: ...

    @property
    def evicts(self) -> bool: ...

    @property
    def close_gaps(self) -> bool: ...

    def rows_to_keep(self, view: KVView, budget: int) -> IntArray:
        """At most `budget` rows, strictly increasing, int32 [n]. Called only if `view.length > budget`."""
        ...

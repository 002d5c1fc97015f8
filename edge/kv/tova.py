"""TOVA: the row with the least attention from the last query goes.

Oren et al., "Transformers are Multi-State RNNs", arXiv:2401.06104. No recency, no sinks by rule: what the newest token
does not look at is dropped. Ours evicts several rows at once, and head by head rather than layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edge.kv.policy import KVView, Needs, best_rows, check_options
from edge.types import IntArray


@dataclass(frozen=True)
class TOVA:
    """sinks are kept as by all policies; `recent` is 1: the newest row has not been looked at by others."""

    sinks: int = 4
    name: ClassVar[str] = "tova"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(queries=1)

    def __post_init__(self) -> None:
        check_options(self.sinks)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        assert view.attention is not None
        return best_rows(view.attention, view, budget, self.sinks, recent=1)

"""A plain sliding window, without sinks: the control that must collapse (arXiv:2309.17453, figure 1b)."""

from __future__ import annotations

from typing import ClassVar

from edge.kv.policy import NOTHING, KVView, Needs, check_options, first_and_last
from edge.records import dataclass
from edge.types import IntArray


@dataclass(frozen=True)
class Window:
    """Keeps the last `budget` rows. sinks: rows that --keep pins; a plain window has none."""

    sinks: int = 0
    name: ClassVar[str] = "window"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = True
    needs: ClassVar[Needs] = NOTHING

    def __post_init__(self) -> None:
        check_options(self.sinks)

    def rows_to_keep(self, view: KVView, budget: int) -> IntArray:
        return first_and_last(view.length, budget, self.sinks)

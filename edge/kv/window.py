"""A plain sliding window, without sinks: the control that must collapse (arXiv:2309.17453, figure 1b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edge.kv.policy import NOTHING, KVView, Needs
from edge.types import IntArray


@dataclass(frozen=True)
class Window:
    """Keeps the last `budget` rows."""

    name: ClassVar[str] = "window"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = True
    needs: ClassVar[Needs] = NOTHING

    def rows_to_keep(self, view: KVView, budget: int) -> IntArray:
        return np.arange(view.length - budget, view.length, dtype=np.int32)

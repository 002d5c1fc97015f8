"""No eviction: every row stays, and the session stops when the cache is full."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.kv.policy import NOTHING, KVView, Needs
from edge.records import dataclass
from edge.types import IntArray


@dataclass(frozen=True)
class Full:
    """Keeps all rows; `evicts` is False, so sessions never ask."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False
    close_gaps: ClassVar[bool] = False
    needs: ClassVar[Needs] = NOTHING

    def rows_to_keep(self, view: KVView, budget: int) -> IntArray:
        return np.arange(view.length, dtype=np.int32)

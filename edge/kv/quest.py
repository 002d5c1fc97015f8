"""Quest: all rows stay, and each step reads the pages of rows that its query may attend to most.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv:2406.10774. Each page of 16
rows stores the minimum and maximum of its keys in each dimension d. No key in the page scores higher than
Σ max(q_d · min_d, q_d · max_d); a KV head takes the maximum over its query heads, and reads the pages with the highest
bounds, the first page, and the newest ones. The first two layers and all prompts read every row: pages are chosen for
single tokens only. Once the cache holds more rows than a step reads, answers differ from those of `full`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.errors import InputError
from edge.kv.policy import KVView, Needs
from edge.records import dataclass
from edge.types import IntArray

PAGE = 16  # rows
_LEAST = 128  # rows: with fewer, the pages that every step reads leave no choice
_MOST = 1 << 30  # rows: beyond any cache


@dataclass(frozen=True)
class Quest:
    """Keeps all rows. rows: the most that a KV head reads for a token, in whole pages."""

    rows: int = 1024
    name: ClassVar[str] = "quest"
    evicts: ClassVar[bool] = False
    close_gaps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not _LEAST <= self.rows <= _MOST:
            raise InputError(f"KV policy quest: rows must be from {_LEAST} to {_MOST}, not {self.rows}")

    @property
    def needs(self) -> Needs:
        return Needs(reads=self.rows)

    def rows_to_keep(self, view: KVView, budget: int) -> IntArray:
        return np.arange(view.length, dtype=np.int32)

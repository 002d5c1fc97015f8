"""TOVA: evict the row with the least attention from the last query.

Oren et al., "Transformers are Multi-State RNNs", arXiv:2401.06104. Neither recent rows nor sinks are protected by rule:
a row that the newest token does not attend to is evicted. Ours evicts several rows at once, and per head rather than
per layer.
"""

from __future__ import annotations

from typing import ClassVar

from edge.kv.policy import KVView, Needs, Scored
from edge.records import dataclass
from edge.types import FloatArray


@dataclass(frozen=True)
class TOVA(Scored):
    name: ClassVar[str] = "tova"
    needs: ClassVar[Needs] = Needs(queries=1)

    def score(self, view: KVView) -> FloatArray:
        return view.attention

    def newest(self, budget: int) -> int:
        return 1  # no other query has looked at it

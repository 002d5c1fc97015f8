"""StreamingLLM: a few attention sinks and a sliding window.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453. Models pour surplus
attention into their first tokens. Keeping those (`sinks`, 4 in the paper) and the most recent rows, with positions
relative to the cache, keeps decoding stable for any length.
"""

from __future__ import annotations

from typing import ClassVar

from edge.kv.policy import NOTHING, KVView, Needs, check_options, first_and_last
from edge.records import dataclass
from edge.types import IntArray


@dataclass(frozen=True)
class StreamingLLM:
    """Keeps the first `sinks` rows and the last `budget − sinks`."""

    sinks: int = 4
    name: ClassVar[str] = "streaming"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = True
    needs: ClassVar[Needs] = NOTHING

    def __post_init__(self) -> None:
        check_options(self.sinks)

    def rows_to_keep(self, view: KVView, budget: int) -> IntArray:
        return first_and_last(view.length, budget, self.sinks)

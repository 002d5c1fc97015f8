"""A plain sliding window, without sinks: the control that must collapse (arXiv:2309.17453, figure 1b)."""

from __future__ import annotations

from typing import ClassVar

from edge.kv.streaming import StreamingLLM
from edge.records import dataclass


@dataclass(frozen=True)
class Window(StreamingLLM):
    """Keeps the last `budget` rows. sinks: rows that --keep pins; a plain window has none."""

    sinks: int = 0
    name: ClassVar[str] = "window"

"""What it costs to stream weights: time for every pass, as the pages of their file come and go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.devices.paging import paging_cost


@dataclass(frozen=True)
class Streaming:
    """bytes: read anew by every pass, that is for every token of an answer and every chunk of a prompt.

    seconds: what that adds to a pass while the file stays in the system's page cache, as measured here; None where
    nothing measures it. From a disk, it is at least bytes / its speed.
    """

    bytes: int
    seconds: float | None
    assumption: str = "the file stays in the page cache"


def streaming_cost(streamed: int, sample: Path) -> Streaming | None:
    """Of a plan's `bytes.streamed`; None if that is nothing. sample: a file like that of the weights, such as the
    model's own: 64 MiB of it are read."""
    if not streamed:
        return None
    cost = paging_cost(sample)
    return Streaming(streamed, None if cost is None else cost * streamed)

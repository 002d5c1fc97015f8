"""Memory that this process takes beyond what a run would: modules of other commands. Their plans leave it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edge.devices.memory import memory_use

_taken = [0]


@contextmanager
def beyond_a_run(*, anew: bool = False) -> Iterator[None]:
    """Count what the block takes; `anew`: and no longer what others took."""
    before = memory_use().rss
    yield
    _taken[0] = (0 if anew else _taken[0]) + max(0, memory_use().rss - before)


def bytes_beyond_a_run() -> int:
    """What has been counted so far."""
    return _taken[0]

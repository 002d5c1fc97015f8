"""Memory that this process takes beyond what a run would: modules of other commands. Their plans leave it out.

Commands alone state it, each in a process of its own: plans of Python's callers count all that their process holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edge.devices.memory import memory_use

_taken = [0]
_first: list[int] = []  # resident bytes of the first plan in the block of `beyond_the_first`; 0: there was none


@contextmanager
def beyond_a_run(*, anew: bool = False) -> Iterator[None]:
    """Count what the block takes; `anew`: and no longer what others took."""
    before = memory_use().rss
    yield
    _taken[0] = (0 if anew else _taken[0]) + max(0, memory_use().rss - before)


@contextmanager
def beyond_the_first() -> Iterator[None]:
    """Plan several runs in the block, each as the first of them: count what the process takes from there on."""
    _first[:] = [0]
    try:
        yield
    finally:
        _first.clear()


def bytes_beyond_a_run() -> int:
    """What has been counted so far."""
    if not _first:
        return _taken[0]
    now = memory_use().rss
    _first[0] = _first[0] or now
    return _taken[0] + max(0, now - _first[0])

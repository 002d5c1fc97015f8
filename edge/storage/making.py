"""What the first use of a model costs, once: entries of the cache folder that are made while it is opened and loaded.

`find_or_make` says when it makes one. An account adds up the seconds and joules of that time, so that they are not
taken from the budget of an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Made:
    """Seconds and joules that went by while entries were made, by any thread; time of several at once counts once."""

    seconds: float = 0.0
    joules: float = 0.0
    _read_joules: Callable[[], float] = lambda: 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _at_work: int = 0
    _since: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        with self._lock:
            if not self._at_work:
                self._since = time.perf_counter(), self._read_joules()
            self._at_work += 1

    def end(self) -> None:
        with self._lock:
            self._at_work -= 1
            if not self._at_work:
                self.seconds += time.perf_counter() - self._since[0]
                self.joules += self._read_joules() - self._since[1]


_ACCOUNT: ContextVar[Made | None] = ContextVar("account", default=None)


@contextmanager
def account(read_joules: Callable[[], float]) -> Iterator[Made]:
    """Count what is made within this block; within another such block, that one's account goes on."""
    if outer := _ACCOUNT.get():
        yield outer
        return
    made = Made(_read_joules=read_joules)
    token = _ACCOUNT.set(made)
    try:
        yield made
    finally:
        _ACCOUNT.reset(token)


@contextmanager
def making() -> Iterator[None]:
    """An entry is made within this block, or waited for."""
    made = _ACCOUNT.get()
    if made is None:
        yield
        return
    made.begin()
    try:
        yield
    finally:
        made.end()

"""Accounting of one-time preparation: cache entries that are made while a model is opened and loaded.

`find_or_make` reports when it makes one. An account adds up the seconds and joules of that time, so that they are not
charged to an answer's budget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field

from edge.records import dataclass


@dataclass
class Made:
    """Seconds and joules spent while any thread made entries; overlapping times count once."""

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
    """Account for the entries made within this block; a nested block shares the outer account."""
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
    """Mark a block that makes an entry, or waits for one."""
    made = _ACCOUNT.get()
    if made is None:
        yield
        return
    made.begin()
    try:
        yield
    finally:
        made.end()

"""A session's work in steps, each up to the next piece of text: between two of them, others may ask for something."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

Pieces = Generator[str, None, None]


class Steps:
    """trim: what is done for a level that was asked for. Never while a step runs, unless that calls `obey` itself."""

    def __init__(self, trim: Callable[[float], None]) -> None:
        self._trim = trim
        self._running = threading.Lock()
        self._asked: deque[float] = deque()

    def ask(self, level: float) -> None:
        """From any thread or signal handler: at once, or when the step that runs obeys or ends."""
        self._asked.append(level)
        self._obey_alone()

    def obey(self) -> None:
        """Do what was asked for; inside a step."""
        while self._asked:
            self._trim(self._asked.popleft())

    def through(self, pieces: Pieces) -> Pieces:
        """The same pieces, each made in a step."""
        try:
            while True:
                with self._step():
                    try:
                        piece = next(pieces)
                    except StopIteration:
                        return
                yield piece
        finally:
            alone = self._running.acquire(blocking=False)  # not if garbage is collected in the middle of another step
            pieces.close()
            if alone:
                self._running.release()
            self._obey_alone()

    @contextmanager
    def _step(self) -> Iterator[None]:
        with self._running:
            yield
        self._obey_alone()

    def _obey_alone(self) -> None:
        if self._asked and self._running.acquire(blocking=False):
            try:
                self.obey()
            finally:
                self._running.release()


class Stepping(Protocol):
    steps: Steps


_open: WeakSet[Pieces] = WeakSet()
_S = TypeVar("_S", bound=Stepping)
_P = ParamSpec("_P")


def stepwise(stream: Callable[Concatenate[_S, _P], Pieces]) -> Callable[Concatenate[_S, _P], Pieces]:
    """A method that makes pieces, each in a step of its object."""

    @wraps(stream)
    def in_steps(self: _S, /, *args: _P.args, **options: _P.kwargs) -> Pieces:
        pieces = self.steps.through(stream(self, *args, **options))
        _open.add(pieces)
        return pieces

    return in_steps


@atexit.register
def _close_all() -> None:
    """Of streams that a program has left open when it ends: later, their last work would find no modules."""
    for pieces in list(_open):
        with suppress(ValueError):  # another thread is in it
            pieces.close()

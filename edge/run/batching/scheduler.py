"""One generation at a time, in steps that each end with a piece of text.

Requests from other threads and signal handlers are carried out between two steps, and where a step calls `obey`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from edge.errors import BusyError

Pieces = Generator[str, None, None]


class Closable(Protocol):
    def close(self) -> None: ...


_ONE_AT_A_TIME = (
    "this session is generating, and runs one generation at a time: finish or close that stream first, or load another "
    "session"
)


class Scheduler:
    """Runs one generation at a time, step by step. trim: returns a share of memory; called between steps, and where a
    step calls `obey`."""

    def __init__(self, trim: Callable[[float], None]) -> None:
        self._trim = trim
        self._process = os.getpid()
        self._generation = threading.Lock()  # held from the first piece of a generation to its end
        self._running = threading.Lock()  # held while a step runs
        self._asked: deque[float] = deque()
        self._open: Closable | None = None  # the current generation or batch

    def ask(self, level: float) -> None:
        """Request a trim, from any thread or signal handler: done at once, or when the running step obeys or ends."""
        self._asked.append(level)
        self._obey_alone()

    def obey(self) -> None:
        """Carry out requests, inside a step."""
        while self._asked:
            self._trim(self._asked.popleft())

    def check_idle(self) -> None:
        """Raise BusyError during a generation, and in a forked child, where the engine's threads are missing."""
        if os.getpid() != self._process:
            raise BusyError(
                f"this session belongs to process {self._process}, and a forked child has none of its threads: "
                "load the model in the child"
            )
        if self.busy:
            raise BusyError(_ONE_AT_A_TIME)

    @property
    def busy(self) -> bool:
        """Whether a generation has begun that has not ended."""
        return self._generation.locked()

    def begin(self, generating: Closable) -> None:
        """Begin a generation in steps, which lasts until `leave`. Raises BusyError during another one."""
        self.check_idle()
        if not self._generation.acquire(blocking=False):
            raise BusyError(_ONE_AT_A_TIME)
        self._open = generating

    def leave(self) -> None:
        self._open = None
        self._generation.release()

    def __enter__(self) -> None:
        """Begin a step."""
        self._running.acquire()

    def __exit__(self, *_: object) -> None:
        self._running.release()
        self._obey_alone()

    @contextmanager
    def step_now(self) -> Iterator[bool]:
        """Begin a step if none runs. Yields whether it did."""
        free = self._running.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._running.release()

    def through(self, pieces: Pieces) -> Pieces:
        """The same pieces, each generated in a step. Raises BusyError if another generation has begun."""
        self.begin(pieces)
        try:
            while True:
                with self:
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            with self.step_now():  # not if garbage is collected in the middle of a trim
                pieces.close()
            self.leave()
            self._obey_alone()

    def end(self) -> None:
        """Close the open generation, if there is one. Raises BusyError while one of its steps runs."""
        if self._open is None:
            return
        with self.step_now() as free:
            if not free:
                raise BusyError("this session is generating in another thread or from a callback: let it end first")
            self._open.close()

    def _obey_alone(self) -> None:
        if self._asked:
            with self.step_now() as free:
                if free:
                    self.obey()


class Stepping(Protocol):
    steps: Scheduler


_open: WeakSet[Pieces] = WeakSet()
_S = TypeVar("_S", bound=Stepping)
_P = ParamSpec("_P")


def stepwise(stream: Callable[Concatenate[_S, _P], Pieces]) -> Callable[Concatenate[_S, _P], Pieces]:
    """Make a method that yields pieces yield each of them in a step. A call raises BusyError at once while another
    generation lasts."""

    @wraps(stream)
    def in_steps(self: _S, /, *args: _P.args, **options: _P.kwargs) -> Pieces:
        self.steps.check_idle()
        pieces = self.steps.through(stream(self, *args, **options))
        _open.add(pieces)
        return pieces

    return in_steps


@atexit.register
def _close_all() -> None:
    """Close streams that a program leaves open when it ends, while modules that they need are still loaded."""
    for pieces in list(_open):
        with suppress(ValueError):  # another thread runs it
            pieces.close()

"""Events of answers: a worker thread puts them into a `Flow`, a protocol takes them out."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from edge.records import dataclass
from edge.run.report import RunReport, TokenLogprob
from edge.server.refusal import RefusedError
from edge.tools.parser import Event as CallEvent
from edge.types import FloatArray

MOST_WAITING = 1 << 20  # characters that a client has not fetched, and
_EACH = 64  # more for each event


@dataclass(frozen=True)
class Piece:
    """Text of an answer, or of its thoughts."""

    choice: int
    text: str
    thought: bool = False


@dataclass(frozen=True)
class Likely:
    """A token of an answer, and how likely it was; its text follows."""

    choice: int
    token: TokenLogprob


@dataclass(frozen=True)
class Call:
    """A part of a tool's call: its beginning, a piece of its arguments, its end, or that it was cut."""

    choice: int
    event: CallEvent


@dataclass(frozen=True)
class Scored:
    """The tokens of a prompt, how likely each was, and the likeliest in its place; None for the first. The last of them
    are `generated`."""

    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[dict[int, float] | None, ...]
    generated: int = 0


@dataclass(frozen=True)
class Embedded:
    """The embedding of a text of `tokens` tokens, float32 [hidden]."""

    choice: int
    tokens: int
    values: FloatArray


@dataclass(frozen=True)
class Ended:
    """An answer is complete."""

    choice: int
    report: RunReport | None
    prefix: dict[str, Any] | None = None


Event = Piece | Likely | Call | Scored | Embedded | Ended


class Flow:
    """Events of one request, in order, from any thread to the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._events: deque[Event | Exception] = deque()
        self._waiting = 0  # characters
        self._ready = asyncio.Event()
        self.closed = False
        self._on_close: list[Callable[[], None]] = []

    def put(self, event: Event | Exception) -> None:
        """Pass on an event; an exception ends the request. A client that does not read what it asked for is given
        up."""
        size = _size(event)
        with self._lock:
            if self.closed:
                return
            if self._waiting + size > MOST_WAITING:
                event = RefusedError(503, "the client is too slow to read its answer")
            self._events.append(event)
            self._waiting += size
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the loop has ended
            self.closed = True

    async def get(self) -> Event:
        """The next event. Raises what was put in its place."""
        while True:
            with self._lock:
                event = self._next()
                if event is None:
                    self._ready.clear()
            if event is None:
                await self._ready.wait()
            elif isinstance(event, Exception):
                raise event
            else:
                return event

    def _next(self) -> Event | Exception | None:
        """The first event; pieces of one text together."""
        if not self._events:
            return None
        first = self._events.popleft()
        self._waiting -= _size(first)
        if not isinstance(first, Piece):
            return first
        texts = [first.text]
        while self._events and isinstance(more := self._events[0], Piece) and _continues(first, more):
            self._waiting -= _size(more)
            texts.append(more.text)
            self._events.popleft()
        return first if len(texts) == 1 else Piece(first.choice, "".join(texts), first.thought)

    def on_close(self, action: Callable[[], None]) -> None:
        """Carry this out when nothing more is wanted."""
        self._on_close.append(action)

    def close(self) -> None:
        """Nothing more is wanted: end what still runs."""
        with self._lock:
            self.closed = True
            self._events.clear()
        for action in self._on_close:
            action()
        self._on_close = []


def _size(event: Event | Exception) -> int:
    return _EACH + (len(event.text) if isinstance(event, Piece) else 0)


def _continues(first: Piece, more: Piece) -> bool:
    return (first.choice, first.thought) == (more.choice, more.thought)

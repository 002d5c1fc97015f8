"""Events of answers: a worker thread puts them into a `Flow`, a protocol takes them out."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

from edge.records import dataclass
from edge.run.report import RunReport, TokenLogprob
from edge.run.speech.segments import Segment
from edge.server.ledger import Claim
from edge.server.refusal import RefusedError
from edge.tools.parser import Event as CallEvent
from edge.types import FloatArray

MOST_WAITING = 1 << 20  # most characters that wait for a client; each event counts as
_EACH = 64  # characters more


@dataclass(frozen=True)
class Piece:
    """Text of an answer, or of its thoughts."""

    choice: int
    text: str
    thought: bool = False


@dataclass(frozen=True)
class Likely:
    """A token of an answer and its log-probability; the token's text follows."""

    choice: int
    token: TokenLogprob


@dataclass(frozen=True)
class Call:
    """A part of a tool call: its beginning, a piece of its arguments, its end, or its truncation."""

    choice: int
    event: CallEvent


@dataclass(frozen=True)
class Scored:
    """The tokens of a prompt, their log-probabilities, and the likeliest alternatives; None for the first token. The
    last `generated` tokens follow the prompt."""

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
class Ranked:
    """The relevance of a text, from 0 to 1. tokens: that ran, of all texts of a turn in the first."""

    choice: int
    tokens: int
    score: float


@dataclass(frozen=True)
class Said:
    """A segment of a transcript."""

    choice: int
    segment: Segment


@dataclass(frozen=True)
class Transcribed:
    """A transcript is complete. seconds: of the sound. cut: its file ends early."""

    choice: int
    language: str
    seconds: float
    joules: float
    cut: bool = False


@dataclass(frozen=True)
class Ended:
    """An answer is complete."""

    choice: int
    report: RunReport | None
    prefix: dict[str, Any] | None = None


Event = Piece | Likely | Call | Scored | Embedded | Ranked | Said | Transcribed | Ended


class Flow:
    """A queue of one request's events, from any thread to the event loop in which it was created."""

    def __init__(self, claim: Claim) -> None:
        """claim: of the request's memory."""
        self.claim = claim
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._events: deque[Event | Exception] = deque()
        self._waiting = 0  # characters
        self.prompt_tokens = 0  # of the request, once it has begun
        self._ready = asyncio.Event()
        self.closed = False

    def put(self, event: Event | Exception) -> None:
        """Queue an event, or an exception, which ends the request. A client that leaves more than MOST_WAITING unread
        is refused."""
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
        """The next event. Raises an exception that was queued in its place."""
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
        """Take the first event, with the pieces of the same text that follow it; None if there is none."""
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

    def close(self) -> None:
        """Drop waiting and later events."""
        with self._lock:
            self.closed = True
            self._events.clear()


def _size(event: Event | Exception) -> int:
    if isinstance(event, Piece):
        return _EACH + len(event.text)
    return _EACH * (3 + 3 * len(event.token.top) if isinstance(event, Likely) else 1)


def _continues(first: Piece, more: Piece) -> bool:
    return (first.choice, first.thought) == (more.choice, more.thought)

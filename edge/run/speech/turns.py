"""The queue of a session that hears, for a server's thread: in place of a `Batch`, whose generations it has none of."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from edge.errors import InputError, UnsupportedError
from edge.run.batching.slots import Prepare, Ticket, Work
from edge.run.hooks import Hooks
from edge.run.request import Request


class HearingTurns:
    """Work, one after the other, in the order of its arrival."""

    def __init__(self, name: str) -> None:
        self._name, self._queue, self._numbers = name, deque[Ticket](), itertools.count()
        self.closed = False
        self.running = 0

    @property
    def waiting(self) -> int:
        """The number of tickets in the queue."""
        return sum(not ticket.cancelled for ticket in list(self._queue))

    def queue(
        self, request: Request, hooks: Hooks, *, lora: Any = (), prepare: Prepare | None = None,
        work: Work | None = None,
    ) -> Ticket:  # fmt: skip
        """As `Batch.queue`, for work alone. Raises UnsupportedError for a prompt."""
        if self.closed:
            raise InputError("this batch is closed")
        if work is None:
            raise UnsupportedError(f"{self._name} hears, and answers no prompts: /v1/audio/transcriptions")
        ticket = Ticket(request, hooks, next(self._numbers), work)
        self._queue.append(ticket)
        return ticket

    def step(self) -> bool:
        """Run a turn of the first ticket's work. False: none is left."""
        while self._queue and self._queue[0].cancelled:
            self._queue.popleft()
        if not self._queue:
            return False
        ticket = self._queue[0]
        ticket.began, self.running = True, 1
        try:
            assert ticket.work is not None
            more = ticket.work()
        finally:
            self.running = 0
        if not more:
            self._queue.popleft()
        return True

    def close(self) -> None:
        self.closed = True
        self._queue.clear()

"""Drivers of a loaded model: they run the generations of several requests, step by step, in one thread."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Protocol

from edge.model.lora_file import Loras
from edge.run.batching.scheduler import Pieces
from edge.run.batching.slots import Ticket
from edge.run.hooks import Hooks
from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.session import Session


class Driver(Protocol):
    """Runs the generations of one loaded model. All methods belong to the thread that loaded it."""

    preempts: bool  # a generation of lower priority gives way
    adapts: bool  # generations may have different adapters; else all have the session's

    @property
    def free(self) -> int:
        """How many more generations may start now."""
        ...

    def start(self, request: Request, hooks: Hooks, lora: Loras) -> Any:
        """Begin a generation; returns its ticket. Rows of earlier prompts are reused within a tenant.

        Raises InputError and other EdgeErrors for requests that cannot run.
        """
        ...

    def cancel(self, ticket: Any) -> None:
        """End a generation; do nothing if it has ended."""
        ...

    def step(self) -> bool:
        """Run one pass. False: there was nothing to run."""
        ...

    def close(self) -> None:
        """Give the session back. Call it only while no generation runs."""
        ...


def make_driver(session: Session) -> Driver:
    """The driver for a session's engine."""
    return Batched(session) if session.plan.config.sequences > 1 else OneAtATime(session)


class Batched:
    """The driver of a session whose engine has several sequences."""

    preempts = adapts = True

    def __init__(self, session: Session) -> None:
        self._batch = session.batch()

    @property
    def free(self) -> int:
        return self._batch.free

    def start(self, request: Request, hooks: Hooks, lora: Loras) -> Ticket:
        return self._batch.start(request, hooks, lora=lora)

    def cancel(self, ticket: Ticket) -> None:
        self._batch.cancel(ticket)

    def step(self) -> bool:
        return self._batch.step()

    def close(self) -> None:
        self._batch.close()


class OneAtATime:
    """The driver of a session whose engine has one sequence."""

    preempts = adapts = False

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pieces: Pieces | None = None
        self._hooks: Hooks | None = None
        self._tenant: Hashable = ""  # of the session's rows

    @property
    def free(self) -> int:
        return int(self._pieces is None)

    def start(self, request: Request, hooks: Hooks, lora: Loras) -> object:
        if request.tenant != self._tenant:
            self._session.reset()
        self._hooks, self._tenant = hooks, request.tenant
        self._pieces = self._session.start(request, hooks)
        return self._pieces

    def cancel(self, ticket: object) -> None:
        if ticket is self._pieces:
            self._end(InterruptedError())

    def step(self) -> bool:
        pieces = self._pieces
        if pieces is None:
            return False
        before = self._session.report
        try:
            piece = next(pieces, None)
        except Exception as error:
            self._end(error)
        else:
            if piece is None:
                report = self._session.report
                assert report is not None
                assert report is not before
                self._end(report)
            else:
                assert self._hooks is not None
                assert self._hooks.piece is not None
                self._hooks.piece(piece)
        return True

    def close(self) -> None:
        pass

    def _end(self, result: RunReport | Exception) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            with suppress(Exception):  # it is given up
                pieces.close()
        hooks, self._hooks = self._hooks, None
        if hooks is not None and hooks.end is not None:
            hooks.end(result)

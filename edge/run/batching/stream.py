"""Answers of a batch as iterators, which any number of threads may read: one that waits for a piece drives all."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from edge.model.adapters.lora_file import Loras
from edge.run.batching.slots import Ticket
from edge.run.hooks import Hooks
from edge.run.report import RunReport
from edge.run.request import Request


class Driven(Protocol):
    """A `Batch`."""

    closed: bool
    driver: Driver

    def start(self, request: Request, hooks: Hooks, *, lora: str | Path | Loras | None = None) -> Ticket: ...
    def cancel(self, ticket: Ticket) -> None: ...


class Driver:
    """Lets one of several threads call `step` at a time."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step, self._waiting, self._is_driven = step, threading.Condition(), False

    def step_until(self, ready: Callable[[], bool]) -> None:
        """Drive, or wait for the driving thread, until `ready` returns True."""
        while True:
            with self._waiting:
                while not ready() and self._is_driven:
                    self._waiting.wait()
                if ready():
                    return
                self._is_driven = True
            try:
                self._step()
            finally:
                with self._waiting:
                    self._is_driven = False
                    self._waiting.notify_all()


class Stream:
    """An iterator over the pieces of an answer of a `Batch`; close it if the rest is not wanted."""

    def __init__(self, batch: Driven, request: Request, hooks: Hooks, lora: str | Path | Loras | None) -> None:
        """As `Batch.start`."""
        self._batch = batch
        self._pieces, self._result = pieces, result = deque[str](), list[RunReport | Exception]()
        hooks = replace(hooks, piece=pieces.append, end=result.append)
        self.ticket = batch.start(request, hooks, lora=lora)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        self._batch.driver.step_until(lambda: bool(self._pieces or self._result))
        if self._pieces:
            return self._pieces.popleft()
        error, self._result[0] = self._result[0], StopIteration()
        raise error if isinstance(error, Exception) else StopIteration

    @property
    def report(self) -> RunReport | None:
        """The report; None until the end, and for a generation that never began."""
        return self.ticket.report

    def close(self) -> None:
        """End the generation."""
        self._batch.cancel(self.ticket)

    def __del__(self) -> None:
        if hasattr(self, "ticket") and not self._batch.closed:
            self.close()

"""Drivers of a loaded model: they run the generations of several requests, step by step, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from edge.model.lora_file import Loras
from edge.records import dataclass
from edge.run.batching.scheduler import Pieces
from edge.run.batching.slots import Ticket
from edge.run.logprobs import OnLogprob
from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.sampling.tool_calls import OnCall
from edge.run.session import Session


@dataclass(frozen=True)
class Hooks:
    """A driver's callbacks for one generation: pieces of text and of thoughts, log-probabilities, parts of tool calls,
    and at the end the report or the error."""

    piece: Callable[[str], None]
    thought: Callable[[str], None]
    logprob: OnLogprob
    call: OnCall
    end: Callable[[RunReport | Exception], None]
    wanted: Callable[[], bool]  # whether a client still waits for the answer


class Driver(Protocol):
    """Runs the generations of one loaded model. All methods belong to the thread that loaded it."""

    preempts: bool  # a generation of lower priority gives way
    adapts: bool  # generations may have different adapters; else all have the session's

    @property
    def free(self) -> int:
        """How many more generations may start now."""
        ...

    def start(self, request: Request, hooks: Hooks, *, priority: int, tenant: str, lora: Loras) -> Any:
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

    def start(self, request: Request, hooks: Hooks, *, priority: int, tenant: str, lora: Loras) -> Ticket:
        return self._batch.start(
            request, priority=priority, tenant=tenant, lora=lora, on_piece=hooks.piece, on_thought=hooks.thought,
            on_logprob=hooks.logprob if request.logprobs is not None else None, on_call=hooks.call, on_end=hooks.end,
        )  # fmt: skip

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
        self._tenant = ""  # of the session's rows

    @property
    def free(self) -> int:
        return int(self._pieces is None)

    def start(self, request: Request, hooks: Hooks, *, priority: int, tenant: str, lora: Loras) -> object:
        if tenant != self._tenant:
            self._session.reset()
        self._hooks, self._tenant = hooks, tenant

        def after_pass(*_: int) -> None:
            if not hooks.wanted():
                self._session.interrupt()

        self._pieces = self._session.stream(
            request.prompt, max_tokens=request.max_tokens, sampling=request.sampling, stop=request.stop,
            ignore_eos=request.ignore_eos, system=request.system, think=request.think, time_limit=request.time,
            energy_limit=request.energy, time_spent=request.time_spent, keep_text=request.keep_text,
            grammar=request.grammar, logprobs=request.logprobs, on_thought=hooks.thought,
            on_call=hooks.call, on_prefill=after_pass,
            on_logprob=hooks.logprob if request.logprobs is not None else None,
        )  # fmt: skip
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
        if hooks is not None:
            hooks.end(result)

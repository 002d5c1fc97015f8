"""Drivers of a loaded model: they run the generations of several requests, step by step, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from edge.run.report import RunReport
from edge.run.request import Request
from edge.run.scheduler import Pieces
from edge.run.session import Session

OnPiece = Callable[[str], None]
OnEnd = Callable[[RunReport | Exception], None]


class Driver(Protocol):
    """Runs the generations of one loaded model. All methods belong to the thread that loaded it."""

    @property
    def free(self) -> int:
        """How many more generations may start now."""
        ...

    def start(self, request: Request, *, priority: int, on_piece: OnPiece, on_thought: OnPiece, on_end: OnEnd) -> Any:
        """Begin a generation; returns its ticket. Raises InputError and the like for what cannot run."""
        ...

    def cancel(self, ticket: Any) -> None:
        """End a generation; nothing if it has ended."""
        ...

    def step(self) -> bool:
        """One pass. False: nothing was left to do."""
        ...


class OneAtATime:
    """The driver of a session whose engine has one sequence."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pieces: Pieces | None = None
        self._on_piece: OnPiece = lambda text: None
        self._on_end: OnEnd = lambda result: None

    @property
    def free(self) -> int:
        return int(self._pieces is None)

    def start(
        self, request: Request, *, priority: int, on_piece: OnPiece, on_thought: OnPiece, on_end: OnEnd
    ) -> object:
        self._on_piece, self._on_end = on_piece, on_end
        self._pieces = self._session.stream(
            request.prompt, max_tokens=request.max_tokens, sampling=request.sampling, stop=request.stop,
            ignore_eos=request.ignore_eos, system=request.system, think=request.think, time_limit=request.time,
            energy_limit=request.energy, time_spent=request.time_spent, keep_text=request.keep_text,
            grammar=request.grammar, on_thought=on_thought,
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
                self._on_piece(piece)
        return True

    def _end(self, result: RunReport | Exception) -> None:
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            with suppress(Exception):  # it is given up
                pieces.close()
        self._on_end(result)

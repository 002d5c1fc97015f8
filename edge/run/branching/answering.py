"""Dispatches a request to its kind of answer in branches."""

from __future__ import annotations

from collections.abc import Generator

from edge.run.branching.outlining import outline
from edge.run.branching.several import Answering, Spent
from edge.run.branching.voting import vote
from edge.run.hooks import Hooks
from edge.run.request import Request


def answer(session: Answering, request: Request, hooks: Hooks) -> Generator[str, None, None]:
    """Yield the answer to a request with `vote` or `skeleton`, and set the session's report."""
    if not request.follow_up:
        session.reset()
    yield from (outline if request.skeleton else vote)(Spent(session, request), hooks)

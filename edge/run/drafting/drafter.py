"""The interface of what drafts an answer's next tokens. A new kind is a file, and a line in `opening.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from edge.backends.base import Engine
from edge.types import FloatArray, IntArray


class Drafter(Protocol):
    """Drafts tokens that may follow a text. Whatever it drafts, the answer stays the same.

    share: its bytes read for a token ÷ the model's, which estimates its time until it is measured. caught_up: tokens of
    the text that ran for the last draft.
    """

    share: float
    caught_up: int

    def bind(self, engine: Engine) -> None:
        """Draft for this engine from now on, which has just been loaded."""
        ...

    def release(self) -> None:
        """Release the engine, which will be closed. `bind` follows, or `close`."""
        return

    def reset(self) -> None:
        """The next tokens that the engine runs do not follow those before."""
        return

    def ran(self, tokens: IntArray) -> None:
        """The engine has run these tokens, int [n]."""
        return

    def drop(self, count: int) -> None:
        """The engine has dropped the last tokens that it had run."""
        return

    def follows(self, text: IntArray, given: int) -> bool:
        """Whether it can draft a continuation of the text, int32 [n], whose last `given` tokens have not been run."""
        return True

    def draft(self, text: IntArray, most: int) -> IntArray:
        """Draft at most `most` tokens that may follow the text, int32 [n]."""
        ...

    def close(self) -> None:
        """Free everything."""
        return


class States:
    """The newest tokens that an engine has run, and its states after them. A drafter reads and takes them away."""

    def __init__(self, most: int) -> None:
        self.waiting = deque[tuple[int, FloatArray]](maxlen=max(1, most))

    def add(self, read: Callable[[int], FloatArray], tokens: IntArray) -> bool:
        """Add the tokens that the engine has just run, as far as their states are there. read: returns those of the
        last tokens, at most as many as it is given. Returns whether none is missing between these and those before."""
        most = self.waiting.maxlen or 1
        states = read(min(tokens.size, most))
        whole = len(states) == tokens.size
        if not whole:
            self.waiting.clear()
        whole = whole and len(self.waiting) + tokens.size <= most
        rows = (row.copy() for row in states)  # a view would keep the whole array alive
        self.waiting.extend(zip(tokens[-len(states) :].tolist(), rows, strict=True))
        return whole

    def drop(self, count: int) -> bool:
        """Drop the last tokens. Returns whether these were here."""
        here = count <= len(self.waiting)
        for _ in range(min(count, len(self.waiting))):
            self.waiting.pop()
        return here

    def lead_to(self, text: IntArray, given: int) -> bool:
        """Whether only the last token of the text has no state."""
        return given == 1 and bool(self.waiting) and text.size > 1 and self.waiting[-1][0] == text[-2]

"""A scanner of text that arrives one character at a time, with one character of lookahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable

from edge.tools.marks import overlap

LONGEST_NAME = 128
BLANKS = " \t\r\n"

Chars = Generator[None, str, None]


class OtherFormError(Exception):
    """The text does not have the expected form."""


class Scanner:
    """Methods are generators that wait for the next character. Raises OtherFormError where the text does not match.

    next: the lookahead, a character that was read and not taken; "" at the end. raw: collects the characters taken,
    unless None.
    """

    def __init__(self) -> None:
        self.next = ""
        self.raw: list[str] | None = None
        self._again: deque[str] = deque()  # characters that are read again

    def take(self) -> Chars:
        if self.raw is not None:
            self.raw.append(self.next)
        self.next = yield from self.char()

    def char(self) -> Generator[None, str, str]:
        return self._again.popleft() if self._again else (yield)

    def give_back(self, chars: Iterable[str]) -> None:
        """Read these characters again, before the next one."""
        self._again.extendleft(reversed([*chars, self.next]))
        self.next = self._again.popleft()

    def expect(self, text: str) -> Chars:
        for char in text:
            if self.next != char:
                raise OtherFormError
            yield from self.take()

    def skip_blanks(self) -> Chars:
        while self.next and self.next in BLANKS:
            yield from self.take()

    def until(self, mark: str) -> Generator[None, str, str]:
        """Read a name up to the character `mark`, and take the mark, too."""
        name = ""
        while self.next != mark:
            name += self.next
            if not self.next or len(name) > LONGEST_NAME or self.next in "\n\"'{}()<>[],":
                raise OtherFormError
            yield from self.take()
        yield from self.take()
        return name

    def text_until(self, mark: str, give: Callable[[str], None]) -> Chars:
        """Pass on text up to a mark, and take the mark; a line break at the mark's beginning may be missing."""
        marks = [mark, mark[1:]] if mark[0] == "\n" else [mark]
        held = ""
        while True:
            if not self.next:
                raise OtherFormError
            held += self.next
            if found := next((each for each in marks if held.endswith(each)), None):
                if text := held[: -len(found)]:
                    give(text)
                yield from self.take()
                return
            keep = max(overlap(held, each) for each in marks)
            if len(held) > keep:
                give(held[: len(held) - keep])
                held = held[len(held) - keep :]
            yield from self.take()

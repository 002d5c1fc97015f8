"""A prompt tokenized while it runs, so that memory holds a bounded part of it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from edge.records import dataclass
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.model.parts.given import GivenRows
    from edge.tools.use import ToolUse


@dataclass(frozen=True)
class Looks:
    """Pictures and sounds that were encoded, the rows of them, and the seconds that took."""

    pictures: int = 0
    tokens: int = 0
    seconds: float = 0.0
    sounds: int = 0

    def __add__(self, other: Looks) -> Looks:
        return Looks(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def since(self, before: Looks) -> Looks:
        """What came after these."""
        return self + Looks(*(-each for each in astuple(before)))


class Prompt:
    """Token ids, int32, from blocks that are read on demand.

    taken: number of tokens that have been run. waiting: number of tokens that were read but not run. ended: all blocks
    have been read. thinks: whether the answer begins with thoughts; None for prompts without a chat template, in which
    marks of thoughts mean nothing. tools: those that the answer may call. whole: this is a whole conversation, so a
    session keeps its cached rows of the same beginning. given: the rows of ids beyond the vocabulary. Reading a block
    may raise the errors of its source, such as InputError for an unreadable file.
    """

    def __init__(
        self,
        blocks: Iterable[IntArray],
        thinks: bool | None = None,
        tools: ToolUse | None = None,
        *,
        ends: Sequence[int] = (),
        whole: bool = False,
        given: GivenRows | None = None,
    ) -> None:
        self.given = given
        self.looks: Looks | None = None  # of media that were encoded to make it
        self.thinks, self.tools, self.whole = thinks, tools, whole
        self._ends, self._before = ends, 0
        self._blocks: Iterator[IntArray] = iter(blocks)
        self._read: deque[IntArray] = deque()
        self.taken, self.waiting, self.ended = 0, 0, False

    @property
    def ends(self) -> list[int]:
        """The numbers of tokens up to the ends of a conversation's messages, as far as they have been read."""
        return [self._before + end for end in self._ends]

    def begin_with(self, tokens: IntArray) -> None:
        """Put tokens before the others, none of which has been run; does nothing if that was done."""
        if not self._before:
            self._read.appendleft(tokens)
            self._before, self.waiting = tokens.size, self.waiting + tokens.size

    @property
    def known(self) -> int:
        """The number of tokens read so far: the prompt's length once it has `ended`."""
        return self.taken + self.waiting

    @property
    def size(self) -> str:
        """The number of tokens as text: `636`, or `more than 8192` before its end has been read."""
        return f"{self.known}" if self.ended else f"more than {self.known}"

    @property
    def empty(self) -> bool:
        """Whether no token waits, apart from those of `begin_with`."""
        return not self.waiting or self.known == self._before

    def read(self) -> bool:
        """Read one more block of at most a few thousand tokens; False if there is none."""
        block = next(self._blocks, None)
        if block is None:
            self.ended = True
            return False
        if block.size:
            self._read.append(block)
            self.waiting += block.size
        return True

    def peek(self, count: int) -> IntArray:
        """At most `count` waiting tokens, from the first."""
        parts, missing = [], count
        for block in self._read:
            parts.append(block[:missing])
            missing -= parts[-1].size
            if not missing:
                break
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def advance(self, count: int) -> None:
        """Mark the first `count` waiting tokens as run."""
        self.taken, self.waiting = self.taken + count, self.waiting - count
        while count:
            block = self._read.popleft()
            if block.size > count:
                self._read.appendleft(block[count:])
            count -= min(count, block.size)

    def first(self, count: int | None) -> IntArray:
        """The first `count` tokens (None: all), int32 [n], without reading more text than they need."""
        while (count is None or self.waiting < count) and self.read():
            pass
        return joined(self._read)[:count]

    def rest(self) -> Iterator[IntArray]:
        """Take over all tokens that have not been run; this prompt is then empty."""
        waiting, self._read, self.waiting = self._read, deque(), 0
        blocks, self._blocks = self._blocks, iter(())
        return chain(waiting, blocks)


def joined(blocks: Iterable[IntArray]) -> IntArray:
    """Concatenate blocks, int32 [n], without keeping them beside the result."""
    tokens = array("i")
    for block in blocks:
        tokens.frombytes(block.tobytes())
    return np.frombuffer(tokens, np.int32) if tokens else np.zeros(0, np.int32)

"""A prompt as token ids that are made while it runs: however long it is, a bounded part of it is in memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from edge.types import IntArray


class Prompt:
    """Token ids, int32, from blocks that are read when they are needed.

    taken: tokens that have been run. waiting: tokens that have been read and not been run. ended: all have been read.
    Reading a block raises what its maker raises: InputError for a file that cannot be read or is empty, say.
    """

    def __init__(self, blocks: Iterable[IntArray]) -> None:
        self._blocks: Iterator[IntArray] = iter(blocks)
        self._read: deque[IntArray] = deque()
        self.taken, self.waiting, self.ended = 0, 0, False

    @property
    def known(self) -> int:
        """Tokens that have been read: all of the prompt's once it has `ended`, else fewer than it has."""
        return self.taken + self.waiting

    @property
    def size(self) -> str:
        """How many tokens it has, for people: `636`, or `more than 8192` while it has not been read to its end."""
        return f"{self.known}" if self.ended else f"more than {self.known}"

    def read(self) -> bool:
        """Read one more block of a few thousand tokens at most; False if there is none."""
        block = next(self._blocks, None)
        if block is None:
            self.ended = True
            return False
        if block.size:
            self._read.append(block)
            self.waiting += block.size
        return True

    def peek(self, count: int) -> IntArray:
        """The first `count` of the tokens that wait, or all if they are fewer."""
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
        """The first `count` of the tokens that wait have been run."""
        self.taken, self.waiting = self.taken + count, self.waiting - count
        while count:
            block = self._read.popleft()
            if block.size > count:
                self._read.appendleft(block[count:])
            count -= min(count, block.size)

    def first(self, count: int | None) -> IntArray:
        """The first `count` tokens (None: all), int32 [n], reading no more than they take."""
        while (count is None or self.waiting < count) and self.read():
            pass
        return joined(self._read)[:count]

    def rest(self) -> Iterator[IntArray]:
        """All tokens that have not been run, which this prompt then no longer has."""
        waiting, self._read, self.waiting = self._read, deque(), 0
        blocks, self._blocks = self._blocks, iter(())
        return chain(waiting, blocks)


def joined(blocks: Iterable[IntArray]) -> IntArray:
    """All tokens of the blocks in one array, int32 [n]; the blocks are not kept beside it."""
    tokens = array("i")
    for block in blocks:
        tokens.frombytes(block.tobytes())
    return np.frombuffer(tokens, np.int32) if tokens else np.zeros(0, np.int32)

"""A KV cache in which a row can be told from any other: it holds a checksum of all tokens up to its own.

That is what matters of a real cache for those who only move rows: a row depends on its whole prefix.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from edge.backends.checks import check_range, check_state
from edge.backends.kv_cache import CapacityError, KVState
from edge.errors import InputError
from edge.types import AnyArray, IntArray

WIDTH = 20  # 64-bit words in a row


def rows_for(tokens: IntArray) -> AnyArray:
    """[n, WIDTH]."""
    sums, rows = 0, []
    for token in tokens.tolist():
        sums = zlib.crc32(int(token).to_bytes(4, "little"), sums)
        rows.append(sums)
    return np.array(rows, np.uint64)[:, None] * np.arange(1, WIDTH + 1, dtype=np.uint64)


def tokens_of(*parts: tuple[int, int]) -> IntArray:
    """`count` times the token `value`, for each (value, count)."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts] or [np.zeros(0, np.int32)])


class PrefixRows:
    """KVCache protocol, as far as a prompt cache uses it."""

    nbytes = 0
    has_tail = False
    earliest = fixed = 0

    def __init__(self, key: str = "model", capacity: int = 1 << 20) -> None:
        self.key, self.capacity = key, capacity
        self.rows: AnyArray = np.zeros((0, WIDTH), np.uint64)
        self.saved = 0  # rows

    @property
    def length(self) -> int:
        return len(self.rows)

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        return np.arange(self.length, dtype=np.int32)

    def run(self, tokens: IntArray) -> None:
        """All of a prompt, whose first rows may be there."""
        if tokens.size > self.capacity:
            raise CapacityError("too many")
        self.rows = np.concatenate([self.rows, rows_for(tokens)[self.length :]])

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self.rows = self.rows[rows]

    def truncate(self, length: int, end: KVState | None = None) -> None:
        self.rows = self.rows[:length]

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        last = check_range(first, last, self.length)
        self.saved += last - first
        return KVState(self.key, self.positions[first:last], last, self.rows[first:last].tobytes())

    def append(self, state: KVState) -> None:
        check_state(state, self, self.length)
        if len(state.data) != state.positions.size * WIDTH * 8:
            raise InputError("the saved KV rows are damaged")
        rows = np.frombuffer(state.data, np.uint64).reshape(-1, WIDTH)
        self.rows = np.concatenate([self.rows, rows])


def longest_common_prefix(tokens: IntArray, others: Sequence[IntArray]) -> int:
    """With any of the others."""
    best = 0
    for other in others:
        count = min(tokens.size, other.size)
        same = tokens[:count] == other[:count]
        best = max(best, count if same.all() else int(np.argmin(same)))
    return best

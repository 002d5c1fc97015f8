"""RowStore: the protocol of an engine's memory of keys and values, as the bookkeeping of its KV cache uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from edge.backends.row_lists import RowLists
from edge.model.cores import RowShape
from edge.types import AnyArray, FloatArray, IntArray


class RowStore(Protocol):
    """Keys, values and attention of all heads of some layers. Rows are physical ones, counted from 0 in each head."""

    capacity: int  # rows per head, on average where heads differ
    row_bytes: int  # of a saved row, all heads
    row: RowShape  # of a layer, with the padding that the memory has
    observes: bool  # there is room for attention
    level: bool  # all heads must keep the same number of rows
    lengths: IntArray  # rows in use, int32 [heads]; written by the cache

    @property
    def nbytes(self) -> int: ...

    @property
    def longest(self) -> int:
        """The most rows that one head may hold."""
        ...

    @property
    def limits(self) -> IntArray:
        """The rows that each head has room for, [heads]."""
        ...

    def prepare(self, count: int, position: int) -> None:
        """Announce `count` rows, written after those in use; the first has this position."""
        ...

    def move(self, moves: Sequence[AnyArray]) -> None:
        """Copy rows by pairs (from, to), int32 [n, 2]: for each head, or the same for all."""
        ...

    def share_out(self) -> None:
        """Divide the free rows equally among heads that now keep different numbers."""
        ...

    def place(self, lists: RowLists) -> None:
        """Update physical rows and positions from `lists`, for sliding windows."""
        ...

    def clear(self) -> None:
        """Mark all rows unused."""
        ...

    def shrink(self, capacity: int) -> None:
        """Reduce the capacity and return the freed pages to the system."""
        ...

    def keys(self, rows: AnyArray, head: int | None = None) -> FloatArray:
        """A copy of keys: of one head float32 [n, key], or of all [heads, n, key]."""
        ...

    def value_norms(self, rows: AnyArray, head: int) -> FloatArray:
        """Norms of a head's values that have memory of their own, float32 [n]."""
        ...

    def set_keys(self, rows: AnyArray, keys: FloatArray, head: int | None = None) -> None: ...

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        """Yield the bytes of the same rows of all heads."""
        ...

    def restore(self, first: int, count: int, saved: memoryview) -> None:
        """Write saved rows after the `first` ones, without attention."""
        ...

    def attention(self, rows: AnyArray) -> FloatArray:
        """Attention received by rows [heads, n], or [1, n] for all heads alike: float32 [heads, n]."""
        ...

    def scale_attention(self, head: int, rows: AnyArray, by: FloatArray) -> None: ...

    def clear_attention(self) -> None: ...


Store = TypeVar("Store", bound=RowStore)

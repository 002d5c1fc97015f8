"""Where an engine holds keys and values: what the bookkeeping of its KV cache asks of that memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from edge.backends.row_lists import RowLists
from edge.types import AnyArray, FloatArray, IntArray


class RowStore(Protocol):
    """Keys, values and attention of all heads of some layers. Rows are physical ones, counted from 0 in each head.

    capacity: rows per head, on average where heads differ. nbytes: allocated. row_bytes: of a saved row, all heads.
    head: values of a key. observes: there is room for attention. level: all heads must keep equally many rows.
    lengths: rows in use, int32 [heads]; the cache writes it.
    """

    capacity: int
    row_bytes: int
    head: int
    observes: bool
    level: bool
    lengths: IntArray

    @property
    def nbytes(self) -> int: ...

    @property
    def longest(self) -> int:
        """Rows that one head may hold."""
        ...

    @property
    def limits(self) -> IntArray:
        """Rows that each head has room for, [heads]."""
        ...

    def prepare(self, count: int, position: int) -> None:
        """`count` rows are about to be written behind those in use; the first has this position."""
        ...

    def move(self, moves: Sequence[AnyArray]) -> None:
        """Copy rows, pairs (from, to) int32 [n, 2]: for each head, or the same for all."""
        ...

    def share_out(self) -> None:
        """Heads now keep different numbers of rows: give all equally many free ones."""
        ...

    def place(self, lists: RowLists) -> None:
        """Note the physical rows and positions in `lists`, for sliding windows."""
        ...

    def clear(self) -> None:
        """No rows are in use."""
        ...

    def shrink(self, capacity: int) -> None:
        """Return the memory of all rows beyond `capacity`."""
        ...

    def keys(self, rows: AnyArray, head: int | None = None) -> FloatArray:
        """A copy: of one head float32 [n, head], or of all [heads, n, head]."""
        ...

    def set_keys(self, rows: AnyArray, keys: FloatArray, head: int | None = None) -> None: ...

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        """The same rows of all heads."""
        ...

    def restore(self, first: int, count: int, saved: memoryview) -> None:
        """Put saved rows behind the `first` ones, without attention."""
        ...

    def attention(self, rows: AnyArray) -> FloatArray:
        """Of rows [heads, n], or [1, n] for all heads the same: float32 [heads, n]."""
        ...

    def scale_attention(self, head: int, rows: AnyArray, by: FloatArray) -> None: ...

    def clear_attention(self) -> None: ...


Store = TypeVar("Store", bound=RowStore)

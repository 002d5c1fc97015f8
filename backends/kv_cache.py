"""The KV cache of an engine: its protocol, and saved rows.

Two counters are distinct: the *row* that a token has in the cache, and the *position* that it has for RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edge.backends.importance import RowImportance
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class KVState:
    """Saved rows, in order of their positions, which a picture's rows may share. They fit caches of any capacity with
    the same `KVCache.key`.

    tail: data besides these rows that the next token needs and that hold only directly after the last of them: the
    newest rows of layers with sliding windows, or a recurrent state. None if the engine has none (`KVCache.has_tail`),
    or if the rows end before those of the cache did: then a state with a tail must follow before tokens can run. A
    state without rows, `save(kv.length)`, holds only the tail by which `truncate` returns there.
    """

    key: str
    positions: IntArray  # [rows], in row order
    next_position: int
    data: bytes | memoryview  # in the engine's format; its length follows from the number of rows
    tail: bytes | memoryview | None = None


class KVCache(Protocol):
    """The rows that an engine keeps: `length` of `capacity` are in use; `nbytes` is allocated.

    Layers with sliding windows may keep the rows of the newest tokens, whatever the policy; rows here are then those of
    the other layers.

    capacity: rows per head; on average, where heads keep different numbers of rows. has_tail: see `KVState.tail`.
    key: identifies everything that rows depend on: engine, weights, dtype, and settings that change values or layout.
    """

    capacity: int
    has_tail: bool

    @property
    def next_position(self) -> int:
        """The position of the next token."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def fixed(self) -> int:
        """The part of `nbytes` that does not depend on the capacity: rows of sliding windows, a recurrent state."""
        ...

    @property
    def key(self) -> str: ...

    @property
    def length(self) -> int:
        """Rows in use; where heads differ, the longest head's."""
        ...

    @property
    def free(self) -> int:
        """Rows that every head still has room for."""
        ...

    @property
    def positions(self) -> IntArray:
        """Position of every row in use, int32 [length], in row order."""
        ...

    @property
    def earliest(self) -> int:
        """The fewest rows, besides 0, that `truncate` can leave without a saved end; 0 if it can leave any number.

        More than `length` while the tail of appended rows is missing.
        """
        ...

    @property
    def foresight(self) -> int:
        """The number of coming tokens that `announce` must know of to choose RoPE's factors; 0 once they are chosen, or
        if the model has no choice."""
        ...

    def announce(self, count: int) -> None:
        """Announce `count` tokens. Past LongRoPE's original context, switch factors and rotate cached keys (see
        rope.py)."""
        ...

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        """Evict all rows except `rows` (strictly increasing, int [n]), in place.

        close_gaps: renumber the kept rows to positions 0…n-1 (StreamingLLM); otherwise they keep their distances, and
        new tokens their own positions. Raises InputError if a row is out of range or repeated, UnsupportedError where
        an engine cannot leave a gap behind its newest row.
        """
        ...

    def truncate(self, length: int, end: KVState | None = None) -> None:
        """Drop all rows from `length` on, so that the next one follows directly; 0 empties the cache. If no row is
        dropped, a gap behind the newest row stays.

        end: the result of `save(length)` when the cache had these `length` rows.
        Raises RewindError, and changes nothing, for fewer rows than `earliest` without `end`.
        """
        ...

    def shrink(self, capacity: int) -> None:
        """Reduce the capacity and return the freed pages to the system, as far as the engine can; see `nbytes`.

        Rows in use stay as they are; a larger capacity changes nothing. Raises InputError if more rows are in use.
        """
        ...

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        """Copy the rows first … last − 1 (None: to the end).

        Raises InputError if there are no such rows, UnsupportedError where heads keep different rows.
        """
        ...

    def append(self, state: KVState) -> None:
        """Append saved rows to those in use, as though their tokens had just been run, without attention. `truncate(0)`
        and `append` restore a whole saved cache.

        Raises InputError, and changes nothing, if they belong to another `key` or do not follow the rows in use;
        CapacityError if there are more than free ones.
        """
        ...


class HeadKVCache(KVCache, Protocol):
    """A cache whose heads policies can inspect. Arrays are [layers, KV heads, …], with 0 after a head's last row.

    An engine of token granularity shows one layer with one head: the mean over all.
    """

    @property
    def head_lengths(self) -> IntArray:
        """Rows in use, int32 [layers, KV heads]."""
        ...

    @property
    def ages(self) -> IntArray:
        """Tokens since each row's arrival, int32 [layers, KV heads, length]: 1 for the newest."""
        ...

    @property
    def attention(self) -> FloatArray:
        """The attention that observed queries paid to each row since `clear_attention`, float32 [layers, KV heads,
        length]."""
        ...

    def keys(self, layer: int) -> FloatArray:
        """A layer's stored keys, float32 [KV heads, length, key]."""
        ...

    def importance(self, layer: int, learned: RowImportance) -> FloatArray:
        """The predicted importance of a layer's rows, float32 [KV heads, length]."""
        ...

    @property
    def longest(self) -> int:
        """The most rows that one head may hold: more than `capacity` where heads keep different numbers."""
        ...

    def clear_attention(self) -> None: ...

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """Like `keep`, with rows for every KV head of every layer (layer by layer); their positions stay.

        Where the engine's `uneven` allows, heads keep different numbers of rows, at most `capacity` on average, and the
        free rows are divided equally.
        """
        ...

    def renumber(self) -> None:
        """Close all gaps: each head's rows get consecutive positions, which end alike in all heads.

        Rows become younger; their attention is scaled by the same factor, so that attention per query stays.
        """
        ...


class RewindError(EngineError):
    """The cache cannot return that far without its tail: run the tokens again."""


class CapacityError(EngineError):
    """More tokens than free rows: make room with `kv.keep` first."""


def end_of(kv: KVCache) -> KVState | None:
    """The saved end by which `truncate` can return here from any later row; None if the cache has no tail."""
    return kv.save(kv.length) if kv.has_tail else None


def position_behind(positions: IntArray, count: int) -> int:
    """The position behind the first `count` of more rows. Within a picture, whose rows share positions, it is that
    behind the newest."""
    return max(int(positions[count]), int(positions[count - 1]) + 1 if count else 0)


def state_key(backend: str, file: GGUFFile, spec: ModelSpec, kv_dtype: str) -> str:
    """The key of saved rows: engine, model (by its whole file), and dtype; not the capacity.

    Reads the file unless its hash is known.
    """
    shape = (spec.name, spec.layers, spec.hidden, spec.kv_heads, spec.head_dim, spec.vocab, spec.weight_bytes)
    return repr((backend, shape, kv_dtype, fingerprint(file.path).sha256))

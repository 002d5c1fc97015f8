"""The KV cache of an engine: what it remembers, what can be done with its rows, and what is saved of them.

Two counters are never one: the *row* a token has in the cache, and the *position* it has for RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class KVState:
    """Saved rows, one behind the other. They fit a cache of any capacity whose `KVCache.key` is the same.

    tail: what the next token needs besides these rows, and what holds only directly behind the last of them: the newest
    rows of layers with sliding windows, or a recurrent state. None if the engine has no such thing
    (`KVCache.has_tail`), or if the rows end before those of the cache did: then a state with a tail must follow before
    tokens can run. A state without rows, `save(kv.length)`, is the place to which `truncate` returns by its tail.
    """

    key: str
    positions: IntArray  # [rows], in row order
    next_position: int
    data: bytes | memoryview  # as the engine likes it; its length follows from the number of rows
    tail: bytes | memoryview | None = None


class KVCache(Protocol):
    """The rows that an engine remembers: `length` of `capacity` are in use; `nbytes` is what is allocated.

    Layers with sliding windows may keep the rows of the newest tokens, whatever the policy: the rows here, and all that
    is said of them, are then those of the other layers.

    capacity: rows per head; on average, where heads keep different numbers of rows. has_tail: see `KVState.tail`.
    key: names all that rows depend on: engine, weights, dtype, and what else changes their numbers or their layout.
    """

    capacity: int
    has_tail: bool

    @property
    def nbytes(self) -> int: ...

    @property
    def fixed(self) -> int:
        """Of `nbytes`, what does not depend on the capacity: the rows of sliding windows, a recurrent state."""
        ...

    @property
    def key(self) -> str: ...

    @property
    def length(self) -> int:
        """Rows in use; of the head that keeps most, where heads differ."""
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
        """The fewest rows, but for 0, that `truncate` can leave without a saved end; 0 if it can leave any number.
        More than `length` while the tail of appended rows is missing."""
        ...

    @property
    def foresight(self) -> int:
        """How many of the tokens to come `expect` has to count, if there are so many, to decide for all of them; 0 once
        it has, or where nothing depends on it."""
        ...

    def expect(self, count: int) -> None:
        """So many tokens are about to be run, in one pass or in several: where a model rotates long texts otherwise
        than short ones, this decides (see rope.py), and rows in use are rotated anew if need be."""
        ...

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        """Evict all rows but `rows` (strictly increasing, int [n]), in place.

        close_gaps: the kept rows get the positions 0…n-1, as though the evicted ones had never been
        (StreamingLLM); otherwise they keep their distances, and new tokens their own positions.
        Raises InputError if a row is out of range or repeated, UnsupportedError where an engine cannot leave a gap
        behind its newest row.
        """
        ...

    def truncate(self, length: int, end: KVState | None = None) -> None:
        """Forget all rows from `length` on: the next one comes right behind those left. 0 empties the cache; where
        nothing is forgotten, nothing changes, a gap behind the newest row neither.

        end: what was saved, `save(length)`, when the cache had these `length` rows.
        Raises RewindError, and changes nothing, for fewer rows than `earliest` without `end`.
        """
        ...

    def shrink(self, capacity: int) -> None:
        """Have room for so many rows from here on, and give the memory of the others back to the system, as far as
        the engine can: `nbytes` says what is left. Rows in use stay as they are; more than `capacity` changes nothing.

        Raises InputError if more rows are in use.
        """
        ...

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        """A copy of the rows first … last − 1 (None: of all from `first` on); nothing changes.

        Raises InputError if there are no such rows, UnsupportedError where heads keep different rows.
        """
        ...

    def append(self, state: KVState) -> None:
        """Put saved rows behind those in use, as though their tokens had just been run. (All of a saved cache comes
        back by `truncate(0)` and `append`.) They have no attention yet.

        Raises InputError, and changes nothing, if they belong to another `key` or do not come after the rows in use;
        CapacityError if there are more than free ones.
        """
        ...


class HeadKVCache(KVCache, Protocol):
    """A cache that policies may look into. Arrays are [layers, KV heads, …], with 0 behind a head's last row.

    An engine of token granularity shows one layer with one head: the mean over all.
    """

    @property
    def head_lengths(self) -> IntArray:
        """Rows in use, int32 [layers, KV heads]."""
        ...

    @property
    def ages(self) -> IntArray:
        """Tokens since each row came, int32 [layers, KV heads, length]: 1 for the newest."""
        ...

    @property
    def attention(self) -> FloatArray:
        """What observed queries paid to each row since `clear_attention`, float32 [layers, KV heads, length]."""
        ...

    def keys(self, layer: int) -> FloatArray:
        """A layer's, as they are stored, float32 [KV heads, length, head]."""
        ...

    @property
    def longest(self) -> int:
        """Rows that one head may hold: more than `capacity` where heads keep different numbers."""
        ...

    def clear_attention(self) -> None: ...

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        """As `keep`, with rows for every KV head of every layer (layer by layer); their positions stay.

        Where the engine's `uneven` allows, heads keep different numbers of rows, at most `capacity` on average, and
        what is left of the cache is shared out so that all have equally many free rows.
        """
        ...

    @property
    def next_position(self) -> int: ...

    def renumber(self) -> None:
        """Close all gaps: each head's rows get consecutive positions, the newest of all heads the same.

        Rows become younger; their attention shrinks likewise, so that it stays what it was per query.
        """
        ...


class RewindError(EngineError):
    """The tail of a cache cannot go back that far: run the tokens again."""


class CapacityError(EngineError):
    """More tokens than free rows: make room with `kv.keep` first."""


def end_of(kv: KVCache) -> KVState | None:
    """What `truncate` needs to come back to here from far behind, if anything."""
    return kv.save(kv.length) if kv.has_tail else None


def state_key(backend: str, file: GGUFFile, spec: ModelSpec, kv_dtype: str) -> str:
    """What saved rows depend on: engine, model, by all of its file, and type; not the capacity.

    The file is read if nobody has read it yet.
    """
    shape = (spec.name, spec.layers, spec.hidden, spec.kv_heads, spec.head_dim, spec.vocab, spec.weight_bytes)
    return repr((backend, shape, kv_dtype, fingerprint(file.path).sha256))

"""Rows that stand in a sequence in place of tokens: a soft prompt, later a picture or a sound.

Each row has an id beyond the vocabulary, derived from a hash of the whole content that it belongs to: caches, drafts
and histories compare such ids as they compare tokens. An engine takes the row of an id of the vocabulary from its
embedding table, of others from the `GivenRows` that its caller passes along.
"""

from __future__ import annotations

import hashlib

import numpy as np

from edge.errors import InputError
from edge.types import FloatArray, IntArray

_END = 2**31 - 1  # ids are int32


class GivenRows:
    """A table of rows, float32 [hidden], by their ids, which begin at `vocab`."""

    def __init__(self, vocab: int, hidden: int) -> None:
        self._vocab, self._hidden = vocab, hidden
        self._rows = dict[int, FloatArray]()

    def add(self, rows: FloatArray) -> IntArray:
        """Add the rows of one content, float32 [n, hidden], in place of embeddings (scaled, where the model scales
        them). Returns their ids, int32 [n]. Raises InputError."""
        if rows.ndim != 2 or rows.shape[1] != self._hidden or rows.dtype.kind != "f":
            raise InputError(
                f"given rows must be float32 [n, {self._hidden}], not {rows.dtype} of shape {rows.shape}: this model's "
                f"hidden states have {self._hidden} values"
            )
        if not np.isfinite(rows).all():
            raise InputError("given rows have values that are not finite")
        rows = np.ascontiguousarray(rows, np.float32)
        ids = content_ids(rows, self._vocab)
        self._rows.update(zip(ids.tolist(), rows, strict=True))
        return ids

    def joined(self, other: GivenRows | None) -> GivenRows:
        """A table with the rows of this one and of another of the same model."""
        found = GivenRows(self._vocab, self._hidden)
        found._rows = self._rows | (other._rows if other else {})
        return found

    def check(self, tokens: IntArray) -> None:
        """Raise InputError for an id beyond the vocabulary without a row."""
        if not self._rows.keys() >= set(tokens[tokens >= self._vocab].tolist()):
            raise InputError(f"token ids must be from 0 to {self._vocab - 1}, or those of given rows")

    def rows(self, tokens: IntArray) -> FloatArray:
        """The rows of those tokens that are ids beyond the vocabulary, in their order, float32 [m, hidden]."""
        wanted = tokens[tokens >= self._vocab].tolist()
        return np.stack([self._rows[each] for each in wanted]) if wanted else np.zeros((0, self._hidden), np.float32)


def interleaved(keys: FloatArray, count: int) -> FloatArray:
    """Keys [..., head] whose RoPE pairs are halves of the first `count` values, with neighbours as pairs."""
    found: FloatArray = keys.copy()
    halves = keys[..., :count].reshape(*keys.shape[:-1], 2, -1)
    found[..., :count] = halves.swapaxes(-1, -2).reshape(*keys.shape[:-1], count)
    return found


def content_ids(rows: FloatArray, vocab: int) -> IntArray:
    """Different ids for the rows of one content, int32 [n], at least `vocab`, from a hash of all of it."""
    content, count = hashlib.sha256(repr(rows.shape).encode() + rows.tobytes()).digest(), len(rows)
    salt = 0
    while True:  # again for the rare content that gives two rows the same id
        drawn = hashlib.shake_256(content + salt.to_bytes(4, "little")).digest(8 * count)
        ids = vocab + (np.frombuffer(drawn, np.uint64) % np.uint64(_END - vocab)).astype(np.int64)
        if np.unique(ids).size == count:
            return np.asarray(ids, np.int32)
        salt += 1

"""The link between policies and engines: a policy's view of a cache, when to observe attention or read all rows, and
how to apply the policy's choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from edge.backends.base import ChoosingEngine, Engine
from edge.backends.importance import RowImportance
from edge.backends.kv_cache import HeadKVCache, KVCache
from edge.kv import pinned_rows
from edge.kv.policy import EVERY, KVView, Needs, Policy
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.run.sequences.whole_pictures import RowPictures


def view_for(kv: KVCache, needs: Needs, incoming: int = 0, learned: RowImportance | None = None) -> KVView:
    """The policy's view of the rows in use, before an eviction that leaves room for `incoming` more. learned: the
    fitted importance of rows, for policies that need it (`Needs.ranks`)."""
    if not needs.looks:
        return KVView(kv.length)
    heads = cast(HeadKVCache, kv)
    view = KVView(
        kv.length,
        heads.head_lengths,
        ages=heads.ages,
        keys=heads.keys if needs.keys else None,
        longest=heads.longest - incoming,
    )
    if needs.ranks:
        assert learned is not None
        view = replace(view, importance=lambda layer: heads.importance(layer, learned))
    return replace(view, attention=heads.attention) if needs.queries else view


def queries_to_observe(needs: Needs, free: int, incoming: int, upcoming: int) -> int:
    """The number of the next pass's tokens to observe, so that the policy has its scores at the next eviction.

    free: free rows before the pass, which uses `incoming`; the pass after it will use `upcoming`. Observing takes time,
    so only passes that an eviction may follow are observed.
    """
    if needs.queries == EVERY:
        return incoming
    near = free - incoming < max(upcoming, needs.queries)
    return min(needs.queries, incoming) if near else 0


@contextmanager
def all_rows(engine: Engine, needs: Needs) -> Iterator[None]:
    """Have the engine read all rows, also for single tokens: else results would depend on the split into chunks."""
    if not needs.reads:
        yield
        return
    choosing = cast(ChoosingEngine, engine)
    choosing.choose_rows(on=False)
    try:
        yield
    finally:
        choosing.choose_rows(on=True)


def unobserved(needs: Needs, free: int) -> int:
    """The number of tokens that can run one by one before one must be observed, by `free` rows; 0 or less: none."""
    return 0 if needs.queries == EVERY else free - max(1, needs.queries) if needs.queries else free


def evict(
    kv: KVCache, policy: Policy, budget: int, context: int, learned: RowImportance | None,
    pictures: RowPictures | None, fed: Sequence[int],
) -> int:  # fmt: skip
    """Keep the rows that a policy chooses, at most `budget`, but no parts of pictures. Returns the number of evicted
    rows, on average where heads differ. context: the model's, in tokens. learned: as for `view_for`. fed: as for
    `RowPictures.undivided`."""
    needs, before = policy.needs, _rows_per_head(kv, policy.needs)
    rows = policy.rows_to_keep(view_for(kv, needs, kv.capacity - budget, learned), budget)
    if pictures:
        one = isinstance(rows, np.ndarray)
        lengths = [kv.length] if one else cast(HeadKVCache, kv).head_lengths.reshape(-1).tolist()
        rows = pictures.undivided(rows, lengths, fed, pinned_rows(policy))
    if isinstance(rows, np.ndarray):
        kv.keep(rows, close_gaps=policy.close_gaps)
    else:
        keep_heads(kv, rows, context, forget=needs.queries > 0)
    return before - _rows_per_head(kv, needs)


def _rows_per_head(kv: KVCache, needs: Needs) -> int:
    return round(float(cast(HeadKVCache, kv).head_lengths.mean())) if needs.looks else kv.length


def keep_heads(kv: KVCache, rows: Sequence[IntArray], context: int, forget: bool) -> None:
    """Keep rows head by head. forget: clear attention, for policies that use only the last queries.

    Rows keep their positions until the tokens before the next eviction would exceed the model's `context`. Then all
    gaps are closed at once, which is rare enough to cost nothing.
    """
    heads = cast(HeadKVCache, kv)
    heads.keep_heads(rows)
    if forget:
        heads.clear_attention()
    if heads.next_position + heads.free > context:
        heads.renumber()

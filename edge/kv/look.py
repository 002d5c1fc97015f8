"""What a policy sees of an engine's cache, and how long before an eviction it has to be observed."""

from __future__ import annotations

from edge.backends.base import HeadKVCache, KVCache
from edge.kv.policy import EVERY, KVView, Needs


def look(kv: KVCache, needs: Needs) -> KVView:
    """The rows in use, with no more than the policy needs."""
    if not needs.per_head:
        return KVView(kv.length)
    assert isinstance(kv, HeadKVCache)
    return KVView(
        kv.length,
        kv.head_lengths,
        kv.attention if needs.queries else None,
        kv.ages,
        kv.keys if needs.keys else None,
    )


def queries_to_observe(needs: Needs, free: int, incoming: int, upcoming: int) -> int:
    """How many of the next pass's tokens to observe, so that the policy knows enough at the next eviction.

    free: rows before the pass, of which it takes `incoming`; the one after it will want `upcoming`. Observing costs
    time, so what no eviction follows is not observed.
    """
    if needs.queries == EVERY:
        return incoming
    near = free - incoming < max(upcoming, needs.queries)
    return min(needs.queries, incoming) if near else 0

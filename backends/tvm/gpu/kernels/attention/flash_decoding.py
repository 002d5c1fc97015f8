"""FlashDecoding (Dao, Haziza, Massa, Sizov, 2023: "Flash-Decoding for long-context inference"): attention of a single
query to many rows, which several workgroups share.

    1. A head's rows are split into consecutive shares, one for each workgroup.
    2. Each workgroup attends to its share as FlashAttention does (attention.py), and leaves in `partials` what is then
       in its registers: m, the largest score, l = Σ e^(s − m), and o = Σ e^(s − m) v, not divided by l.
    3. A second kernel joins the shares: with M = max m, the result is Σ e^(m − M) o / Σ e^(m − M) l.

A share without rows leaves m = NEVER and zeros, so that e^(m − M) is 0. What is there once for a query, the token's own
row and the model's sink, belongs to the first share.
"""

from __future__ import annotations

from functools import reduce as fold

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import RowForm, Tables, Tuning, partial_words
from edge.backends.tvm.gpu.kernels.attention.results import give, restore
from edge.backends.tvm.gpu.kernels.threads import (
    Built,
    Scope,
    Value,
    build,
    hold,
    i32,
    let,
    quotient,
    store,
    strided,
    when,
)
from edge.backends.tvm.kv.regions import TILE
from edge.model.cores import Attention


def share_of(part: Value, splits: int, rows: Value) -> tuple[Value, Value]:
    """The first row of a share, and the number of its rows: whole tiles of keys, as far as there are rows."""
    each = let(quotient(rows + (splits * TILE - 1), splits * TILE) * TILE)
    first = let(T.min(part * each, rows))
    return first, let(T.min(each, rows - first))


def place_of(form: RowForm, splits: int, query: Value, part: Value | int) -> Value:
    """Where a query's share begins in `partials`, float32 [heads, splits, 2 + head]: m, l, then o."""
    return (query * splits + part) * partial_words(form)


def join(name: str, core: Attention, tables: Tables, tuning: Tuning, dtype: str, *, observes: bool = False) -> Built:
    """Compute `mixed`, and `softmax` if the engine observes, as `attention.attend` does, from `partials`. A workgroup
    joins the shares of a query head.

    Scalars: layer, where rows are reflected.
    """
    form, splits = RowForm.of(core, dtype), tuning.row_splits
    reflects = form.transformed and form.shared

    def body(scope: Scope) -> None:
        query = scope.group
        places = [let(place_of(form, splits, query, part)) for part in range(splits)]
        maxima = [let(scope.partials[place]) for place in places]
        sums = [let(scope.partials[place + 1]) for place in places]
        maximum = hold(fold(T.max, maxima))
        weights = [hold(T.exp(each - maximum)) for each in maxima]
        total = hold(fold(_plus, (weight * each for weight, each in zip(weights, sums, strict=True))))
        shares = [hold(weight / total) for weight in weights]
        ready = scope.shared(form.stored) if form.transformed else None
        with strided(scope, form.head if form.transformed else core.row.value) as value:
            parts = (share * scope.partials[place + 2 + value] for share, place in zip(shares, places, strict=True))
            mixed = hold(fold(_plus, parts))
            if form.transformed:
                store(ready, value, mixed)
            else:
                give(scope, core, i32(0), query, value, mixed)
        if form.transformed:
            head = let(scope.layer * tables.kv_heads + quotient(query, core.group)) if reflects else None
            restore(scope, core, tables, form, ready, 1, i32(0), query, head, scope.shared(1))
        if observes:
            with when(scope.thread == 0):
                store(scope.softmax, query * 2, maximum)
                store(scope.softmax, query * 2 + 1, total)

    reads = {"partials": "float32"} | ({"qkv": "float32"} if core.gated else {})
    reads |= {"tables": "uint32"} if reflects else {}
    writes = {"mixed": "float32"} | ({"softmax": "float32"} if observes else {})
    return build(name, tuning.attend, reads, writes, ("layer",) if reflects else (), body, (core.heads, 1))


def _plus(one: Value, other: Value) -> Value:
    return one + other

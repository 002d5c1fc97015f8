"""The attention that cached rows receive, by which policies such as H2O, TOVA and SnapKV evict.

It is computed beside attention, for the last queries of a pass only, and only if the engine observes. It costs a second
Q Kᵀ for those queries, which does not share the keys between them.
"""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import NEVER, Query, ScoreLimits, limit, query_sum, scaled
from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Register,
    Value,
    exp,
    floats,
    i64,
    largest,
    let,
    load,
    loop,
    quotient,
    spread,
    store,
    total,
    when,
)


def observe(
    cache: Cache, memory: Buffer, query: Query, first_row: Value, raw: Value, share: float, votes: Value,
    out: Buffer, limits: ScoreLimits,
) -> None:  # fmt: skip
    """out[first_row : first_row + visible] += share · softmax(q Kᵀ) for one query row.

    votes: if 1, += share for rows whose attention is above the average, and nothing for the others.
    raw: an offset into `memory`, with room for every row of a head.
    """
    tiles = let(quotient(query.visible + 15, 16))
    sum_of_query = query_sum(cache, memory, query)
    most, sums, score = Register(), Register(), Register()
    most.value = floats(NEVER)
    with loop(i64(0), tiles) as tile:
        score.value = floats(0)
        with loop(i64(0), i64(cache.key_width)) as element:
            for part, key in enumerate(cache.load_keys(first_row, tile, element)):
                x = memory[query.at + element * cache.form.packed + part]
                score.value = score.value + spread(x) * key
        products = scaled(score.value, cache.scales(cache.key_scales, first_row, tile), sum_of_query)
        seen = let(limit(products, query, first_row, tile, limits))
        store(memory, raw + tile * 16, seen)
        most.value = T.max(most.value, seen)
    maximum = largest(most.value)
    maximum = let(maximum if query.sink is None else T.max(maximum, query.sink))
    sums.value = floats(0)
    with loop(i64(0), tiles) as tile:
        power = let(exp(load(memory, raw + tile * 16) - spread(maximum)))
        store(memory, raw + tile * 16, power)
        sums.value = sums.value + power
    sum_of_all = let(total(sums.value))
    divisor = sum_of_all if query.sink is None else sum_of_all + exp(query.sink - maximum, 1)
    factor = let(T.float32(share) / divisor)
    average = let(sum_of_all / T.cast(query.visible, "float32"))
    with loop(i64(0), tiles) as tile:
        at, power = let(first_row + tile * 16), let(load(memory, raw + tile * 16))
        with when(votes == 0):
            store(out, at, load(out, at) + power * spread(factor))
        with when(votes > 0):
            store(out, at, load(out, at) + T.Select(power > spread(average), floats(share), floats(0)))

"""Selection of the pages of the cache that a query reads: Quest (arXiv:2406.10774).

kv/pages.py defines pages and bounds. A page's score is an upper bound of the products of its keys and any of the
group's queries; the pages with the highest scores are read.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Register,
    Strip,
    Value,
    floats,
    i64,
    ints,
    largest,
    let,
    load,
    loop,
    pure,
    quotient,
    smallest,
    spread,
    store,
    total,
    when,
)
from edge.backends.tvm.kv.row_formats import LARGEST

ALWAYS = 3e38  # the score of the first page
_HALF_STEP, _HALF_LEAST = 1.001 * 2**-11, 2**-25  # by which rounding changes a float16 at most: relative, or near 0
_LOWEST, _HIGHEST = -(1 << 31), 1 << 31  # bounds of int32


def make_bounds(cache: Cache, bounds: Buffer, at: Value, first_row: Value, page: Value) -> None:
    """Store the greatest and the least key of a page in each dimension, float16 [2, head] at offset `at`: rounded away
    from the keys if they are not float16, and at most 65,504, since an infinite bound times 0 would be no number."""
    exact = cache.form.memory == "float16"
    parts = cache.key // 16
    found = Strip(2 * parts)
    scales = cache.scales(cache.key_scales, first_row, page)
    with loop(i64(0), i64(cache.key_width)) as element:
        for part, key in enumerate(cache.load_keys(first_row, page, element)):
            values = let(key * scales[0] if scales else key)
            values = let(values + scales[1]) if len(scales) > 1 else values
            dimension = let(element * cache.form.packed + part)
            found.set_lane(dimension, largest(values))
            found.set_lane(dimension + cache.key, smallest(values))
    for part in range(2 * parts):
        bound = let(found[i64(part)])
        bound = bound if exact else _outward(bound, 1 if part < parts else -1)
        store(bounds, at + part * 16, cache.isa.to_f16(bound))


def _outward(values: Value, sign: int) -> Value:
    """Float32 values that, rounded to float16, are not below (sign 1) or above (−1) these."""
    slack = let(pure("float32x16", "llvm.fabs", values) * floats(_HALF_STEP) + floats(_HALF_LEAST))
    return let(T.max(T.min(values + floats(sign) * slack, floats(LARGEST)), floats(-LARGEST)))


def score_page(cache: Cache, bounds: Buffer, at: Value, queries: Buffer, first: Value, group: int) -> Value:
    """The most that a key of a page can score with one of `group` queries, which begin at `first`."""
    parts = cache.key // 16
    bound = [let(cache.isa.from_f16(load(bounds, at + part * 16))) for part in range(2 * parts)]
    most = Register(lanes=1)
    most.value = T.float32(-ALWAYS)
    with loop(i64(0), i64(group)) as query:
        score: Value = floats(0)
        for part in range(parts):
            x = let(load(queries, first + query * cache.key + part * 16))
            score = let(score + T.max(x * bound[part], x * bound[parts + part]))
        most.value = T.max(most.value, total(score))
    return most.value


def choose_pages(scores: Buffer, at: Value, count: Value, wanted: Value, put: Callable[[Value, Value], None]) -> None:
    """Call put(index, page) for the `wanted` of `count` pages with the highest scores, the older on ties, in order.

    Scores are compared as integers of the same order. The wanted-th highest is found by bisection; mostly, far fewer
    steps than the 32 separate the wanted pages from the others. Scores after the last may be read, but are not used.
    """
    low, high, chosen = Register("int64", lanes=1), Register("int64", lanes=1), Register("int64", lanes=1)
    low.value, high.value, chosen.value = i64(_LOWEST), i64(_HIGHEST), count  # as many are at `low` or above it
    tiles = let(quotient(count + 15, 16))
    sums = Register("int32")
    with T.While(T.And(chosen.value != wanted, high.value - low.value > 1)):
        middle = let(T.shift_right(low.value + high.value, i64(1)))
        sums.value = ints(0)
        with loop(i64(0), tiles) as tile:
            own = T.ramp(T.cast(tile * 16, "int32"), T.int32(1), 16) < spread(T.cast(count, "int32"))
            reached = _ordered(load(scores, at + tile * 16)) >= spread(T.cast(middle, "int32"))
            sums.value = sums.value + T.Select(own, T.Select(reached, ints(1), ints(0)), ints(0))
        found = let(T.cast(pure("int32", "llvm.vector.reduce.add", sums.value), "int64"))
        with when(found >= wanted):
            low.value = middle
            chosen.value = found
        with when(found < wanted):
            high.value = middle
    # Of the pages at the threshold itself, the oldest fill what is left.
    spare, index = Register("int64", lanes=1), Register("int64", lanes=1)
    spare.value, index.value = chosen.value - wanted, i64(0)
    with loop(i64(0), count) as turn:
        page = let(count - 1 - turn)  # the newest first: they are the ones to leave out
        score = let(T.cast(_ordered(scores[at + page], 1), "int64"))
        leave = let(T.And(score == low.value, spare.value > 0))
        with when(leave):
            spare.value = spare.value - 1
        with when(T.And(score >= low.value, T.Not(leave))):
            put(wanted - 1 - index.value, page)
            index.value = index.value + 1


def _ordered(scores: Value, lanes: int = 16) -> Value:
    """Integers that are ordered as these floats."""
    bits = let(T.reinterpret("int32x16" if lanes > 1 else "int32", scores))
    return let(T.bitwise_xor(bits, T.bitwise_and(T.shift_right(bits, ints(31, lanes)), ints(0x7FFFFFFF, lanes))))

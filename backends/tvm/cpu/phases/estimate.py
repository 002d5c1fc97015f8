"""A head in two stages: bounds of all logits from the high bits of its weights, then those logits that matter.

The first stage reads 5 of the 8 bits of each weight, and all bits of the few blocks of columns in which the activations
are largest. The engine compares its bounds (`cpu/two_stages.py`); the second stage computes the tiles that are left, by
the code of the whole head. Both multiply the same quantized activations, so that only the low bits are unknown.

Notation: a row of weights d_b · q_i, its activations s_b · x_i with integers q and x, blocks b of 32 values. Without
its low bits q is h = 8 · (high − 16) + 3.5, and |q − h| ≤ 3.5. Then

    |Σ d s q x − Σ d s h x| ≤ Σ_b |d_b| · 3.5 · a_b,  a_b = |s_b| · Σ |x_i|

and blocks whose low bits were read add nothing. All integers are exact, so floating point rounds only products with
scales and sums of blocks. Let B = Σ_b |d_b| · a_b, u = 2⁻²⁴, p the number of blocks. The terms of a first stage add up
to at most 142 · B, since |8 · (high − 16)| + 3.5 + |low| + 3.5 ≤ 142, through at most 2 p + 16 operations each; those
of the whole head to 128 · B, through p + 4. Their errors (Higham, Accuracy and Stability, 3.1) and that of adding the
bound are together less than (412 p + 4,000) · u · B, for which `_rounding` allows more than twice as much. The bound
itself is a sum of p ≤ 1,024 positive products, each rounded a few times: that is less than 2⁻¹³ of it. Underflow adds
less than `_UNDERFLOW`. Where the bound is not below `_LARGEST` (overflow, NaN), nothing is known: the interval is
everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.arguments import LINE
from edge.backends.tvm.cpu.kernels.activations import Quantized
from edge.backends.tvm.cpu.kernels.matmul import multiply, prefetch_part, sums_of_scales
from edge.backends.tvm.cpu.kernels.vectors import (
    Register,
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
    when,
)
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.packing.blocks import HALVED, MIDDLE, PART
from edge.backends.tvm.packing.cores import round_up

MOST_EXACT = 3  # blocks whose low bits are read: 2 to 4 minimise the bytes read, in both models that were measured
_TILES_AHEAD = 4  # for which the low bits are prefetched: a CPU does not see their pattern by itself
_UNDERFLOW = 2.0**-80
_LARGEST = 2.0**90
_MOST = 3.4028234663852886e38  # of float32


def estimate(b: PassBuilder) -> None:
    """Store each tile's largest upper and largest lower bound of a logit, for every token; rows beyond the vocabulary
    are 0."""
    tiles, chosen = b.shape.padded_vocab // 16, let(b.at("head_exact") + b.thread * LINE)
    own = _bounds_at(b, b.thread)
    if b.single:
        _prepare_row(b, i64(0), b.thread, own)
        _choose_exact(b, own, chosen)
        _reduce(b, own, chosen)
        b.mark("output_norm")
    else:
        _prepare_rows(b, own, chosen)
    inputs = b.inputs("normed", b.shape.padded_hidden)
    halved = b.matrix(b.design.head, b.shape.hidden, "head")
    high, low = (replace(halved, block=half) for half in HALVED.halves)
    upper_at, lower_at = b.at("head_upper"), b.at("head_lower")
    ahead = _TILES_AHEAD * (b.threads if b.dealt else 1)

    @contextmanager
    def exact_parts() -> Iterator[Value]:
        with loop(i64(0), i64(_exact(b))) as number:
            yield let(T.cast(b.integers[chosen + number], "int64"))

    def bound(tile: Value, rows: Sequence[Value], bounds: Sequence[Value]) -> list[tuple[Value, Value]]:
        """The bounds of a tile's logits, for these rows of activations."""
        sums = b.multiply(high, tile, inputs, rows)
        with exact_parts() as part:
            more = multiply(b.isa, b.weights, low, tile, inputs, rows, None, (part, part + 1))
            for each, other in zip(sums, more, strict=True):
                each.value = each.value + other.value
        found = []
        for each, size in zip(sums, sums_of_scales(b.isa, b.weights, high, tile, b.floats, bounds), strict=True):
            error = let(size.value + floats(_UNDERFLOW))
            upper = let(T.Select(error <= floats(_LARGEST), each.value + error, floats(_MOST)))
            lower = let(T.Select(error <= floats(_LARGEST), each.value - error, floats(-_MOST)))
            found.append((largest(upper), largest(lower)))
        return found

    with b.phase("head"), b.shared_out(i64(tiles)) as tile:
        if b.single:
            with exact_parts() as part:
                prefetch_part(b.weights, low, tile + ahead, part, b.target)
            ((upper, lower),) = bound(tile, [b.thread], [own])
            T.buffer_store(b.floats, upper, [upper_at + tile])
            T.buffer_store(b.floats, lower, [lower_at + tile])
            return
        with loop(i64(0), quotient(b.count + (b.batch - 1), b.batch)) as block:
            rows = [let(T.min(block * b.batch + index, b.count - 1)) for index in range(b.batch)]
            found = bound(tile, rows, [_bounds_at(b, b.parts + row) for row in rows])
            for row, (upper, lower) in zip(rows, found, strict=True):
                T.buffer_store(b.floats, upper, [upper_at + row * tiles + tile])
                T.buffer_store(b.floats, lower, [lower_at + row * tiles + tile])


def _exact(b: PassBuilder) -> int:
    return min(MOST_EXACT, b.shape.hidden // PART)


def _bounds_at(b: PassBuilder, number: Value) -> Value:
    """Where the factors of the bound are: each thread has some of its own, and then each token of a batch."""
    return let(b.at("head_bounds") + number * round_up(b.shape.hidden // PART, LINE))


def _prepare_rows(b: PassBuilder, own: Value, chosen: Value) -> None:
    """Prepare the tokens of a batch. They share the blocks whose low bits are read: those in which the sum of their
    activations is largest."""
    with b.phase("output_norm"), b.shared_out(b.count) as row:
        _prepare_row(b, row, row, _bounds_at(b, b.parts + row))
    with b.phase("output_norm"):
        with loop(i64(0), i64(b.shape.hidden // PART)) as part:
            T.buffer_store(b.floats, T.float32(0), [own + part])
            with loop(i64(0), b.count) as row:
                each = let(b.floats[_bounds_at(b, b.parts + row) + part])
                with when(each >= T.float32(0)):  # no NaN
                    T.buffer_store(b.floats, b.floats[own + part] + each, [own + part])
        _choose_exact(b, own, chosen)
    with b.phase("output_norm"), b.shared_out(b.count) as row:
        _reduce(b, _bounds_at(b, b.parts + row), chosen)


def _prepare_row(b: PassBuilder, source: Value, row: Value, bounds: Value) -> None:
    """Normalize and quantize a row, and store its factors of the bound."""
    b.norm_row(source, row, "output_norm", None)
    b.quantize_row("normed", b.shape.padded_hidden, row, row, [b.design.head])
    _bound_blocks(b, b.quantized(), row, b.shape.hidden // PART, bounds)


def _bound_blocks(b: PassBuilder, x: Quantized, row: Value, parts: int, bounds: Value) -> None:
    """The factor of |d| in the bound, for every block."""
    words, scales = let(x.words_at(row)), let(x.scales + x.blocks_at(row))
    factor = (MIDDLE + _rounding(parts)) * (1 + 2.0**-12)
    with loop(i64(0), i64(parts)) as part:
        sums = [_sum_of_sizes(b, words + part * 8 + at) for at in (0, 4)]
        size = T.cast(let(sums[0] + sums[1]), "float32") * b.floats[scales + part]
        T.buffer_store(b.floats, size * T.float32(factor), [bounds + part])


def _sum_of_sizes(b: PassBuilder, at: Value) -> Value:
    """Σ |x| of the 16 signed bytes in 4 words."""
    values = let(T.cast(T.reinterpret("int8x16", load(b.integers, at, 4)), "int32x16"))
    return let(pure("int32", "llvm.vector.reduce.add", T.max(values, ints(0) - values)))


def _choose_exact(b: PassBuilder, bounds: Value, chosen: Value) -> None:
    """Choose the blocks with the largest bounds, which become negative, so that none is chosen twice unless its
    activations are 0."""
    for number in range(_exact(b)):
        found, most = b.counter(), Register(lanes=1)
        most.value = T.float32(-1)
        with loop(i64(0), i64(b.shape.hidden // PART)) as part:
            bound = let(b.floats[bounds + part])
            with when(T.And(bound >= T.float32(0), bound > most.value)):
                most.value = bound
                found.value = T.cast(part, "int32")
        T.buffer_store(b.integers, found.value, [chosen + number])
        at = let(bounds + T.cast(found.value, "int64"))
        T.buffer_store(b.floats, T.float32(0) - b.floats[at], [at])


def _reduce(b: PassBuilder, bounds: Value, chosen: Value) -> None:
    """Reduce the bounds of the chosen blocks to their share of the rounding."""
    parts = b.shape.hidden // PART
    share = _rounding(parts) / (MIDDLE + _rounding(parts)) * (1 + 2.0**-12)
    for number in range(_exact(b)):
        at = let(bounds + T.cast(b.integers[chosen + number], "int64"))
        T.buffer_store(b.floats, T.max(b.floats[at], T.float32(0) - b.floats[at]) * T.float32(share), [at])


def _rounding(parts: int) -> float:
    """The rounding error allowed for the sums of both stages, in units of B."""
    return 300 * (4 * parts + 64) * 2.0**-24

"""A head in two stages: exact logits of those tokens that may be among the largest, −∞ for the others.

The first stage reads the high halves of the weights and a sketch of the rest (`packing/sketch.py`), and bounds every
logit from above. Then the logits with the largest bounds are computed: the least of as many as are wanted is a
threshold that the wanted ones reach. The second stage computes all whose bounds reach it, 16 rows at a time, by the
kernel and so to the last bit as the whole head does. NaN fails every test by which a row is left out.

Rounding is in the bounds. With u = 2^-24, a sum of n products differs from the real one by less than n · u times the
product of both norms; each such term here is doubled at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.arguments import GROUPS, RANKED_FLOATS, RANKED_INTEGERS
from edge.backends.tvm.cpu.kernels.activations import Quantized, Sums, quantize
from edge.backends.tvm.cpu.kernels.matmul import Inputs, Matrix, multiply
from edge.backends.tvm.cpu.kernels.vectors import (
    Register,
    Value,
    floats,
    i64,
    ints,
    let,
    load,
    loop,
    prefetch,
    pure,
    quotient,
    remainder,
    spread,
    store,
    total,
    when,
)
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.packing.blocks import BLOCKS, HIGH_HALVES, PART
from edge.backends.tvm.packing.sketch import DIRECTIONS, SketchLayout

_SPARE = 8  # candidates for the threshold beyond the wanted ones
_LOWEST = -(1 << 31)


def rank(b: PassBuilder, matrix: Matrix, inputs: Inputs, row: Value) -> None:
    """Logits of a step, of which the `ranked` largest are wanted."""
    assert inputs.quantized is not None
    own = let(b.at("ranked_floats") + b.thread * RANKED_FLOATS)
    own_integers = let(b.at("ranked_integers") + b.thread * RANKED_INTEGERS)
    uppers, exact = DIRECTIONS + 32, DIRECTIONS + 32 + 16 * GROUPS  # maxima of groups of bounds, and of logits
    with loop(i64(0), i64(2 * GROUPS)) as group:
        store(b.floats, own + uppers + group * 16, spread(_minus_infinity()))
    z = _project(b, inputs, row, own, own_integers)
    high = Matrix(HIGH_HALVES, matrix.columns, let(matrix.quants + matrix.run), matrix.scales)
    layout = SketchLayout(b.shape.padded_vocab, matrix.columns)
    with b.phase("head"), _tiles(b) as tile:
        record = let(tile * layout.record + layout.records_at)
        for line in range(layout.scales_at, layout.record, 64):
            prefetch(b.sketch.bytes, record + b.target.fetch_ahead + line)
        rest = Matrix(BLOCKS["Q4_0"], DIRECTIONS, record, let(record + layout.scales_at))
        (first,) = b.multiply(high, tile, inputs, [row])
        (second,) = multiply(b.isa, b.sketch, rest, i64(0), z.inputs, [i64(0)], b.target.fetch_ahead)
        norms = let(quotient(record + layout.norms_at, 2))
        outside, inside = (b.isa.from_f16(load(b.sketch.halves, norms + at)) for at in (0, 16))
        bound = let(first.value + second.value + (outside * spread(z.outside) + inside * spread(z.inside)) + z.rounding)
        store(b.logits, tile * 16, bound)
        _raise(b, own + uppers, tile, bound)
    wanted = let(T.cast(b.at("ranked"), "int32"))
    floor = _find_largest(b, uppers, let(wanted + _SPARE))
    with b.phase("head"), _tiles(b) as tile, when(_reaches(load(b.logits, tile * 16), floor)):
        (sums,) = b.multiply(matrix, tile, inputs, [row])
        store(b.logits, tile * 16, sums.value)
        _raise(b, own + exact, tile, sums.value)
    floor = _find_largest(b, exact, wanted)
    count = b.counter()
    with b.phase("head"):
        with _tiles(b) as tile:
            reached = let(_reaches(load(b.logits, tile * 16), floor))
            with when(reached):
                (sums,) = b.multiply(matrix, tile, inputs, [row])
                store(b.logits, tile * 16, sums.value)
                count.value = count.value + 1
            with when(T.Not(reached)):
                store(b.logits, tile * 16, spread(_minus_infinity()))
        T.buffer_store(b.integers, count.value, [own_integers + (RANKED_INTEGERS - 16)])


class _Projected:
    """The row in the directions of the sketch, z, and the factors of the norms in the bounds.

    outside: ‖v‖; inside: ‖z‖; rounding: a vector that is added; all rounded up.
    """

    def __init__(self, inputs: Inputs, outside: Value, inside: Value, rounding: Value) -> None:
        self.inputs, self.outside, self.inside, self.rounding = inputs, outside, inside, rounding


def _project(b: PassBuilder, inputs: Inputs, row: Value, own: Value, own_integers: Value) -> _Projected:
    """Quantized rows in floats replace the normed ones, which are no longer needed."""
    x, columns = inputs.quantized, b.shape.hidden
    assert x is not None
    start = let(inputs.start + row * inputs.stride)
    words, scales = let(x.words_at(row)), let(x.scales + x.blocks_at(row))
    squares = Register()
    squares.value = floats(0)
    with loop(i64(0), i64(columns // PART)) as block:
        scale = let(x.numbers[scales + block])
        for which in (0, 1):
            values = _dequantized(x, words + block * 8 + which * 4, scale)
            store(b.floats, start + block * PART + which * 16, values)
            squares.value = squares.value + values * values
    layout = SketchLayout(b.shape.padded_vocab, columns)
    directions = Matrix(BLOCKS["F32"], columns, i64(layout.directions_at), i64(0))
    row_inputs = Inputs(b.floats, start, 0, None)
    for tile in range(DIRECTIONS // 16):
        (sums,) = multiply(b.isa, b.sketch, directions, i64(tile), row_inputs, [i64(0)])
        store(b.floats, own + tile * 16, sums.value)
    of_z = Sums(own_integers + DIRECTIONS // 4, own + (DIRECTIONS + 16))
    z = Quantized(b.integers, own_integers, b.floats, let(own + DIRECTIONS), {PART: of_z}, DIRECTIONS)
    quantize(b.floats, own, DIRECTIONS, z, i64(0), [PART])
    crossed, own_squares = floats(0), floats(0)
    for part in range(DIRECTIONS // 16):
        scale = let(z.numbers[z.scales + part // 2])
        values = _dequantized(z, z.words + part * 4, scale)
        crossed = let(crossed + values * load(b.floats, own + part * 16))
        own_squares = let(own_squares + values * values)

    # ‖v‖² = ‖h‖² − 2 z · Pᵀ h + ‖P z‖². What the kernel has for Pᵀ h is wrong by `error` · ‖h‖ at most.
    error = math.sqrt(DIRECTIONS) * columns * 2.0**-23
    h, of_crossed, zz = let(total(squares.value)), let(total(crossed)), let(total(own_squares))
    outside = let(h - T.float32(2) * of_crossed + zz + T.float32(2 * error + 1e-5) * (h + zz))
    norms = let(_sqrt(h) + _sqrt(zz))
    parts = columns // PART + DIRECTIONS // PART + 16
    largest, largest_c = let(b.sketch.floats[i64(0)]), let(b.sketch.floats[i64(1)])
    rounding = norms * (T.float32(parts * 2.0**-22) * largest + T.float32(error) * largest_c) + T.float32(1e-30)
    up = T.float32(1 + 1e-5)
    return _Projected(
        Inputs(b.floats, own, DIRECTIONS, z),
        let(_sqrt(T.if_then_else(outside < T.float32(0), T.float32(0), outside)) * up),  # NaN stays
        let(_sqrt(zz) * up), let(spread(rounding)),
    )  # fmt: skip


def _dequantized(x: Quantized, word: Value, scale: Value) -> Value:
    """16 values from 4 words."""
    return let(T.cast(T.reinterpret("int8x16", load(x.integers, word, 4)), "float32x16") * spread(scale))


def _sqrt(value: Value) -> Value:
    return pure("float32", "llvm.sqrt", value)


def _minus_infinity() -> Value:
    return T.reinterpret("float32", T.int32(-(1 << 23)))


@contextmanager
def _tiles(b: PassBuilder) -> Iterator[Value]:
    """The thread's tiles of the head: the same in all stages."""
    with b.shared_out(i64(b.shape.padded_vocab // 16)) as tile:
        yield tile


def _raise(b: PassBuilder, maxima: Value, tile: Value, values: Value) -> None:
    """Note the maxima of groups: of every GROUPS-th tile, and of each of 16 rows."""
    at = let(maxima + remainder(tile, GROUPS) * 16)
    store(b.floats, at, T.max(load(b.floats, at), values))


def _reaches(values: Value, floor: Value) -> Value:
    """Whether any of 16 values is not below the floor."""
    reached = T.Select(values < spread(floor), ints(0), ints(1))
    return pure("int32", "llvm.vector.reduce.add", reached) > 0


def _find_largest(b: PassBuilder, maxima: int, count: Value) -> Value:
    """The count-th largest of the maxima of all threads' groups, by the bits of its order; NaN if there are fewer."""
    found, first = Register("int32", lanes=1), let(b.at("ranked_floats") + maxima)
    found.value = T.int32(0)
    with loop(i64(0), i64(32)) as bit:
        tried = let(found.value | (T.int32(1) << (T.int32(31) - T.cast(bit, "int32"))))
        least, reaching = let(spread(tried ^ T.int32(_LOWEST))), Register("int32")
        reaching.value = ints(0)
        with loop(i64(0), b.threads) as thread, loop(i64(0), i64(GROUPS)) as group:
            bits = let(T.reinterpret("int32x16", load(b.floats, first + thread * RANKED_FLOATS + group * 16)))
            reaches = _ordered(bits, ints(31), ints(0x7FFFFFFF)) >= least
            reaching.value = reaching.value + T.Select(reaches, ints(1), ints(0))
        with when(pure("int32", "llvm.vector.reduce.add", reaching.value) >= count):
            found.value = tried
    key = let(found.value ^ T.int32(_LOWEST))
    return let(T.reinterpret("float32", _ordered(key, T.int32(31), T.int32(0x7FFFFFFF))))


def _ordered(bits: Value, sign: Value, others: Value) -> Value:
    """The bits of a float as an integer of the same order, or back."""
    return bits ^ ((bits >> sign) & others)

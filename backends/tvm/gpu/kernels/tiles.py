"""The products of a chunk: several tokens at once, bound by arithmetic.

A workgroup computes a tile of `Tuning.gemm_rows` rows by `gemm_tokens` tokens. Part by part, its threads bring weights
and activations into shared memory, weights as floats; each thread then multiplies a small tile in its registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State, Tuning
from edge.backends.tvm.gpu.kernels.products import Factor, Product, finish, only_bundle
from edge.backends.tvm.gpu.kernels.quants import Words, read_values
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    barrier,
    build,
    f32,
    i32,
    lane,
    let,
    loop,
    quotient,
    remainder,
    store,
    strided,
    to_int,
    when,
)
from edge.backends.tvm.packing.blocks import PART

_SHARED = 16384  # bytes that a workgroup may have


def chunk(product: Product, tuning: Tuning, tokens: int, *, wanted: bool = False) -> Built:
    """The kernel for at most `tokens` tokens, whose inputs are normalised.

    wanted: the first State.WANTED rows of `x`, not State.COUNT.
    Buffers: out float32; x float32x4 [tokens, columns]; w4, w1 the weights; tables.
    """
    tile_rows, tile_tokens = _tile(product, tuning)
    counts = [-(-bundle[0].matrix.rows // tile_rows) for bundle in product.bundles]
    starts = list(accumulate(counts, initial=0))

    def body(scope: Scope) -> None:
        weights = [scope.shared(PART * tile_rows) for _ in product.bundles[0]]
        inputs = scope.shared(PART * tile_tokens)
        count = let(to_int(scope.tables[State.WANTED if wanted else State.COUNT]))
        with when(scope.row * tile_tokens < count):
            for bundle, start, groups in zip(product.bundles, starts, counts, strict=False):
                with only_bundle(scope.group, start, groups, len(product.bundles)) as group:
                    _multiply(scope, product, bundle, group, count, weights, inputs, tile_rows, tile_tokens)

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32", "tables": "uint32"}
    groups = (starts[-1], -(-tokens // tile_tokens))
    return build(
        product.name, tuning.workgroup, reads, {"out": "float32"}, (), body, groups,
        0 if wanted else tile_tokens,
    )  # fmt: skip


def _tile(product: Product, tuning: Tuning) -> tuple[int, int]:
    """Rows and tokens: as tuned, unless shared memory is too small for two matrices."""
    rows, tokens = tuning.gemm_rows, tuning.gemm_tokens
    while 4 * PART * (rows * (1 + product.paired) + tokens) > _SHARED:
        rows //= 2
    return rows, tokens


def _multiply(
    scope: Scope, product: Product, bundle: Sequence[Factor], group: Value, count: Value, weights: Sequence[Buffer],
    inputs: Buffer, tile_rows: int, tile_tokens: int,
) -> None:  # fmt: skip
    matrix = bundle[0].matrix
    across = _across(scope.threads, tile_rows, tile_tokens)  # threads side by side along the rows
    each_rows, each_tokens = tile_rows // across, tile_tokens * across // scope.threads
    my_row, my_token = let(remainder(scope.thread, across)), let(quotient(scope.thread, across))
    first_row, first_token = let(group * tile_rows), let(scope.row * tile_tokens)
    sums = [[[Register(f32(0.0)) for _ in bundle] for _ in range(each_tokens)] for _ in range(each_rows)]
    with loop(0, matrix.parts) as part:
        for factor, memory in zip(bundle, weights, strict=False):
            _load_weights(scope, factor, first_row, part, memory, tile_rows)
        _load_inputs(scope, product, first_token, count, part, inputs, tile_tokens)
        barrier()
        with loop(0, PART) as at:
            w_at, x_at = let(at * tile_rows + my_row), let(at * tile_tokens + my_token)
            x = [let(inputs[x_at + index * (scope.threads // across)]) for index in range(each_tokens)]
            w = [[let(memory[w_at + index * across]) for memory in weights] for index in range(each_rows)]
            for each_w, by_token in zip(w, sums, strict=True):
                for each_x, registers in zip(x, by_token, strict=True):
                    for value, register in zip(each_w, registers, strict=True):
                        register.value = register.value + value * each_x
        barrier()
    for index, by_token in enumerate(sums):
        row = let(first_row + (my_row + index * across))
        for number, registers in enumerate(by_token):
            token = let(first_token + (my_token + number * (scope.threads // across)))
            with when(T.And(row < matrix.rows, token < count)):
                finish(scope, product, bundle, row, token, [register.value for register in registers])


def _across(threads: int, rows: int, tokens: int) -> int:
    """Of the threads, as many along the rows as leaves each a tile that is nearly square."""
    across = min(threads, rows)
    while across > 1 and (rows // across < tokens * across // threads or threads // across > tokens):
        if threads // across * 2 > tokens:
            break
        across //= 2
    return across


def _load_weights(scope: Scope, factor: Factor, first: Value, part: Value, memory: Buffer, tile_rows: int) -> None:
    """[32, rows]; the last row stands for rows behind it."""
    words = Words(scope.w4, scope.w1)
    with strided(scope, tile_rows) as local:
        row = let(T.min(first + local, i32(factor.matrix.rows - 1)))
        for index, value in enumerate(read_values(words, factor.matrix, row, part)):
            store(memory, local + index * tile_rows, value)


def _load_inputs(
    scope: Scope, product: Product, first: Value, count: Value, part: Value, memory: Buffer, tile_tokens: int
) -> None:
    """[32, tokens]; the last token stands for tokens behind it."""
    quads = PART // 4
    with strided(scope, tile_tokens * quads) as index:
        local, quad = let(quotient(index, quads)), let(remainder(index, quads))
        token = T.min(first + local, count - 1)
        four = let(scope.x[token * (product.columns // 4) + part * quads + quad])
        for at in range(4):
            store(memory, (quad * 4 + at) * tile_tokens + local, lane(four, at))

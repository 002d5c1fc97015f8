"""The products of a chunk: several tokens at once, bound by arithmetic.

A workgroup computes a tile of `Tuning.gemm_rows` rows by `gemm_tokens` tokens. Part by part, its threads load weights
(as floats) and activations into shared memory; each thread then multiplies a small tile in its registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product as iterate
from typing import Any

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State, Tuning
from edge.backends.tvm.gpu.kernels.products import tensor_tiles
from edge.backends.tvm.gpu.kernels.products.products import Band, Factor, Product, workgroups
from edge.backends.tvm.gpu.kernels.products.quants import QUADS, Words, read_values
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    barrier,
    build,
    f32,
    hold,
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
_STRIDE = QUADS + 1  # vectors from row to row in shared memory: threads side by side hit different banks


def chunk(product: Product, tuning: Tuning, tokens: int, *, wanted: bool = False) -> Built:
    """Build the kernel for at most `tokens` tokens, whose inputs are normalized.

    wanted: the first State.WANTED rows of `x`, not State.COUNT.
    Buffers: out float32; x float32x4 [tokens, columns]; w4, w1 the weights; tables; low, lora4 for adapters.
    """
    if tuning.mma_rows and not product.per_head:
        return tensor_tiles.chunk(product, tuning, tokens, wanted=wanted)
    tile_rows, tile_tokens = _tile(product, tuning)

    def body(scope: Scope) -> None:
        weights = [scope.shared(_STRIDE * tile_rows, "float32x4") for _ in product.bundles[0]]
        inputs = scope.shared(_STRIDE * tile_tokens, "float32x4")
        count = hold(to_int(scope.tables[State.WANTED if wanted else State.COUNT]), "int32")
        band = Band.of(scope, product, tile_rows)
        _multiply(scope, product, band, count, weights, inputs, tile_rows, tile_tokens)

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32", "tables": "uint32"} | product.reads
    groups = (workgroups(product, tile_rows), -(-tokens // tile_tokens))
    return build(
        product.name, tuning.workgroup, reads, {"out": "float32"}, (), body, groups,
        0 if wanted else tile_tokens,
    )  # fmt: skip


def _tile(product: Product, tuning: Tuning) -> tuple[int, int]:
    """Rows and tokens of a tile: as tuned, unless shared memory is too small for two matrices."""
    rows, tokens = tuning.gemm_rows, tuning.gemm_tokens
    while 16 * _STRIDE * (rows * (1 + product.paired) + tokens) > _SHARED:
        rows //= 2
    while product.per_head and product.per_head.rows % rows:  # those of a tile are of one head
        rows //= 2
    return rows, tokens


def _multiply(
    scope: Scope, product: Product, band: Band, count: Value, weights: Sequence[Buffer], inputs: Buffer,
    tile_rows: int, tile_tokens: int,
) -> None:  # fmt: skip
    across = _across(scope.threads, tile_rows, tile_tokens)  # threads side by side along the rows
    down = scope.threads // across
    my_row, my_token = let(remainder(scope.thread, across)), let(quotient(scope.thread, across))
    first_token = let(scope.row * tile_tokens)
    row_of = [let(my_row + index * across) for index in range(tile_rows // across)]
    token_of = [let(my_token + index * down) for index in range(tile_tokens // down)]
    sums = {(row, token, number): Register(f32(0.0)) for row, token, number in _all(row_of, token_of, weights)}
    first_quad = let(product.input_of(band.first))
    with loop(0, product.columns // PART) as part:
        for bundle in band.each():
            for factor, memory in zip(bundle, weights, strict=True):
                _load_weights(scope, factor, band.first, part, memory, tile_rows)
        _load_inputs(scope, product, first_token, count, let(first_quad + part * QUADS), inputs, tile_tokens)
        barrier()
        with loop(0, QUADS) as quad:
            x = [let(inputs[token * _STRIDE + quad]) for token in token_of]
            w = [[let(memory[row * _STRIDE + quad]) for memory in weights] for row in row_of]
            for (row, token, number), register in sums.items():
                one, other = w[row][number], x[token]
                for index in range(4):
                    register.value = register.value + lane(one, index) * lane(other, index)
        barrier()
    for row_index, own_row in enumerate(row_of):
        for token_index, own_token in enumerate(token_of):
            row, token = let(band.first + own_row), let(first_token + own_token)
            with when(T.And(row < band.rows, token < count)):
                found = [sums[row_index, token_index, number].value for number in range(len(weights))]
                band.finish(row, token, found)


def _all(*counted: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """All combinations of the sequences' indices."""
    return iterate(*(range(len(each)) for each in counted))


def _across(threads: int, rows: int, tokens: int) -> int:
    """The number of threads along the rows that makes each thread's tile nearly square.

    Raises ValueError if the tile has fewer results than there are threads.
    """
    fitting = [across for across in _powers(threads) if across <= rows and threads // across <= tokens]
    if not fitting:
        raise ValueError(f"{threads} threads have too little work in a tile of {rows} by {tokens}")
    return min(fitting, key=lambda across: abs(rows // across - tokens * across // threads))


def _powers(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]


def _load_weights(scope: Scope, factor: Factor, first: Value, part: Value, memory: Buffer, tile_rows: int) -> None:
    """Load a part of each row; rows beyond the end repeat the last one."""
    words = Words(scope.w4, scope.w1)
    with strided(scope, tile_rows) as local:
        row = hold(T.min(first + local, i32(factor.matrix.rows - 1)), "int32")
        for index, value in enumerate(read_values(words, factor.matrix, row, part)):
            store(memory, local * _STRIDE + index, value)


def _load_inputs(
    scope: Scope, product: Product, first: Value, count: Value, start: Value, memory: Buffer, tile_tokens: int
) -> None:
    """Load a part of each token, from vector `start` of its activations on; tokens beyond the end repeat the last."""
    with strided(scope, tile_tokens * QUADS) as index:
        local, quad = let(quotient(index, QUADS)), let(remainder(index, QUADS))
        token = T.max(T.min(first + local, count - 1), 0)
        store(memory, local * _STRIDE + quad, scope.x[token * (product.inputs // 4) + start + quad])

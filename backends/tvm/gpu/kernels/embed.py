"""Token embedding, from quantized rows of any block type, and what given rows add behind layers."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State, Tables
from edge.backends.tvm.gpu.kernels.attention.rows import position_of
from edge.backends.tvm.gpu.kernels.products.quants import Words, read_values
from edge.backends.tvm.gpu.kernels.threads import (
    Built,
    Scope,
    build,
    f32,
    i32,
    let,
    spread,
    store,
    store_four,
    strided,
    to_int,
    when,
)
from edge.backends.tvm.gpu.weights import Matrix, Piece
from edge.backends.tvm.packing.blocks import PART

_THREADS = 64  # of a workgroup, which looks one token up


def embed(
    name: str, piece: Piece, tables: Tables, tokens: int, scale: float = 1.0, positions: Matrix | None = None
) -> Built:
    """Write rows of `out`, float32 [tokens, padded hidden], for the tokens whose rows are in the piece; others stay.

    positions: learned ones, in the buffer `rest`. tokens: the maximum.
    Buffers: out; tokens int32; w4, w1 the piece; r4, r1 the buffer `rest`, where there are positions; tables.
    """
    matrix = piece.matrix

    def body(scope: Scope) -> None:
        row = let(scope.tokens[scope.row] - i32(piece.first_row))
        inside = T.And(T.And(row >= 0, row < matrix.rows), scope.row < to_int(scope.tables[State.COUNT]))
        with when(inside), strided(scope, matrix.parts) as part:
            values = read_values(Words(scope.w4, scope.w1), matrix, row, part)
            if scale != 1:
                values = [value * spread(f32(scale)) for value in values]
            if positions:
                position = let(position_of(scope, tables, scope.row))
                learned = read_values(Words(scope.r4, scope.r1), positions, position, part)
                values = [value + other for value, other in zip(values, learned, strict=True)]
            at = let(scope.row * matrix.columns + part * PART)
            for index, value in enumerate(values):
                store_four(scope.out, at + index * 4, value)

    reads = {"tokens": "int32", "w4": "uint32x4", "w1": "uint32"}
    reads |= {"r4": "uint32x4", "r1": "uint32"} if positions else {}
    return build(name, _THREADS, reads | {"tables": "uint32"}, {"out": "float32"}, (), body, (1, tokens), 1)


def add_given(name: str, tokens: int, padded: int) -> Built:
    """`out`, float32 [tokens, padded], += the layer's part of given rows (`Network.deepstack`), whose ids are negative.

    Scalar: layer. tokens: the maximum. Buffers: tokens int32; deepstack float32 [layers, tokens, padded]; tables.
    """

    def body(scope: Scope) -> None:
        inside = T.And(scope.row < to_int(scope.tables[State.COUNT]), scope.tokens[scope.row] < 0)
        with when(inside), strided(scope, padded) as at:
            own = let(scope.row * padded + at)
            part = scope.deepstack[scope.layer * (tokens * padded) + own]
            store(scope.out, own, scope.out[own] + part)

    reads = {"tokens": "int32", "deepstack": "float32", "tables": "uint32"}
    return build(name, _THREADS, reads, {"out": "float32"}, ("layer",), body, (1, tokens), 1)

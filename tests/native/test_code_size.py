"""How long compiled code becomes with the size of a head: TVM's simplifier must not expand what is in variables."""

from __future__ import annotations

import pytest

pytest.importorskip("tvm")


def test_encoding_int8_grows_with_the_head() -> None:
    """Maxima of maxima of 32 vectors, in a head of 512, took the compiler minutes and 17 GB."""
    eight, sixteen = length_of(8), length_of(16)
    assert eight < sixteen < 3 * eight


def length_of(vectors: int) -> int:
    """Characters of the simplified code that encodes a row of so many vectors in int8."""
    from tvm import IRModule
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx import transform
    from tvm.tirx.script.builder import ir as T  # noqa: N812

    from edge.backends.tvm.cpu.kernels.isas import ISAS
    from edge.backends.tvm.cpu.kernels.row_formats import encode
    from edge.backends.tvm.cpu.kernels.vectors import LANES, let, load, store

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("encode")
        row = T.match_buffer(T.arg("row", T.handle()), (T.int64(vectors * LANES),), "float32")
        codes = T.match_buffer(T.arg("codes", T.handle()), (T.int64(vectors * LANES),), "int8")
        values = [let(load(row, T.int64(part * LANES)) * T.float32(3)) for part in range(vectors)]
        elements, _ = encode(ISAS["avx2"], "int8", values)
        for part, each in enumerate(elements):
            store(codes, T.int64(part * LANES), each)
    return len(transform.StmtSimplify()(IRModule({"encode": builder.get()})).script())

"""Rows to logits."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.functions import soft_cap
from edge.backends.tvm.cpu.kernels.lanes import Value, i64, let, loop, quotient, store, when
from edge.backends.tvm.cpu.kernels.matmul import Inputs, Matrix
from edge.backends.tvm.cpu.phases.frame import Frame
from edge.backends.tvm.cpu.phases.stream import let_go


def head(f: Frame) -> None:
    """Logits of the last `wanted` tokens."""
    shape = f.shape
    first = f.count - f.wanted
    matrix = f.matrix(f.design.head, shape.hidden, "head")
    if not f.single:
        with f.phase("output_norm"), f.shared_out(f.wanted) as row:
            f.norm_row(first + row, row, "output_norm", None)
            f.quantize_row("normed", shape.padded_hidden, row, row, [f.design.head])
    row = f.thread if f.single else i64(0)
    if f.single:
        f.norm_row(i64(0), row, "output_norm", None)
        f.quantize_row("normed", shape.padded_hidden, row, row, [f.design.head])
        f.mark("output_norm")
    inputs = f.inputs("normed", shape.padded_hidden)
    with loop(i64(0), f.at("head_parts")) as part:  # one, unless weights are streamed
        with f.phase("head"):
            start = let(part * f.at("head_step"))
            stop = let(T.min(start + f.at("head_step"), i64(shape.padded_vocab // 16)))
            with f.shared_out(stop - start) as index:
                tile = let(start + index)
                with when(f.wanted == 1):
                    _logits_tile(f, matrix, tile, inputs, [row], [i64(0)])
                if not f.single:
                    with when(f.wanted > 1), loop(i64(0), quotient(f.wanted + (f.batch - 1), f.batch)) as block:
                        rows = [let(block * f.batch + index) for index in range(f.batch)]
                        _logits_tile(f, matrix, tile, inputs, rows, rows)
        let_go(f, let(part + shape.layers))


def _logits_tile(
    f: Frame, matrix: Matrix, tile: Value, inputs: Inputs, rows: Sequence[Value], out: Sequence[Value]
) -> None:
    sums = f.multiply(matrix, tile, inputs, rows)
    for row, each in zip(out, sums, strict=True):
        with when(row < f.wanted):
            logits = soft_cap(each.value, f.shape.logit_cap)
            store(f.logits, row * f.shape.padded_vocab + tile * 16, logits)

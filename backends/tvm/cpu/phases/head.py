"""Rows to logits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.arguments import Job
from edge.backends.tvm.cpu.kernels.functions import soft_cap
from edge.backends.tvm.cpu.kernels.matmul import Inputs, Matrix
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, loop, quotient, scaled, store, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.cpu.phases.streaming import evict_piece


def head(b: PassBuilder) -> None:
    """Logits of the last `wanted` tokens; in a job RESCORE, of the `given` tiles that are listed, with the activations
    that `estimate` left."""
    shape = b.shape
    rescores = b.job == Job.RESCORE if b.single and b.design.estimates else None
    first = b.count - b.wanted
    matrix = b.matrix(b.design.head, shape.hidden, "head")
    if not b.single:
        with b.phase("output_norm"), b.shared_out(b.wanted) as row:
            b.norm_row(first + row, row, "output_norm", None)
            b.quantize_row("normed", shape.padded_hidden, row, row, [b.design.head])
    row = b.thread if b.single else i64(0)
    if b.single:
        with nullcontext() if rescores is None else when(b.job != Job.RESCORE):
            b.norm_row(i64(0), row, "output_norm", None)
            b.quantize_row("normed", shape.padded_hidden, row, row, [b.design.head])
            b.mark("output_norm")
    inputs = b.inputs("normed", shape.padded_hidden)
    with loop(i64(0), b.at("head_parts")) as part:  # one, unless weights are streamed
        with b.phase("head"):
            start = let(part * b.at("head_step"))
            stop = let(T.min(start + b.at("head_step"), i64(shape.padded_vocab // 16)))
            count = stop - start if rescores is None else let(T.Select(rescores, b.given, stop - start))
            with b.shared_out(count) as index:
                tile = let(start + index)
                if rescores is not None:
                    listed = T.cast(b.integers[b.at("head_tiles") + index], "int64")
                    tile = let(T.Select(rescores, listed, tile))
                if not b.apart:
                    with when(b.wanted == 1):
                        logits_tile(b, matrix, tile, inputs, [row], [i64(0)])
                if not b.single:
                    with when(b.wanted > (0 if b.apart else 1)), loop(i64(0), _batches(b)) as block:
                        rows = [let(block * b.batch + index) for index in range(b.batch)]
                        logits_tile(b, matrix, tile, inputs, rows, rows)
        evict_piece(b, let(part + shape.layers))


def rescore(b: PassBuilder) -> None:
    """Logits of several tokens, of the `given` tiles that are listed, with the activations that `estimate` left."""
    matrix, inputs = b.matrix(b.design.head, b.shape.hidden, "head"), b.inputs("normed", b.shape.padded_hidden)
    with b.phase("head"), b.shared_out(b.given) as index:
        tile = let(T.cast(b.integers[b.at("head_tiles") + index], "int64"))
        with loop(i64(0), _batches(b)) as block:
            rows = [let(block * b.batch + index) for index in range(b.batch)]
            logits_tile(b, matrix, tile, inputs, rows, rows)


def _batches(b: PassBuilder) -> Value:
    return quotient(b.wanted + (b.batch - 1), b.batch)


def logits_tile(
    b: PassBuilder, matrix: Matrix, tile: Value, inputs: Inputs, rows: Sequence[Value], out: Sequence[Value]
) -> None:
    sums = b.multiply(matrix, tile, inputs, rows)
    for row, each in zip(out, sums, strict=True):
        with when(row < b.wanted):
            logits = soft_cap(scaled(each.value, b.shape.logit_scale), b.shape.logit_cap)
            store(b.logits, row * b.shape.padded_vocab + tile * 16, logits)

"""LoRA adapters, unmerged: A x of all matrices of a phase before it, and B (A x) added to each tile of its products.

A step divides the columns of A between the threads, each of which then adds up the parts: ranks are few, and a barrier
costs less than reading A once per thread. A chunk divides the tokens. The ranks are read from the table of the run, so
that one compiled pass serves all adapters; without one, no barrier is added.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.matmul import Inputs, Matrix, multiply
from edge.backends.tvm.cpu.kernels.vectors import Register, Value, floats, i64, let, load, loop, quotient, store, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.design import low_rank_blocks
from edge.backends.tvm.packing.blocks import BLOCKS


def adapt(b: PassBuilder, group: str, layer: Value, inputs: Inputs) -> None:
    """A x of the matrices of `group`, in a phase of its own; nothing if this layer has no adapter there."""
    if not b.design.lora:
        return
    kind, _ = low_rank_blocks(b.variants(group), exact=b.design.exact)
    names = b.groups[group]
    found = [let(b.layer_at(layer, f"{name}.lora_a")) for name in names]
    with when(functools.reduce(T.max, found) > 0):
        with b.phase("adapt", layer):
            for name, quants in zip(names, found, strict=True):
                with when(quants > 0):
                    scales = let(b.layer_at(layer, f"{name}.lora_a.scales"))
                    matrix = Matrix(BLOCKS[kind], b.columns(name), quants, scales)
                    (_columns if b.single else _tokens)(b, name, matrix, inputs)
        if b.single:
            for name, quants in zip(names, found, strict=True):
                with when(quants > 0):
                    _add_up(b, name)


def _columns(b: PassBuilder, name: str, matrix: Matrix, inputs: Inputs) -> None:
    """The thread's columns of A times the row."""
    at, span = b.low_rank_at(name, b.thread, "lora_parts"), b.range(matrix.pieces)
    with loop(i64(0), quotient(b.at("lora_rank"), 16)) as tile:
        (found,) = multiply(b.isa, b.adapters, matrix, tile, inputs, [b.thread], b.target.fetch_ahead, span)
        store(b.floats, at + tile * 16, found.value)


def _add_up(b: PassBuilder, name: str) -> None:
    """The parts of all threads, in the thread's own row."""
    at, total = b.low_rank_at(name, b.thread), Register()
    with loop(i64(0), quotient(b.at("lora_rank"), 16)) as tile:
        total.value = floats(0)
        with loop(i64(0), b.threads) as thread:
            total.value = total.value + load(b.floats, b.low_rank_at(name, thread, "lora_parts") + tile * 16)
        store(b.floats, at + tile * 16, total.value)


def _tokens(b: PassBuilder, name: str, matrix: Matrix, inputs: Inputs) -> None:
    """All of A times the thread's tokens; the last ones may lie beyond the chunk."""
    with b.shared_out(quotient(b.count + (b.batch - 1), b.batch)) as batch:
        tokens: Sequence[Value] = [let(batch * b.batch + index) for index in range(b.batch)]
        with loop(i64(0), quotient(b.at("lora_rank"), 16)) as tile:
            products = multiply(b.isa, b.adapters, matrix, tile, inputs, tokens)
            for token, each in zip(tokens, products, strict=True):
                store(b.floats, b.low_rank_at(name, token) + tile * 16, each.value)

"""LoRA adapters, unmerged: A x of all matrices of a phase first, and B (A x) added to each tile of its products.

In a step, the threads share out parts of the columns of A, and each then sums all parts. There is no barrier between
the two: a thread signals that its parts are complete, goes on with its first product, and waits for the others only
when it needs A x. Batches and drafts compute the same parts for each token, and sum them in a phase of their own. In a
chunk, the threads divide the tokens. Ranks are read from the table of the run, so that one compiled pass serves all
adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.matmul import Inputs, Matrix, multiply
from edge.backends.tvm.cpu.kernels.threads import arrive, wait_for_others
from edge.backends.tvm.cpu.kernels.vectors import Register, Value, floats, i64, let, load, loop, quotient, store, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.design import low_rank_blocks
from edge.backends.tvm.packing.blocks import BLOCKS

RowOf = Callable[[Value], Value]


def adapt(
    b: PassBuilder, group: str, layer: Value, inputs: Inputs, names: Sequence[str] = (),
    row_of: RowOf | None = None,
) -> None:  # fmt: skip
    """Compute A x for the matrices of `group`; nothing if this layer has no adapter there.

    names: a subset of the group's matrices. row_of: the row of `inputs` for a token, which is 0 in a step; by default
    as `PassBuilder.rows`.
    """
    if not b.design.lora:
        return
    kind, _ = low_rank_blocks(b.variants(group), exact=b.design.exact)
    names = names or b.groups[group]
    places = [let(b.layer_at(layer, f"{name}.lora_a")) for name in names]
    arrivals = b.counter() if b.single else None  # of every thread, once its parts are there
    with when(functools.reduce(T.max, places) > 0):
        for name, quants in zip(names, places, strict=True):
            with when(quants > 0):
                scales = let(b.layer_at(layer, f"{name}.lora_a.scales"))
                matrix = Matrix(BLOCKS[kind], b.columns(name), quants, scales)
                (_columns if b.stepwise else _tokens)(b, name, matrix, inputs, row_of)
        if b.stepwise and not b.single:
            b.end_phase("adapt", layer)
            with b.shared_out(b.count) as token:
                for name, quants in zip(names, places, strict=True):
                    with when(quants > 0):
                        _add_up(b, name, token, token)
        if arrivals is None:
            b.end_phase("adapt", layer)
        else:
            b.mark("adapt", layer)
            arrivals.value = arrive(b.lines, b.thread)
    if arrivals is not None:
        b.add_up |= {name: functools.partial(_add_up_once, b, name, arrivals, b.counter()) for name in names}


def _columns(b: PassBuilder, name: str, matrix: Matrix, inputs: Inputs, row_of: RowOf | None) -> None:
    """The thread's parts of the columns of A times the row of each token."""
    with loop(*b.sums()) as part, b.batches() as tokens, loop(i64(0), quotient(b.at("lora_rank"), 16)) as tile:
        rows = [let(row_of(token)) for token in tokens] if row_of else b.rows(tokens)
        products = multiply(b.isa, b.adapters, matrix, tile, inputs, rows, b.target, b.range_of(part, matrix.pieces))
        for token, each in zip(tokens, products, strict=True):
            store(b.floats, _part_at(b, name, token, part) + tile * 16, each.value)


def _part_at(b: PassBuilder, name: str, token: Value, part: Value) -> Value:
    return b.low_rank_at(name, token * b.parts + part, "lora_parts")


def _add_up_once(b: PassBuilder, name: str, arrivals: Register, done: Register) -> None:
    """Wait for all parts and sum them, before the thread's first use of A x."""
    with when(done.value == 0):
        wait_for_others(b.lines, b.thread, b.threads, arrivals.value, b.notes)
        _add_up(b, name, i64(0), b.thread)
        done.value = T.int32(1)


def _add_up(b: PassBuilder, name: str, token: Value, row: Value) -> None:
    """Sum all parts into row `row`."""
    at, total = b.low_rank_at(name, row), Register()
    with loop(i64(0), quotient(b.at("lora_rank"), 16)) as tile:
        total.value = floats(0)
        with loop(i64(0), b.parts) as part:
            total.value = total.value + load(b.floats, _part_at(b, name, token, part) + tile * 16)
        store(b.floats, at + tile * 16, total.value)


def _tokens(b: PassBuilder, name: str, matrix: Matrix, inputs: Inputs, row_of: RowOf | None) -> None:
    """All of A times the thread's tokens; the last ones may lie beyond the chunk."""
    with b.shared_out(quotient(b.count + (b.batch - 1), b.batch)) as batch:
        tokens: Sequence[Value] = [let(batch * b.batch + index) for index in range(b.batch)]
        rows = [let(row_of(token)) for token in tokens] if row_of else tokens
        with loop(i64(0), quotient(b.at("lora_rank"), 16)) as tile:
            products = multiply(b.isa, b.adapters, matrix, tile, inputs, rows)
            for token, each in zip(tokens, products, strict=True):
                store(b.floats, b.low_rank_at(name, token) + tile * 16, each.value)

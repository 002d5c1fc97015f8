"""The kernels of a step: products with one token, bound by reading the weights.

S threads (`Tuning.split`) share the columns of R rows (`Tuning.rows`). Each row's S sums are added in shared memory by
the thread that then writes the result, so a kernel has one barrier. An RMSNorm before the product is free: the sums of
squares are accumulated along the way, since its scale is a factor of the whole result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State, Tuning
from edge.backends.tvm.gpu.kernels.norms import inverse_root
from edge.backends.tvm.gpu.kernels.products import tensor_steps
from edge.backends.tvm.gpu.kernels.products.inputs import Inputs, staged_bytes
from edge.backends.tvm.gpu.kernels.products.products import Band, Found, Product, workgroups
from edge.backends.tvm.gpu.kernels.products.quants import Sum, Words, needs_sums, sum_halves
from edge.backends.tvm.gpu.kernels.threads import (
    WARP,
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    added,
    barrier,
    begin,
    build,
    f32,
    hold,
    i32,
    let,
    loop,
    quotient,
    remainder,
    spread,
    store,
    strided,
    to_int,
    total,
    warp_sum,
    when,
)
from edge.backends.tvm.packing.blocks import PART


def step(product: Product, tuning: Tuning, *, last: bool = False) -> Built:
    """Build the kernel for one token: row 0 of `x`, or the last row of a pass (`last`).

    Buffers: out float32; x float32x4 [rows, columns]; w4, w1 the weights; rest, for a norm that lies elsewhere; tables
    for `last`; low, lora4 for adapters.
    With a residual: raw float32x4, which is normalized with weights in residual_w4 and added to x; sums float32x4
    receives the sum, since other workgroups still read x.
    """
    if tuning.workgroup < WARP:
        tuning = replace(tuning, stage=0)
    split = split_of(product.columns, tuning)
    slots = (1 + product.paired) * tuning.rows + 1
    memory_size = slots * tuning.workgroup
    tensor = tensor_steps.Form.of(product, tuning, split, tuning.stage - 8 * memory_size)
    split = tensor.split if tensor else split
    height = tuning.workgroup // split * tuning.rows
    at_once = tensor.bands if tensor else 1

    def body(scope: Scope) -> None:
        memory = scope.shared(min(2, at_once) * memory_size)
        scratch = (slots - 1) * scope.threads
        band = Band.of(scope, product, height)
        multiplied = tensor and tensor_steps.Multiplication(scope, product, tensor, height)
        if multiplied:
            multiplied.fetch()
        if tuning.stage:
            if not tensor or tensor.rounds > 1:
                band.prefetch(height)
            begin()
        row = hold(to_int(scope.tables[State.COUNT]) - 1, "int32") if last else i32(0)
        inputs = Inputs.of(scope, product, let(row * (product.columns // 4)), memory, split)
        if multiplied:
            multiplied.run(inputs, memory, scratch, lambda band, find: finish(scope, band, find))
            return
        if not product.per_head and staged_bytes(product) <= tuning.stage - 4 * memory_size:
            inputs = inputs.stage(memory, scratch)
        found = _multiply(scope, product, band, inputs, memory, split, tuning)
        barrier()
        finish(scope, band, found)

    def finish(scope: Scope, band: Band, find: Found) -> None:
        with strided(scope, height) as local:
            at = let(band.first + local)
            with when(at < band.rows):
                sums, squared = find(local)
                if squared is not None and product.norm:
                    scale = hold(inverse_root(squared, product.norm))
                    sums = [each * scale for each in sums]
                band.finish(at, i32(0), sums)

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32"}
    reads |= {"rest": "uint32x4"} if product.norm and product.norm_in_rest else {}
    reads |= {"raw": "float32x4", "residual_w4": "uint32x4"} if product.residual else {}
    reads |= product.reads | ({"tables": "uint32"} if last else {})
    writes = {"out": "float32"} | ({"sums": "float32x4"} if product.residual else {})
    groups = (-(-workgroups(product, height) // at_once), 1)
    return build(product.name, tuning.workgroup, reads, writes, (), body, groups)


def split_of(columns: int, tuning: Tuning) -> int:
    """Threads that share a row of a step's product."""
    return min(tuning.split, _power_of_two(columns // PART), tuning.workgroup)


@contextmanager
def _always() -> Iterator[None]:
    yield


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _multiply(
    scope: Scope, product: Product, band: Band, inputs: Inputs, memory: Buffer, split: int, tuning: Tuning
) -> Found:
    """Multiply the rows of a workgroup; the sums are in memory after a barrier."""
    words, parts, rows = Words(scope.w4, scope.w1), product.columns // PART, tuning.rows
    together = min(split, WARP) if tuning.stage else 1  # threads that add their sums without shared memory
    team, place = let(quotient(scope.thread, split)), let(remainder(scope.thread, split))
    factors = 1 + product.paired
    own = [let(T.min(band.first + team * rows + index, band.rows - 1)) for index in range(rows)]
    if product.per_head:
        inputs = replace(inputs, first=let(inputs.first + product.input_of(own[0])))
    sums = [Sum() for _ in range(rows * factors)]
    squares = Register(spread(f32(0.0)), "float32x4")
    for bundle in band.each():
        summed = any(needs_sums(factor.matrix.block) for factor in bundle)
        with loop(0, -(-parts // split)) as turn:
            part = let(turn * split + place)
            with when(part < parts) if parts % split else _always():
                x = inputs.read(part, squares)
                x_sums = sum_halves(x) if summed else []
                for number, factor in enumerate(bundle):
                    for index, row in enumerate(own):
                        sums[number * rows + index].add(words, factor.matrix, row, part, x, x_sums)

    values = [each.value for each in sums]
    squared_here = inputs.is_scaled_late and inputs.squared is None
    if squared_here:
        values.append(total(squares.value))
    if together > 1:
        values = [warp_sum(each, together) for each in values]
    for slot, value in enumerate(values):
        store(memory, scope.thread + slot * scope.threads, value)

    def find(local: Value) -> tuple[list[Value], Value | None]:
        sums_at = let(quotient(local, rows) * split)
        own_at = let(sums_at + remainder(local, rows) * scope.threads)

        def total_of(at: Value) -> Value:
            return added(memory, at, split // together, together)

        found = [total_of(own_at + number * rows * scope.threads) for number in range(factors)]
        return found, total_of(sums_at + len(sums) * scope.threads) if squared_here else inputs.squared

    return find

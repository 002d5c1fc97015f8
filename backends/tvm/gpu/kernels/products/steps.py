"""The kernels of a step: products with one token, or with a few that get the same results as alone, bound by reading
the weights.

S threads (`Tuning.split`) share the columns of R rows (`Tuning.rows`). Each row's S sums are added in shared memory by
the thread that then writes the result, so a kernel has one barrier. An RMSNorm before the product is free: the sums of
squares are accumulated along the way, since its scale is a factor of the whole result.

For several tokens, a thread decodes a part of its rows once and multiplies it by the activations of each. Every sum has
its terms in the order of a step. Tensor cores are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu import MOST_TOGETHER
from edge.backends.tvm.gpu.design import State, Tuning
from edge.backends.tvm.gpu.hosts import PORTABLE
from edge.backends.tvm.gpu.kernels.norms import inverse_root
from edge.backends.tvm.gpu.kernels.products import tensor_steps
from edge.backends.tvm.gpu.kernels.products.inputs import Inputs, staged_bytes
from edge.backends.tvm.gpu.kernels.products.products import Band, Found, Product, workgroups
from edge.backends.tvm.gpu.kernels.products.quants import Sum, Weights, Words, needs_sums, sum_halves
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


def step(product: Product, tuning: Tuning, *, last: bool = False, tokens: int = 1) -> Built:
    """Build the kernel for one token: row 0 of `x`, or the last row of a pass (`last`); or for all of a pass, at most
    `tokens`.

    Buffers: out float32; x float32x4 [rows, columns]; w4, w1 the weights; rest, for a norm that lies elsewhere; tables
    for `last` and several tokens, if it can be bound beside the others: else all `tokens` are computed; low, lora4 for
    adapters.
    With a residual: raw float32x4, which is normalized with weights in residual_w4 and added to x; sums float32x4
    receives the sum, since other workgroups still read x.
    """
    together = min(tokens, MOST_TOGETHER)
    if tuning.workgroup < WARP or together > 1:
        tuning = replace(tuning, stage=0)
    if together > 1:  # more rows would take too many registers
        tuning = replace(tuning, ahead=0, rows=max(1, tuning.rows // (1 + product.paired)))
    split = split_of(product.columns, tuning)
    slots = (1 + product.paired) * tuning.rows + 1
    memory_size = slots * tuning.workgroup
    tensor = tensor_steps.Form.of(product, tuning, split, tuning.stage - 8 * memory_size)
    split = tensor.split if tensor else split
    height = tuning.workgroup // split * tuning.rows
    at_once = tensor.bands if tensor else 1

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32"}
    reads |= {"rest": "uint32x4"} if product.norm and product.norm_in_rest else {}
    reads |= {"raw": "float32x4", "residual_w4": "uint32x4"} if product.residual else {}
    reads |= product.reads
    writes = {"out": "float32"} | ({"sums": "float32x4"} if product.residual else {})
    counts = last or (together > 1 and len(reads) + len(writes) < PORTABLE.buffers)
    reads |= {"tables": "uint32"} if counts else {}

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
        if together > 1:
            several(scope, band, memory)
            return
        row = hold(to_int(scope.tables[State.COUNT]) - 1, "int32") if last else i32(0)
        inputs = Inputs.of(scope, product, let(row * (product.columns // 4)), memory, split)
        if multiplied:
            multiplied.run(inputs, memory, scratch, lambda band, find: finish(scope, band, find, i32(0)))
            return
        if not product.per_head and staged_bytes(product) <= tuning.stage - 4 * memory_size:
            inputs = inputs.stage(memory, scratch)
        (found,) = _multiply(scope, product, band, [inputs], split, tuning)
        finish(scope, band, found.share(memory), i32(0))

    def several(scope: Scope, band: Band, memory: Buffer) -> None:
        count, first = to_int(scope.tables[State.COUNT]) if counts else i32(tokens), let(scope.row * together)
        count = hold(count, "int32")
        left = hold(count - first, "int32")
        rows = [hold(T.min(first + number, count - 1), "int32") for number in range(together)]
        inputs = [Inputs.of(scope, product, let(row * (product.inputs // 4)), memory, split) for row in rows]
        exist = [left > number for number in range(together)]
        found = _multiply(scope, product, band, inputs, split, tuning, exist)
        for number, each in enumerate(found):
            if number:
                barrier()  # the sums of the token before have been read
            finish(scope, band, each.share(memory), let(first + number), exist[number])

    def finish(scope: Scope, band: Band, find: Found, token: Value, exists: Value | None = None) -> None:
        with strided(scope, height) as local:
            at = let(band.first + local)
            with when(at < band.rows if exists is None else T.And(exists, at < band.rows)):
                sums, squared = find(local)
                if squared is not None and product.norm:
                    scale = hold(inverse_root(squared, product.norm))
                    sums = [each * scale for each in sums]
                band.finish(at, token, sums)

    groups = -(-workgroups(product, height) // at_once), -(-tokens // together)
    return build(product.name, tuning.workgroup, reads, writes, (), body, groups, together if together > 1 else 0)


def split_of(columns: int, tuning: Tuning) -> int:
    """Threads that share a row of a step's product."""
    return min(tuning.split, _power_of_two(columns // PART), tuning.workgroup)


@contextmanager
def _always() -> Iterator[None]:
    yield


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class _Sums:
    """A thread's sums for a token: of its rows for each factor, then perhaps that of the squares. split: threads that
    share rows; together: those of them that have added their sums already."""

    scope: Scope
    inputs: Inputs
    values: list[Value]
    rows: int
    split: int
    together: int

    def share(self, memory: Buffer) -> Found:
        """Bring them to memory. Ends with a barrier."""
        scope, rows, factors = self.scope, self.rows, 1 + self.inputs.product.paired
        for slot, value in enumerate(self.values):
            store(memory, scope.thread + slot * scope.threads, value)
        barrier()

        def find(local: Value) -> tuple[list[Value], Value | None]:
            sums_at = let(quotient(local, rows) * self.split)
            own_at = let(sums_at + remainder(local, rows) * scope.threads)

            def total_of(at: Value) -> Value:
                return added(memory, at, self.split // self.together, self.together)

            found = [total_of(own_at + number * rows * scope.threads) for number in range(factors)]
            squared_here = len(self.values) > rows * factors
            return found, total_of(sums_at + rows * factors * scope.threads) if squared_here else self.inputs.squared

        return find


def _multiply(
    scope: Scope, product: Product, band: Band, inputs: Sequence[Inputs], split: int, tuning: Tuning,
    exist: Sequence[Value] = (),
) -> list[_Sums]:  # fmt: skip
    """Multiply the rows of a workgroup by the inputs of each token. exist: if there are several, which of them are in
    the pass."""
    words, parts, rows = Words(scope.w4, scope.w1), product.columns // PART, tuning.rows
    together = min(split, WARP) if tuning.stage else 1  # threads that add their sums without shared memory
    team, place = let(quotient(scope.thread, split)), let(remainder(scope.thread, split))
    factors = 1 + product.paired
    own = [let(T.min(band.first + team * rows + index, band.rows - 1)) for index in range(rows)]
    if product.per_head:
        inputs = [replace(each, first=let(each.first + product.input_of(own[0]))) for each in inputs]
    sums = [[Sum() for _ in range(rows * factors)] for _ in inputs]
    squares = [Register(spread(f32(0.0)), "float32x4") for _ in inputs]
    for bundle in band.each():
        summed = any(needs_sums(factor.matrix.block) for factor in bundle)
        with loop(0, -(-parts // split)) as turn:
            part = let(turn * split + place)
            with when(part < parts) if parts % split else _always():
                read = [(factor.matrix, row) for factor in bundle for row in own]
                held = [Weights.read(words, *each, part).held() for each in read] if exist else []
                for number, of_token in enumerate(inputs):
                    with when(exist[number]) if number else _always():
                        x = of_token.read(part, squares[number])
                        x_sums = sum_halves(x) if summed else []
                        for index, (matrix, row) in enumerate(read):
                            weights = held[index] if held else Weights.read(words, matrix, row, part)
                            sums[number][index].add(matrix.block, weights, x, x_sums)

    found = []
    for of_token, its, of_squares in zip(inputs, sums, squares, strict=True):
        values = [each.value for each in its]
        if of_token.is_scaled_late and of_token.squared is None:
            values.append(total(of_squares.value))
        if together > 1:
            values = [warp_sum(each, together) for each in values]
        found.append(_Sums(scope, of_token, values, rows, split, together))
    return found

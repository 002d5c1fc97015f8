"""The products of a step on NVIDIA's tensor cores, in CUDA: fewer instructions for a weight, and reads far ahead.

A tensor core multiplies 16 rows of A by 8 columns of B, 16 products each. Thread 4 g + t of a warp holds four of the 16
columns of A, in the rows g and g + 8. Here these four are a part of its own in each row, with integers as bfloat16, so
that a load brings 16 bytes of one row. Columns 2 t and 2 t + 1 of B have the activations of this part, their high and
their low halves (`tensor_tiles.py`), at the places of thread t's columns in A, and zeros elsewhere. So the products of
a part arrive at the thread that has its scale.

Weights do not depend on the previous kernel: the first ones are read into registers while it still runs. A workgroup
copies activations to shared memory once, and goes through several bands of rows: while it multiplies one, it reads the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import Tuning
from edge.backends.tvm.gpu.kernels.products.inputs import Inputs
from edge.backends.tvm.gpu.kernels.products.products import Band, Factor, Found, Product, workgroups
from edge.backends.tvm.gpu.kernels.products.quants import Raw, bf16_pairs, has_minimum, places, raw_sizes, scales_of
from edge.backends.tvm.gpu.kernels.products.tensor_tiles import low_halves, packed
from edge.backends.tvm.gpu.kernels.threads import (
    WARP,
    Buffer,
    Register,
    Registers,
    Scope,
    Value,
    added,
    barrier,
    f32,
    hold,
    i32,
    join,
    lane,
    let,
    loop,
    quotient,
    remainder,
    select,
    store,
    u32,
    warp_sum,
    when,
)
from edge.backends.tvm.packing.blocks import PART, IntegerBlock

GROUPS = 256  # workgroups that have a band at once, of which large cards' multiprocessors run two each
_ROWS, _PARTS = 16, 4  # of a warp's product
_ONES = 0x3F803F80  # two bfloat16


@dataclass(frozen=True)
class Form:
    """The distribution of a product. split: threads that share a row. tiles: of 16 rows each, per warp. stages: parts
    of a row that a thread reads ahead; rounds: how often per row. bands: of a workgroup, one after the other."""

    split: int
    tiles: int
    stages: int
    rounds: int
    bands: int

    @classmethod
    def of(cls, product: Product, tuning: Tuning, split: int, free: int) -> Form | None:
        """The form of a product; None if tensor cores cannot multiply it. free: bytes of shared memory for
        activations."""
        matrices = [factor.matrix for factor in product.factors]
        exact = all(isinstance(matrix.block, IntegerBlock) for matrix in matrices)
        if product.per_head or not tuning.ahead or tuning.rows % 2 or not exact or 16 * _vectors(product) > free:
            return None
        split = max(_PARTS, min(split, tuning.workgroup * _PARTS // WARP))
        turns = -(-product.columns // (PART * split))
        quads = len(product.bundles[0]) * max(raw_sizes(matrix.block)[0] for matrix in matrices) * tuning.rows
        rounds = -(-turns // max(1, tuning.ahead // quads))
        bands = max(1, workgroups(product, tuning.workgroup // split * tuning.rows) // GROUPS)
        return cls(split, tuning.rows // 2, -(-turns // rounds), rounds, bands)


class Multiplication:
    """The rows of a workgroup. First `fetch`, then `run`."""

    def __init__(self, scope: Scope, product: Product, form: Form, height: int) -> None:
        self.scope, self.product, self.form, self.height = scope, product, form, height
        inside, self.warp = let(remainder(scope.thread, WARP)), let(quotient(scope.thread, WARP))
        self.group, self.place = let(quotient(inside, _PARTS)), let(remainder(inside, _PARTS))
        self.sharing = form.split // _PARTS  # warps that share rows
        self.part = let(remainder(self.warp, self.sharing) * _PARTS + self.place)  # of the first turn
        self.own = let(quotient(self.warp, self.sharing) * (form.tiles * _ROWS) + self.group)  # first row in a band
        self.factors, blocks = len(product.bundles[0]), [factor.matrix.block for factor in product.factors]
        rows, sizes = range(2 * form.tiles), [max(each) for each in zip(*map(raw_sizes, blocks), strict=True)]
        self.held = [
            [[_Held(*sizes) for _ in rows] for _ in range(self.factors)] for _ in range(form.stages)
        ]  # [stages, factors, rows]
        self.sums = [[Register(f32(0.0)) for _ in rows] for _ in range(self.factors)]

    @property
    def parts(self) -> int:
        return self.product.columns // PART

    def fetch(self) -> None:
        """Begin to read the first weights, which no other kernel writes."""
        band = self._band(i32(0))
        rows = self._rows(band)
        for bundle in band.each():
            for stage, held in enumerate(self.held):
                self._fetch(held, bundle, rows, self._part(i32(stage)))

    def run(self, inputs: Inputs, memory: Buffer, scratch: int, finish: Callable[[Band, Found], None]) -> None:
        """Multiply by the inputs, which are copied to shared memory first (scratch: see `Inputs.bring`), and finish
        each band. memory: twice a band's need, if there are several."""
        staged, inputs = self._bring(inputs, memory, scratch)
        form = self.form
        with loop(0, form.bands) as number:
            band, following = self._band(number), self._band(number + 1)
            rows, next_rows = self._rows(band), self._rows(following) if form.bands > 1 else []
            for each in self.sums:
                for value in each:
                    value.value = f32(0.0)
            for bundle in band.each():
                with loop(0, form.rounds) as done:
                    for stage, held in enumerate(self.held):
                        turn = let(done * form.stages + stage)
                        self._multiply(held, bundle, self._part(turn), staged)
                        if form.rounds > 1:
                            with when(done < form.rounds - 1):
                                self._fetch(held, bundle, rows, self._part(turn + form.stages))
                        if form.bands > 1:
                            with when(T.And(done == form.rounds - 1, number < form.bands - 1)):
                                for next_bundle in following.each():
                                    self._fetch(held, next_bundle, next_rows, self._part(i32(stage)))
            start = let(remainder(number, 2) * (scratch + self.scope.threads))  # while others read the band before's
            finish(band, self._add_up(memory, start, inputs))

    def _add_up(self, memory: Buffer, start: Value, inputs: Inputs) -> Found:
        """Add the sums of the warps that share rows."""
        form, threads, count = self.form, self.scope.threads, 2 * self.form.tiles
        for number, sums in enumerate(self.sums):
            for index, each in enumerate(sums):
                at = self.scope.thread + (number * count + index) * threads
                store(memory, start + at, warp_sum(each.value, _PARTS))
        barrier()

        def find(local: Value) -> tuple[list[Value], Value | None]:
            tile, own = let(quotient(local, _ROWS)), let(remainder(local, _ROWS))
            warp = quotient(tile, form.tiles) * self.sharing
            slot = remainder(tile, form.tiles) * 2 + quotient(own, 8)
            at = let(start + slot * threads + warp * WARP + remainder(own, 8) * _PARTS)
            size = count * threads
            found = [added(memory, at + number * size, self.sharing, WARP) for number in range(self.factors)]
            return found, inputs.squared

        return find

    def _band(self, number: Value) -> Band:
        """Band `number` of this workgroup."""
        whole = hold(self.scope.group * self.form.bands + number, "int32") if self.form.bands > 1 else self.scope.group
        return Band.of(self.scope, self.product, self.height, whole)

    def _rows(self, band: Band) -> list[Value]:
        """The rows of which this thread has parts."""
        first = let(band.first + self.own)
        return [hold(T.min(first + 8 * number, band.rows - 1), "int32") for number in range(2 * self.form.tiles)]

    def _part(self, turn: Value) -> Value:
        return let(turn * self.form.split + self.part)

    @property
    def _overruns(self) -> bool:
        """Whether some threads have no part in the last turns."""
        return self.form.rounds * self.form.stages * self.form.split > self.parts

    def _fetch(
        self, held: Sequence[Sequence[_Held]], bundle: Sequence[Factor], rows: Sequence[Value], part: Value
    ) -> None:
        part = hold(T.min(part, i32(self.parts - 1)), "int32") if self._overruns else part
        for factor, own in zip(bundle, held, strict=True):
            for row, each in zip(rows, own, strict=True):
                each.fetch(self.scope, factor, row, part)

    def _bring(self, inputs: Inputs, memory: Buffer, scratch: int) -> tuple[Buffer, Inputs]:
        """Vector [2h + j, part, low] has the values 16h + 4j + i and 16h + 4(j + 2) + i, as `bf16_pairs` has weights:
        high halves, then low ones. The last vector is zero."""
        stride, zero = _stride(self.product), _vectors(self.product) - 1
        staged = self.scope.shared(zero + 1, "uint32x4")
        with when(self.scope.thread == 0):
            store(staged, i32(zero), T.Broadcast(u32(0), 4))

        def places_of(item: Value) -> list[Value]:
            which = let(remainder(item, 4))
            at = let(quotient(item, 4) * 8 + quotient(which, 2) * 4 + remainder(which, 2))
            return [at, at + 2]

        def put(item: Value, x: Sequence[Value]) -> None:
            pairs = [(hold(lane(x[0], index)), hold(lane(x[1], index))) for index in range(4)]
            high = [packed(*pair) for pair in pairs]
            low = [low_halves(pair, each) for pair, each in zip(pairs, high, strict=True)]
            at = let(remainder(item, 4) * stride + quotient(item, 4) * 2)
            store(staged, at, join(high))
            store(staged, at + 1, join(low))

        return staged, inputs.bring(memory, scratch, self.product.columns // 8, places_of, put)

    def _multiply(self, held: Sequence[Sequence[_Held]], bundle: Sequence[Factor], part: Value, staged: Buffer) -> None:
        """Add a part of each thread's rows."""
        stride, zero = _stride(self.product), _vectors(self.product) - 1
        has_any = quotient(self.group, 2) == self.place  # this thread passes activations: of its own part
        has_any = T.And(has_any, part < self.parts) if self._overruns else has_any
        at = hold(select(has_any, part * 2 + remainder(self.group, 2), i32(zero)), "int32")
        step = hold(select(has_any, i32(stride), i32(0)), "int32")
        x = [let(staged[at + number * step]) for number in range(4)]
        minima = any(has_minimum(factor.matrix.block) for factor in bundle)
        x_sums = self._products([[[u32(_ONES)] * 4] * 4] * 2, x, 2) if minima else []
        for factor, of_rows, sums in zip(bundle, held, self.sums, strict=True):
            for first in range(0, len(sums), 2):
                raws = [each.raw for each in of_rows[first : first + 2]]
                pairs = [bf16_pairs(raw, factor.matrix, part) for raw in raws]
                scales = [scales_of(raw, factor.matrix, part) for raw in raws]
                products = self._products(pairs, x, len(scales[0]))
                for index, groups in enumerate(scales):
                    value = sums[first + index]
                    for number, group in enumerate(groups):
                        value.value = value.value + group.scale * products[number][index]
                        if group.minimum is not None:
                            halves = [each[0] for each in x_sums]
                            x_sum = halves[number] if len(groups) == 2 else halves[0] + halves[1]
                            value.value = value.value + group.minimum * x_sum

    def _products(
        self, pairs: Sequence[Sequence[Sequence[Value]]], x: Sequence[Value], count: int
    ) -> list[list[Value]]:
        """Sums of products of the rows g and g + 8, over all 32 values or (count 2) over halves: [count, 2]."""
        found = []
        for number in range(count):
            sums = Registers()
            for vector in range(4 // count * number, 4 // count * (number + 1)):
                one, other = (of_row[vector] for of_row in pairs)
                for first in (0, 2):
                    a = (one[first], other[first], one[first + 1], other[first + 1])
                    sums.change("edge_mma", *a, lane(x[vector], first), lane(x[vector], first + 1))
            found.append([hold(sums[0] + sums[1]), hold(sums[2] + sums[3])])
        return found


class _Held:
    """A part of a row that was read ahead."""

    def __init__(self, quads: int, words: int) -> None:
        self._quads = [Register(T.Broadcast(u32(0), 4), "uint32x4") for _ in range(quads)]
        self._words = [Register(u32(0), "uint32") for _ in range(words)]

    def fetch(self, scope: Scope, factor: Factor, row: Value, part: Value) -> None:
        """Uses plain loads on purpose: ptxas moves read-only ones (`.nc`) behind griddepcontrol.wait."""
        quads, words = places(factor.matrix, row, part)
        for register, at in zip(self._quads, quads, strict=False):
            register.fetch(scope.w4, at)
        for register, at in zip(self._words, words, strict=False):
            register.fetch(scope.w1, at)

    @property
    def raw(self) -> Raw:
        return Raw([each.value for each in self._quads], [each.value for each in self._words])


def _vectors(product: Product) -> int:
    """Vectors of 4 words in shared memory: 8 for each part, and one of zeros."""
    return 4 * _stride(product) + 1


def _stride(product: Product) -> int:
    """Vectors from the first 8 values of all parts to the second ones; odd, so that writers hit different banks."""
    return 2 * (product.columns // PART) + 1

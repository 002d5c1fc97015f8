"""The products of a chunk on NVIDIA's tensor cores, in CUDA.

A tensor core multiplies bfloat16 and adds float32. An activation x becomes high + low, two bfloat16 whose sum is x to
2⁻¹⁷. The integers q of quantized weights are exact in bfloat16: x · q is high · q + low · q, and scales multiply sums
of 16 or 32 products. Other weights become high + low, too, and their products high · high + high · low + low · high.
(TF32 takes the time of two of these products for an error of 2⁻¹¹, and activations overflow float16.)

The warps of a workgroup share a part of the activations in shared memory. Each multiplies rows of its own, which it
dequantizes straight into the registers where tensor cores expect them: thread 4 g + t of a warp has, of the rows g and
g + 8, the values t, t + 4, … t + 28 of each part, one word of each quad. (Any order does, as long as weights and
activations have the same.) While a part is multiplied, the next one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State, Tuning
from edge.backends.tvm.gpu.kernels.products.products import Band, Factor, Product, workgroups
from edge.backends.tvm.gpu.kernels.products.quants import Words, is_scaled, read_scaled, read_values
from edge.backends.tvm.gpu.kernels.threads import (
    WARP,
    Buffer,
    Built,
    Register,
    Registers,
    Scope,
    Value,
    as_float,
    as_word,
    barrier,
    build,
    call,
    hold,
    i32,
    lane,
    let,
    loop,
    quotient,
    remainder,
    store,
    to_int,
    u32,
    when,
)
from edge.backends.tvm.packing.blocks import PART, FloatBlock

_WARPS = 4
_ROWS, _TOKENS = 16, 8  # of a product of tensor cores, which adds 16 columns
# Of a thread's 8 values of a part, as they lie in words: two words for each product of tensor cores.
_PAIRS = ((0, 2), (1, 3), (4, 6), (5, 7))
_LARGEST = 1 << 14  # results of a tile: 128 registers of each thread
_SLOT = 16  # words of a token's part in shared memory, of the high or of the low halves
_STAGED = 20  # words from token to token of 16 results in shared memory: the threads of a warp hit different banks


def chunk(product: Product, tuning: Tuning, tokens: int, *, wanted: bool = False) -> Built:
    """As `tiles.chunk`, for adapters with the feature mma."""
    tile = _Tile.of(product, tuning, tokens)

    def body(scope: Scope) -> None:
        memory = scope.shared(tile.words, "uint32")
        count = hold(to_int(scope.tables[State.WANTED if wanted else State.COUNT]), "int32")
        _Kernel(scope, product, tile, Band.of(scope, product, tile.height), count, memory).run()

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32", "tables": "uint32"} | product.reads
    groups = (workgroups(product, tile.height), -(-tokens // tile.tokens))
    return build(product.name, WARP * _WARPS, reads, {"out": "float32"}, (), body, groups, 0 if wanted else tile.tokens)


@dataclass(frozen=True)
class _Tile:
    """Sizes of a workgroup's tile. height: rows of each matrix. across: products of tensor cores along the rows of a
    warp, of each matrix; down: along the tokens. staged: of these, those whose results fit shared memory."""

    height: int
    tokens: int
    across: int
    down: int
    staged: int

    @classmethod
    def of(cls, product: Product, tuning: Tuning, tokens: int) -> _Tile:
        """As tuned, unless the chunk is shorter, or there are too few workgroups for the device."""
        rows, most = tuning.mma_rows, tuning.mma_tokens
        matrices = 1 + product.paired
        while most > 32 and most // 2 >= tokens:
            most //= 2
        height, least = rows // matrices, _ROWS * _WARPS
        while height > least and (
            workgroups(product, height) * -(-tokens // most) < tuning.mma_groups or matrices * height * most > _LARGEST
        ):
            height //= 2
        height = max(height, least)
        return cls(height, most, height // least, most // _TOKENS, max(1, most // (2 * _TOKENS) // matrices))

    @property
    def words(self) -> int:
        """Words of shared memory: two parts of activations, each with high and low halves."""
        return 4 * self.plane

    @property
    def plane(self) -> int:
        return self.tokens * _SLOT


@dataclass(frozen=True)
class _Weights:
    """A thread's weights of a part, for a matrix and 16 rows. planes: 4 words for the first 16 columns and 4 for
    the last; high halves, then low ones if there are. scales: of the rows g and g + 8, for each half, or for all."""

    planes: list[list[Value]]
    scales: list[list[Value]]


class _Kernel:
    def __init__(self, scope: Scope, product: Product, tile: _Tile, band: Band, count: Value, memory: Buffer) -> None:
        self.scope, self.product, self.tile = scope, product, tile
        self.band, self.count, self.memory = band, count, memory
        self.warp, self.inside = let(quotient(scope.thread, WARP)), let(remainder(scope.thread, WARP))
        self.group, self.place = let(quotient(self.inside, 4)), let(remainder(self.inside, 4))
        self.first_row = let(self.warp * (tile.across * _ROWS))  # of this warp, in the band
        self.first_token = let(scope.row * tile.tokens)
        self.slot = let(self.group * _SLOT + _swizzled(self.group, self.place))
        self.matrices = len(product.bundles[0])
        self.sums = [
            [[Registers() for _ in range(tile.down)] for _ in range(tile.across)] for _ in range(self.matrices)
        ]

    def run(self) -> None:
        """One bundle after the other, since their weights differ; a workgroup has one of them."""
        for bundle in self.band.each():
            self._multiply(bundle)
        for across in range(self.tile.across):
            for first in range(0, self.tile.down, self.tile.staged):
                self._finish(across, first)

    def _multiply(self, bundle: Sequence[Factor]) -> None:
        parts = self.product.columns // PART
        rows = [
            [
                hold(T.min(self.band.first + self.first_row + (across * _ROWS + half * 8) + self.group,
                           i32(bundle[0].matrix.rows - 1)), "int32")
                for half in range(2)
            ]
            for across in range(self.tile.across)
        ]  # fmt: skip
        registers = [[_Held(self._read(factor, own, i32(0))) for own in rows] for factor in bundle]
        self._store_inputs(self._read_inputs(i32(0)), i32(0))
        barrier()
        with loop(0, parts) as part:
            following = hold(T.min(part + 1, i32(parts - 1)), "int32")
            inputs = self._read_inputs(following)
            weights = [[self._read(factor, own, following) for own in rows] for factor in bundle]
            self._multiply_part(registers, remainder(part, 2))
            self._store_inputs(inputs, remainder(part + 1, 2))
            for held, read in zip(registers, weights, strict=True):
                for one, other in zip(held, read, strict=True):
                    one.keep(other)
            barrier()

    def _read(self, factor: Factor, rows: Sequence[Value], part: Value) -> _Weights:
        """Weights of the rows g and g + 8."""
        words, block = Words(self.scope.w4, self.scope.w1, self.place), factor.matrix.block
        exact = is_scaled(block) or (isinstance(block, FloatBlock) and block.name == "BF16")
        read = [
            read_scaled(words, factor.matrix, row, part) if is_scaled(block)
            else (read_values(words, factor.matrix, row, part), list[Value]()) for row in rows
        ]  # fmt: skip
        values = [[hold(each) for each in row] for row, _ in read]
        scales = [list(each) for each in zip(*(each for _, each in read), strict=True)]
        planes = [[[packed(row[one], row[other]) for one, other in _PAIRS] for row in values]]
        if not exact:
            planes.append([_remainders(row, high) for row, high in zip(values, planes[0], strict=True)])
        return _Weights([_fragments(each) for each in planes], scales)

    def _read_inputs(self, part: Value) -> list[tuple[Value, Value]]:
        """This thread's activations of a part: pairs of vectors of 4, for words of pairs."""
        found = []
        for item in self._items():
            token = T.max(T.min(self.first_token + quotient(item, 4), self.count - 1), 0)
            pair = let(remainder(item, 4))
            at = let(token * (self.product.columns // 4) + part * (PART // 4) + pair + T.bitwise_and(pair, i32(2)))
            found.append((let(self.scope.x[at]), let(self.scope.x[at + 2])))
        return found

    def _store_inputs(self, inputs: Sequence[tuple[Value, Value]], buffer: Value) -> None:
        for item, (one, other) in zip(self._items(), inputs, strict=True):
            token, pair = let(quotient(item, 4)), let(remainder(item, 4))
            at = let(buffer * (2 * self.tile.plane) + token * _SLOT + pair)
            for column in range(4):
                values = hold(lane(one, column)), hold(lane(other, column))
                high = packed(*values)
                place = let(at + _swizzled(token, i32(column)))
                store(self.memory, place, high)
                store(self.memory, place + self.tile.plane, low_halves(values, high))

    def _items(self) -> list[Value]:
        """Pairs of vectors of the tokens that this thread brings to shared memory: 4 for each token."""
        threads = self.scope.threads
        return [self.scope.thread + at * threads for at in range(4 * self.tile.tokens // threads)]

    def _multiply_part(self, registers: Sequence[Sequence[_Held]], buffer: Value) -> None:
        at = let(buffer * (2 * self.tile.plane) + self.slot)
        for down in range(self.tile.down):
            where = at + down * _TOKENS * _SLOT
            inputs = [let(self.memory[T.Ramp(where + plane * self.tile.plane, 1, 4)]) for plane in range(2)]
            for matrix, rows in enumerate(registers):
                for across, weights in enumerate(rows):
                    weights.multiply(inputs, self.sums[matrix][across][down])

    def _finish(self, across: int, first: int) -> None:
        """Write the results of 16 rows of each warp, and of the tokens of `staged` products from `first` on.

        They go through shared memory, so that a thread has all matrices' results of a row, and that code is short.
        """
        count = self.tile.staged * _TOKENS
        size = count * _STAGED
        start = let(self.warp * (self.matrices * size))
        for matrix in range(self.matrices):
            for number in range(self.tile.staged):
                sums = self.sums[matrix][across][first + number]
                at = let(start + matrix * size + (self.place * 2 + number * _TOKENS) * _STAGED + self.group)
                for index, offset in enumerate((0, _STAGED, 8, _STAGED + 8)):
                    store(self.memory, at + offset, as_word(sums[index]))
        barrier()
        own, further = let(remainder(self.inside, _ROWS)), let(quotient(self.inside, _ROWS))
        row = let(self.band.first + self.first_row + (own + across * _ROWS))
        with loop(0, count // 2) as turn:
            local = let(turn * 2 + further)
            token = let(self.first_token + first * _TOKENS + local)
            with when(T.And(row < self.band.rows, token < self.count)):
                at = let(start + local * _STAGED + own)
                self.band.finish(
                    row, token, [as_float(self.memory[at + matrix * size]) for matrix in range(self.matrices)]
                )
        barrier()


class _Held:
    """Weights of the part that is multiplied."""

    def __init__(self, weights: _Weights) -> None:
        self._planes = [[Register(each, "uint32") for each in plane] for plane in weights.planes]
        self._scales = [[Register(each) for each in scales] for scales in weights.scales]

    def keep(self, weights: _Weights) -> None:
        for registers, values in zip(self._planes + self._scales, weights.planes + weights.scales, strict=True):
            for register, value in zip(registers, values, strict=True):
                register.value = value

    def multiply(self, inputs: Sequence[Value], sums: Registers) -> None:
        """Add the products with activations, their high and their low halves, to sums of 16 rows and 8 tokens."""
        groups = [(0,), (1,)] if len(self._scales) == 2 else [(0, 1)]
        for number, halves in enumerate(groups):
            found = Registers()
            for half in halves:
                for plane, registers in enumerate(self._planes):
                    a = [each.value for each in registers[4 * half : 4 * half + 4]]
                    for other in inputs[: len(inputs) - plane]:  # without low · low
                        found.change("edge_mma", *a, lane(other, 2 * half), lane(other, 2 * half + 1))
            for index in range(4):
                scaled = found[index] * self._scales[number][index // 2].value if self._scales else found[index]
                sums[index] = sums[index] + scaled


def _swizzled(token: Value, column: Value) -> Value:
    """The first of the 4 words of a column in a token's slot. Threads that read or write 8 tokens at once never access
    the same bank."""
    return T.bitwise_xor(column, T.bitwise_and(T.shift_right(token, i32(1)), i32(3))) * 4


def packed(one: Value, other: Value) -> Value:
    """Two bfloat16, the first in the low half."""
    return hold(call("uint32", "edge_bf16", one, other), "uint32")


def low_halves(values: tuple[Value, Value], high: Value) -> Value:
    """The difference between these values and their high halves, as two bfloat16."""
    first, second = as_float(T.shift_left(high, u32(16))), as_float(T.bitwise_and(high, u32(0xFFFF0000)))
    return packed(values[0] - first, values[1] - second)


def _remainders(values: Sequence[Value], packed: Sequence[Value]) -> list[Value]:
    return [low_halves((values[one], values[other]), each) for (one, other), each in zip(_PAIRS, packed, strict=True)]


def _fragments(rows: Sequence[Sequence[Value]]) -> list[Value]:
    """The first operand of tensor cores for both halves of a part, from words of the rows g and g + 8."""
    return [rows[row][word] for word in range(4) for row in range(2)]

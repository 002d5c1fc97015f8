"""WebAssembly: 128 bits, and relaxed SIMD."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.isas.generic import Generic, add, repeated
from edge.backends.tvm.cpu.kernels.isas.registers import bytes_of, joined, quarters_of
from edge.backends.tvm.cpu.kernels.vectors import (
    LANES,
    Value,
    floats,
    half,
    ints,
    lanes_of,
    let,
    pinned,
    pins,
    pure,
    spread,
)


class Dots(Protocol):
    """Sums of dot products of 4 rows while they grow, in registers of 128 bits."""

    def add(self, weights: Value, x: Value) -> None:
        """weights: int32x4, each lane 4 weights of a row; x: of `Simd128.operand`."""
        ...

    def pin(self) -> None:
        """Compute all of the sums here, before what follows."""
        ...

    def total(self) -> Value:
        """int32x4. Nothing is added afterwards."""
        ...


class Simd128(Generic):
    """WebAssembly: registers of 128 bits, and no dot product of bytes but of 16 bits.

    `matmul.py` has loops of its own for these: engines of browsers keep values in registers only if code uses them
    soon.
    """

    pins = pins("r", "int16x8", "int32x4", "float32x4")
    _swizzle = "llvm.wasm.swizzle"

    def operand(self, word: Value, largest: int | None) -> Value:
        """A word of x, for every row."""
        return let(_wide(T.reinterpret("int8x8", spread(word, 2))))

    def sums(self, largest: int | None) -> Dots:
        """largest: as in `Isa.dots`; signed weights have no offset."""
        return _WideDots()

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        if lanes_of(indices) == LANES:
            return joined([self.lookup(table, each) for each in quarters_of(indices)])
        entries = bytes_of(repeated(table, 4))
        return T.reinterpret("int32x4", pure("int8x16", self._swizzle, entries, bytes_of(indices)))

    def from_f16(self, stored: Value) -> Value:
        """Exponent and fraction, read as those of a float32, are too small by 2^112. Infinities become 65536."""
        lanes = lanes_of(stored)
        bits = T.cast(T.reinterpret(f"int16x{lanes}", stored), f"int32x{lanes}") << ints(13, lanes)
        return T.reinterpret(f"float32x{lanes}", bits & ints(-0x70002000, lanes)) * floats(2.0**112, lanes)


class Relaxed16(Simd128):
    """i16x8.relaxed_dot_i8x16_i7x16_s adds two products of a signed byte and a weight of 7 bits in 16 bits: on x86
    vpmaddubsw."""

    _swizzle = "llvm.wasm.relaxed.swizzle"

    def operand(self, word: Value, largest: int | None) -> Value:
        return super().operand(word, largest) if largest is None else bytes_of(let(spread(word, 4)))

    def sums(self, largest: int | None) -> Dots:
        return _WideDots() if largest is None else _PairDots(largest)


class Relaxed(Relaxed16):
    """i32x4.relaxed_dot_i8x16_i7x16_add_s adds 4 products in 32 bits: where the browser has vpdpbusd or sdot for it.
    Signed weights are multiplied in two planes."""

    def operand(self, word: Value, largest: int | None) -> Value:
        return bytes_of(let(spread(word, 4)))

    def sums(self, largest: int | None) -> Dots:
        return _PlaneDots() if largest is None else _QuadDots()


class _WideDots:
    """Bytes are widened to 16 bits: sums of two products, for the rows' halves."""

    def __init__(self) -> None:
        self._halves = [ints(0, 4), ints(0, 4)]

    def add(self, weights: Value, x: Value) -> None:
        for which in (0, 1):
            wide = _wide(half(bytes_of(weights), which, "int8x8"))
            self._halves[which] = let(self._halves[which] + pure("int32x4", "llvm.wasm.dot", wide, x))

    def pin(self) -> None:
        self._halves = [pinned(each) for each in self._halves]

    def total(self) -> Value:
        even, odd = (T.Shuffle(self._halves, [lane + which for lane in (0, 2, 4, 6)]) for which in (0, 1))
        return let(even + odd)


class _PairDots:
    """Sums of two products in 16 bits, which are widened before they could overflow."""

    def __init__(self, largest: int) -> None:
        self._fit = ((1 << 15) - 1) // (2 * largest * 127)
        self._pairs: list[Value] = []  # at most `_fit` products, and their sum once it is pinned
        self._count, self._wide = 0, list[Value]()

    def add(self, weights: Value, x: Value) -> None:
        if self._count == self._fit:
            self._widen()
        products = let(pure("int16x8", "llvm.wasm.relaxed.dot.i8x16.i7x16.signed", x, bytes_of(weights)))
        self._pairs, self._count = [functools.reduce(add, [*self._pairs, products])], self._count + 1

    def pin(self) -> None:
        if self._count == self._fit:
            self._widen()
        self._pairs, self._wide = ([pinned(each) for each in some] for some in (self._pairs, self._wide))

    def total(self) -> Value:
        self._widen()
        return functools.reduce(add, self._wide)

    def _widen(self) -> None:
        sums = [pure("int32x4", "llvm.wasm.dot", each, spread(T.int16(1), 8)) for each in self._pairs]
        self._wide, self._pairs, self._count = [functools.reduce(add, [*self._wide, *sums])], [], 0


class _QuadDots:
    """Sums of four products in 32 bits."""

    def __init__(self) -> None:
        self._sums = ints(0, 4)

    def add(self, weights: Value, x: Value) -> None:
        arguments = x, bytes_of(weights), self._sums
        self._sums = let(pure("int32x4", "llvm.wasm.relaxed.dot.i8x16.i7x16.add.signed", *arguments))

    def pin(self) -> None:
        self._sums = pinned(self._sums)

    def total(self) -> Value:
        return self._sums


class _PlaneDots:
    """Signed bytes as 7 bits minus 128 times the sign."""

    def __init__(self) -> None:
        self._low, self._signs = _QuadDots(), _QuadDots()

    def add(self, weights: Value, x: Value) -> None:
        self._low.add(let(weights & ints(0x7F7F7F7F, 4)), x)
        self._signs.add(let((weights >> ints(7, 4)) & ints(0x01010101, 4)), x)

    def pin(self) -> None:
        self._low.pin()
        self._signs.pin()

    def total(self) -> Value:
        return let(self._low.total() - self._signs.total() * ints(128, 4))


def _wide(eight: Value) -> Value:
    return T.cast(eight, "int16x8")

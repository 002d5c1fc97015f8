"""Vectors and control flow over TVM's IR builder, so that kernels read like their formulas.

The unit of work is a vector of 16 lanes; LLVM splits it for narrower registers. Python's control flow runs while a
kernel is built, and so unrolls; `loop` and `when` are control flow of the kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm.tirx.script.builder import ir as T

LANES = 16

Value = Any  # an expression of TVM: a scalar or a vector
Buffer = Any  # memory of one element type


def i64(value: int) -> Value:
    return T.int64(value)


def lanes_of(vector: Value) -> int:
    return int(str(vector.ty).rpartition("x")[2])


def spread(value: Value, lanes: int = LANES) -> Value:
    """The same scalar in every lane."""
    return T.broadcast(value, lanes) if lanes > 1 else value


def floats(value: float, lanes: int = LANES) -> Value:
    """A constant in every lane, float32."""
    return spread(T.float32(value), lanes)


def scaled(value: Value, by: float) -> Value:
    """value · by, float32; no operation if `by` is 1."""
    return value if by == 1 else value * floats(by)


def ints(value: int, lanes: int = LANES) -> Value:
    """A constant in every lane, int32."""
    return spread(T.int32(value), lanes)


def load(buffer: Buffer, at: Value, lanes: int = LANES, stride: int = 1) -> Value:
    return buffer[T.ramp(at, i64(stride), lanes)] if lanes > 1 else buffer[at]


def store(buffer: Buffer, at: Value, value: Value, lanes: int = LANES, stride: int = 1) -> None:
    T.buffer_store(buffer, value, [T.ramp(at, i64(stride), lanes) if lanes > 1 else at])


def let(value: Value) -> Value:
    """Compute the value once, at this place."""
    return T.Bind(value)


def quotient(value: Value, by: Value | int) -> Value:
    """value / by of int64 that are not negative. (`//` rounds down, for which TVM generates tests of the signs.)"""
    if not isinstance(by, int):
        return T.truncdiv(value, by)
    return T.shift_right(value, i64(by.bit_length() - 1)) if by & (by - 1) == 0 else T.truncdiv(value, i64(by))


def remainder(value: Value, by: int) -> Value:
    """value mod by of int64 that are not negative."""
    return T.bitwise_and(value, i64(by - 1)) if by & (by - 1) == 0 else T.truncmod(value, i64(by))


def pure(dtype: str, intrinsic: str, *arguments: Value) -> Value:
    """An LLVM intrinsic without side effects."""
    return T.call_llvm_pure_intrin(dtype, intrinsic, *arguments)


def magnitude(x: Value) -> Value:
    """Of 16 float32 lanes."""
    return pure("float32x16", "llvm.fabs", x)


def rounded(x: Value) -> Value:
    """16 float32 lanes as the nearest integers, halves to even."""
    return T.cast(pure("float32x16", "llvm.rint", x), "int32x16")


# LLVM orders instructions so that engines of WebAssembly, and CPUs with 16 vector registers, run out of registers. An
# empty piece of assembly keeps its place, and the value that it returns is not fused with what follows.
_PIN = """
define <TYPE> @edge_pin_NAME(<TYPE> %value) {
  %same = call <TYPE> asm sideeffect "", "=REGISTER,0"(<TYPE> %value)
  ret <TYPE> %same
}
"""
_PINNED = {"int16x8": "8 x i16", "int32x4": "4 x i32", "float32x4": "4 x float", "int32x8": "8 x i32"}


def pins(register: str, *dtypes: str) -> str:
    """LLVM IR for `pinned` values of these types. register: LLVM's constraint for the registers that hold them."""
    pin = _PIN.replace("REGISTER", register)
    return "".join(pin.replace("TYPE", _PINNED[name]).replace("NAME", name) for name in dtypes)


def pinned(value: Value) -> Value:
    """The same value, computed before what follows: of a type in the target's `Isa.pins`."""
    dtype = str(value.ty)
    return let(T.call_extern(dtype, f"edge_pin_{dtype}", value))


def prefetch(buffer: Buffer, at: Value, into: int = 2) -> None:
    """Prefetch the cache line of buffer[at]. The address need not be valid. into: `Target.fetch_into`."""
    address = T.address_of(buffer[at])
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, T.int32(0), T.int32(into), T.int32(1)))


@contextmanager
def loop(start: Value, stop: Value) -> Iterator[Value]:
    with T.serial(start, stop) as index:
        yield index


@contextmanager
def when(condition: Value) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


class Register:
    """A variable of 16 lanes (or `lanes` of them), which LLVM keeps in registers."""

    def __init__(self, dtype: str = "float32", lanes: int = LANES) -> None:
        # Without the annotation, TVM would allocate these few bytes on the heap in every iteration of a loop.
        self._buffer = T.alloc_buffer((lanes,), dtype, scope="local", annotations={"disable_lower_builtin": True})
        self._lanes = lanes

    @property
    def value(self) -> Value:
        return load(self._buffer, i64(0), self._lanes)

    @value.setter
    def value(self, value: Value) -> None:
        store(self._buffer, i64(0), value, self._lanes)

    def lane(self, index: Value) -> Value:
        return self._buffer[index]

    def part(self, first: int, lanes: int) -> Value:
        """Some lanes, from `first` on."""
        return load(self._buffer, i64(first), lanes)

    def set_part(self, first: int, value: Value, lanes: int) -> None:
        store(self._buffer, i64(first), value, lanes)


class Strip:
    """`count` vectors of 16 lanes side by side on the stack, indexed while the kernel runs."""

    def __init__(self, count: int) -> None:
        annotations = {"disable_lower_builtin": True}
        self._buffer = T.alloc_buffer((count * LANES,), "float32", scope="local", annotations=annotations)

    def __getitem__(self, index: Value) -> Value:
        return load(self._buffer, index * LANES)

    def __setitem__(self, index: Value, value: Value) -> None:
        store(self._buffer, index * LANES, value)

    def set_lane(self, lane: Value, value: Value) -> None:
        """One of all lanes, counted from the first vector's."""
        T.buffer_store(self._buffer, value, [lane])


def opaque(value: Value) -> Value:
    """As `let`, of an int64, in a variable: TVM's simplifier writes a name's expression in its place, and takes seconds
    for minima and quotients of one another. LLVM sees through it."""
    found = Register("int64", lanes=1)
    found.value = value
    return let(found.value)


def half(vector: Value, which: int, dtype: str) -> Value:
    """The low (0) or high (1) half of a vector, of type `dtype`."""
    return T.vectorhigh(dtype, vector) if which else T.vectorlow(dtype, vector)


def greatest(vectors: Sequence[Value]) -> Value:
    """The greatest absolute values of vectors of 16 lanes, lane by lane. In a variable, because TVM's simplifier would
    expand maxima of maxima: those of 32 vectors took it minutes and 17 GB."""
    found = Register()
    found.value = floats(0)
    for each in vectors:
        found.value = T.max(found.value, magnitude(each))
    return let(found.value)


def total(vector: Value) -> Value:
    """The sum of 16 float lanes."""
    eight = let(half(vector, 0, "float32x8") + half(vector, 1, "float32x8"))
    four = let(half(eight, 0, "float32x4") + half(eight, 1, "float32x4"))
    return pure("float32", "llvm.vector.reduce.fadd", T.float32(0), four)


def largest(vector: Value) -> Value:
    """The greatest of 16 float lanes."""
    return _folded(vector, T.max)


def smallest(vector: Value) -> Value:
    """The least of 16 float lanes."""
    return _folded(vector, T.min)


def _folded(vector: Value, choose: Callable[[Value, Value], Value]) -> Value:
    """LLVM's own reductions treat NaN in a way for which WebAssembly would call a library."""
    eight = let(choose(half(vector, 0, "float32x8"), half(vector, 1, "float32x8")))
    four = let(choose(half(eight, 0, "float32x4"), half(eight, 1, "float32x4")))
    two = let(choose(T.Shuffle([four], [0, 1]), T.Shuffle([four], [2, 3])))
    return choose(T.Shuffle([two], [0]), T.Shuffle([two], [1]))


def swap_pairs(vector: Value) -> Value:
    """Lanes 2i and 2i+1 exchanged."""
    return T.Shuffle([vector], [lane ^ 1 for lane in range(LANES)])


def exp(x: Value, lanes: int = LANES) -> Value:
    """e^x, relative error 2e-7: x clipped to ±87, 2^fraction by a polynomial, 2^whole by its exponent bits."""
    scaled = let(T.max(T.min(x, floats(87.0, lanes)), floats(-87.0, lanes)) * floats(1.4426950408889634, lanes))
    whole = let(pure(_f(lanes), "llvm.rint", scaled))
    fraction = let(scaled - whole)
    power: Value = floats(1.5403530e-4, lanes)
    for coefficient in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        power = power * fraction + floats(coefficient, lanes)
    exponent = T.cast(whole, _i(lanes)) + ints(127, lanes)
    return let(power * T.reinterpret(_f(lanes), T.shift_left(exponent, ints(23, lanes))))


def exp_short(x: Value) -> Value:
    """e^x for 16 lanes that are not positive, relative error 8e-5, less than BF16 rounds: x clipped to −87."""
    scaled = let(T.max(x, floats(-87.0)) * floats(1.4426950408889634))
    whole = let(pure("float32x16", "llvm.rint", scaled))
    fraction = let(scaled - whole)
    power: Value = floats(0.05517165)
    for coefficient in (0.24261117, 0.69326099, 0.99992807):
        power = power * fraction + floats(coefficient)
    exponent = T.shift_left(T.cast(whole, "int32x16"), ints(23))
    return let(T.reinterpret("float32x16", T.reinterpret("int32x16", let(power)) + exponent))


def _f(lanes: int) -> str:
    return f"float32x{lanes}" if lanes > 1 else "float32"


def _i(lanes: int) -> str:
    return f"int32x{lanes}" if lanes > 1 else "int32"


def move_bits(words: Value, bits: int, at: int, to: int) -> Value:
    """`bits` bits from bit `at` of each of a lane's 4 bytes, moved to bit `to`, other bits 0. 8 bits do not move."""
    if bits == 8:
        return words
    lanes = lanes_of(words)
    if at > to:
        words = T.shift_right(words, ints(at - to, lanes))
    elif at < to:
        words = T.shift_left(words, ints(to - at, lanes))
    return T.bitwise_and(words, ints(((1 << bits) - 1 << to) * 0x01010101, lanes))


def shift_to_float(stored: Value, bits: int) -> Value:
    """16 lanes of uint16, shifted left by `bits` and read as float32."""
    return T.reinterpret("float32x16", T.shift_left(T.cast(stored, "int32x16"), ints(bits)))

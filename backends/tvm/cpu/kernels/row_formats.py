"""Rows of the KV cache as codes: what codes.py says, in compiled code."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.hadamard import hadamard
from edge.backends.tvm.cpu.kernels.isa import Isa
from edge.backends.tvm.cpu.kernels.lanes import (
    Register,
    Value,
    floats,
    half,
    i64,
    ints,
    largest,
    let,
    pure,
    smallest,
    spread,
)
from edge.backends.tvm.kv.row_formats import FORMATS, LARGEST, STEPS


def kernel_type(numpy_type: str) -> str:
    """Kernels read float16 as the integers that it is stored in."""
    return "uint16" if numpy_type == "float16" else numpy_type


def memory_types(dtype: str) -> dict[str, str]:
    """The element types of the cache's arrays."""
    memory, scale = kernel_type(FORMATS[dtype].memory), kernel_type(FORMATS[dtype].scale)
    return {"keys": memory, "values": memory, "key_scales": scale, "value_scales": scale}


def turn(dtype: str, vectors: Sequence[Value]) -> list[Value]:
    """A row as its codes see it. Queries are turned likewise, and once more turned is turned back."""
    return hadamard(vectors) if FORMATS[dtype].transformed else list(vectors)


def encode(isa: Isa, dtype: str, vectors: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """A row in float32, 16 by 16, as vectors of elements (int4: of codes, not yet packed), and its scales."""
    if dtype == "f32":
        return list(vectors), []
    if dtype == "f16":
        return [isa.to_f16(vector) for vector in vectors], []
    return _encode_int8(vectors) if dtype == "int8" else _encode_int4(isa, turn(dtype, vectors))


def _encode_int8(vectors: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """round(x · 127 / max|x|) over the whole head."""
    size: Value = floats(0)
    for vector in vectors:
        size = let(T.max(size, pure("float32x16", "llvm.fabs", vector)))
    most = let(largest(size))
    inverse = let(T.if_then_else(most > T.float32(0), T.float32(127) / most, T.float32(0)))
    return [T.cast(_rounded(vector * spread(inverse)), "int8x16") for vector in vectors], [most * T.float32(1 / 127)]


def _encode_int4(isa: Isa, vectors: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """round((x − least) / scale), with scale and least as they will be read: rounded to float16."""
    low = high = vectors[0]
    for vector in vectors[1:]:
        low, high = let(T.min(low, vector)), let(T.max(high, vector))
    least = let(smallest(low))
    scale = let((largest(high) - least) * T.float32(1 / STEPS))
    stored, rounded = Register("uint16"), Register()
    first = T.ramp(T.int32(0), T.int32(1), 16) < ints(1)
    pair = T.Select(first, spread(scale), spread(least))
    stored.value = isa.to_f16(let(T.max(T.min(pair, floats(LARGEST)), floats(-LARGEST))))
    rounded.value = isa.from_f16(stored.value)
    scale, least = (let(rounded.lane(i64(lane))) for lane in (0, 1))
    inverse = let(T.if_then_else(scale > T.float32(0), T.float32(1) / scale, T.float32(0)))
    codes = []
    for vector in vectors:
        steps = let((vector - spread(least)) * spread(inverse))
        codes.append(T.cast(_rounded(T.max(T.min(steps, floats(STEPS)), floats(0))), "uint8x16"))
    return [let(each) for each in codes], [stored.lane(i64(lane)) for lane in (0, 1)]


def decode(isa: Isa, dtype: str, elements: Value) -> list[Value]:
    """16 elements as float32, neither scaled nor turned back; int4: the low halves of bytes, and the high ones."""
    if dtype == "f32":
        return [elements]
    if dtype == "f16":
        return [let(isa.from_f16(elements))]
    if dtype == "int8":
        return [_float(elements)]
    elements = let(elements)
    return [_float(elements & spread(T.uint8(15))), _float(T.shift_right(elements, spread(T.uint8(4))))]


def decode_half(elements: Value) -> Value:
    """8 bytes of int4 as 16 float32: the low halves, then the high ones."""
    elements = let(elements)
    low, high = elements & spread(T.uint8(15), 8), T.shift_right(elements, spread(T.uint8(4), 8))
    return let(T.vectorcombine("float32x16", *(T.cast(T.cast(each, "int32x8"), "float32x8") for each in (low, high))))


def packed(low: Value, high: Value, lanes: int) -> Value:
    """Two vectors of codes in one of bytes."""
    return low | T.shift_left(high, spread(T.uint8(4), lanes))


def neighbours(codes: Value) -> Value:
    """16 codes in 8 bytes, two neighbours in each."""
    return packed(T.Shuffle([codes], list(range(0, 16, 2))), T.Shuffle([codes], list(range(1, 16, 2))), 8)


def halves(codes: Value) -> Value:
    """16 codes in 8 bytes, those 8 apart in each."""
    return packed(half(codes, 0, "uint8x8"), half(codes, 1, "uint8x8"), 8)


def _rounded(x: Value) -> Value:
    return T.cast(pure("float32x16", "llvm.rint", x), "int32x16")


def _float(elements: Value) -> Value:
    return let(T.cast(T.cast(elements, "int32x16"), "float32x16"))

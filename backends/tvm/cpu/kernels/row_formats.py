"""KV rows in their stored formats, in compiled code; `kv/row_formats.py` defines the formats, with NumPy's functions.

Formats that transform rows apply a Householder reflection of keys (`kv/householder.py`) and a Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.isas.generic import Isa
from edge.backends.tvm.cpu.kernels.vectors import (
    LANES,
    Register,
    Value,
    floats,
    greatest,
    half,
    i64,
    ints,
    lanes_of,
    largest,
    let,
    rounded,
    smallest,
    spread,
    total,
)
from edge.backends.tvm.kv.row_formats import FORMATS, LARGEST, STEPS


def kernel_type(numpy_type: str) -> str:
    """Kernels read float16 as integers of 16 bits."""
    return "uint16" if numpy_type == "float16" else numpy_type


def memory_types(dtype: str) -> dict[str, str]:
    """The element types of the cache's arrays."""
    memory, scale = kernel_type(FORMATS[dtype].memory), kernel_type(FORMATS[dtype].scale)
    return {"keys": memory, "values": memory, "key_scales": scale, "value_scales": scale}


def transform(dtype: str, vectors: Sequence[Value]) -> list[Value]:
    """The Hadamard transform, for formats that store rows transformed; queries need it, too. It is its own inverse."""
    return hadamard(vectors) if FORMATS[dtype].transformed else list(vectors)


def encode(isa: Isa, dtype: str, vectors: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """A row in float32, 16 by 16, as vectors of elements (int4: of codes, not yet packed), and its scales."""
    if dtype == "f32":
        return list(vectors), []
    if dtype == "f16":
        return [isa.to_f16(vector) for vector in vectors], []
    return _encode_int8(vectors) if dtype == "int8" else _encode_int4(isa, transform(dtype, vectors))


def _encode_int8(vectors: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """round(x · 127 / max|x|) over the whole head."""
    most = let(largest(greatest(vectors)))
    inverse = let(T.if_then_else(most > T.float32(0), T.float32(127) / most, T.float32(0)))
    return [T.cast(rounded(vector * spread(inverse)), "int8x16") for vector in vectors], [most * T.float32(1 / 127)]


def _encode_int4(isa: Isa, vectors: Sequence[Value]) -> tuple[list[Value], list[Value]]:
    """round((x − least) / scale), with scale and least rounded to float16, as they will be read."""
    low = high = vectors[0]
    for vector in vectors[1:]:
        low, high = let(T.min(low, vector)), let(T.max(high, vector))
    least = let(smallest(low))
    scale = let((largest(high) - least) * T.float32(1 / STEPS))
    stored, read = Register("uint16"), Register()
    first = T.ramp(T.int32(0), T.int32(1), 16) < ints(1)
    pair = T.Select(first, spread(scale), spread(least))
    stored.value = isa.to_f16(let(T.max(T.min(pair, floats(LARGEST)), floats(-LARGEST))))
    read.value = isa.from_f16(stored.value)
    scale, least = (let(read.lane(i64(lane))) for lane in (0, 1))
    inverse = let(T.if_then_else(scale > T.float32(0), T.float32(1) / scale, T.float32(0)))
    codes = []
    for vector in vectors:
        steps = let((vector - spread(least)) * spread(inverse))
        codes.append(T.cast(rounded(T.max(T.min(steps, floats(STEPS)), floats(0))), "uint8x16"))
    return [let(each) for each in codes], [stored.lane(i64(lane)) for lane in (0, 1)]


def decode(isa: Isa, dtype: str, elements: Value) -> list[Value]:
    """16 elements as float32, not yet scaled or transformed; int4: the low halves of the bytes, then the high ones.
    Of formats with a byte or more for a value, also any other number of elements."""
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


def decode_neighbours(elements: Value) -> Value:
    """8 bytes of int4 as 16 float32, of neighbours in each byte the low half first."""
    both = decode_half(elements)
    return let(T.Shuffle([both], [index // 2 + index % 2 * 8 for index in range(16)]))


def packed(low: Value, high: Value, lanes: int) -> Value:
    """Two vectors of codes as one of bytes."""
    return low | T.shift_left(high, spread(T.uint8(4), lanes))


def neighbours(codes: Value) -> Value:
    """16 codes in 8 bytes, two neighbours in each byte."""
    return packed(T.Shuffle([codes], list(range(0, 16, 2))), T.Shuffle([codes], list(range(1, 16, 2))), 8)


def halves(codes: Value) -> Value:
    """16 codes in 8 bytes, two that are 8 apart in each byte."""
    return packed(half(codes, 0, "uint8x8"), half(codes, 1, "uint8x8"), 8)


def _float(elements: Value) -> Value:
    lanes = lanes_of(elements)
    return let(T.cast(T.cast(elements, f"int32x{lanes}"), f"float32x{lanes}"))


def hadamard(vectors: Sequence[Value]) -> list[Value]:
    """x H for a row of 16 · n numbers; H = Hᵀ = H⁻¹, in blocks of the largest power of two that divides the length.

    Butterflies: distances 1, 2, 4, 8 within a vector, then whole vectors. The row goes through variables, because TVM's
    simplifier would expand plain expressions, which double at every distance.
    """
    row = [Register() for _ in vectors]
    for each, vector in zip(row, vectors, strict=True):
        each.value = vector
        for distance in (1, 2, 4, 8):
            each.value = _within(let(each.value), distance)
    block = len(row) & -len(row)
    distance = 1
    while distance < block:
        for index in range(len(row)):
            if not index & distance:
                first, second = let(row[index].value), let(row[index + distance].value)
                row[index].value, row[index + distance].value = first + second, first - second
        distance *= 2
    return [let(each.value * floats((block * LANES) ** -0.5)) for each in row]


def reflect(vectors: Sequence[Value], normals: Sequence[Value]) -> list[Value]:
    """x − 2 (n x) n for a row of 16 · n numbers."""
    products: Value = floats(0)
    for vector, normal in zip(vectors, normals, strict=True):
        products = let(products + vector * normal)
    twice = let(spread(T.float32(2) * total(products)))
    return [let(vector - twice * normal) for vector, normal in zip(vectors, normals, strict=True)]


def _within(vector: Value, distance: int) -> Value:
    """Each two lanes a, b that are `distance` apart become a + b, a − b."""
    partners = T.Shuffle([vector], [lane ^ distance for lane in range(LANES)])
    first = T.bitwise_and(T.ramp(T.int32(0), T.int32(1), LANES), ints(distance)) == ints(0)
    return partners + T.Select(first, vector, floats(0) - vector)

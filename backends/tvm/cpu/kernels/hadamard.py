"""What int4 rows of the cache go through: a reflection (mirror.py) and the Hadamard transform (codes.py)."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.lanes import LANES, Register, Value, floats, ints, let, spread, total


def hadamard(vectors: Sequence[Value]) -> list[Value]:
    """x H for a row of 16 · n numbers; H = Hᵀ = H⁻¹, one block for each largest power of two that divides the length.

    Butterflies: distances 1, 2, 4, 8 within a vector, then whole vectors. The row goes through variables, as TVM's
    simplifier would follow plain expressions to their beginning, which here double at every distance.
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
    """Lanes a, b, `distance` apart, become a + b, a − b."""
    partners = T.Shuffle([vector], [lane ^ distance for lane in range(LANES)])
    first = T.bitwise_and(T.ramp(T.int32(0), T.int32(1), LANES), ints(distance)) == ints(0)
    return partners + T.Select(first, vector, floats(0) - vector)

"""Vectors of 16 lanes as registers of 128 bits."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.vectors import Value, half, let


def bytes_of(quarter: Value) -> Value:
    return T.reinterpret("int8x16", quarter)


def quarters_of(vector: Value) -> list[Value]:
    """16 int32 lanes as 4 vectors of 4."""
    halves = [half(vector, which, "int32x8") for which in (0, 1)]
    return [let(half(each, which, "int32x4")) for each in halves for which in (0, 1)]


def joined(quarters: Sequence[Value]) -> Value:
    a, b = (T.vectorcombine("int32x8", *quarters[at : at + 2]) for at in (0, 2))
    return let(T.vectorcombine("int32x16", a, b))

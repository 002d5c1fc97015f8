"""The transformation of 4-bit rows, and so of their queries: a Householder reflection of keys, then a Hadamard
transform. `kv/householder.py` and `kv/row_formats.py` give the reasons, and have the same in NumPy."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.tvm.gpu.design import RowForm, Tables
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Register,
    Scope,
    Value,
    as_float,
    barrier,
    f32,
    hold,
    i32,
    let,
    loop,
    quotient,
    remainder,
    select,
    store,
    strided,
)


def reflect(
    scope: Scope, tables: Tables, form: RowForm, vectors: Buffer, count: int, factors: Buffer, head: Value,
    applies: Callable[[Value], Value] | None = None,
) -> None:  # fmt: skip
    """Reflect vectors [count, form.stored] in shared memory, in place. Begins and ends with a barrier.

    factors: shared [count]. head: among those of all layers. applies: which vectors are reflected; None: all.
    """
    normal = let(head * tables.normal + tables.normals)
    barrier()
    with strided(scope, count) as own:
        product = Register(f32(0.0))
        with loop(0, form.head) as at:
            product.value = product.value + vectors[own * form.stored + at] * as_float(scope.tables[normal + at])
        twice = product.value * f32(2.0)
        store(factors, own, select(applies(own), twice, f32(0.0)) if applies else twice)
    barrier()
    with strided(scope, count * form.head) as index:
        own, at = let(quotient(index, form.head)), let(remainder(index, form.head))
        place = let(own * form.stored + at)
        store(vectors, place, vectors[place] - factors[own] * as_float(scope.tables[normal + at]))
    barrier()


def hadamard(scope: Scope, form: RowForm, vectors: Buffer, count: int) -> None:
    """Multiply vectors [count, form.stored] in shared memory by H, in place, in blocks of the largest power of two that
    divides the head. Needs a barrier before it, and ends with one."""
    block, distance, half = form.head & -form.head, 1, form.head // 2
    while distance < block:
        scale = f32(block**-0.5 if 2 * distance == block else 1.0)
        with strided(scope, count * half) as index:
            own, pair = let(quotient(index, half)), let(remainder(index, half))
            first = let(own * form.stored + quotient(pair, distance) * (2 * distance) + remainder(pair, distance))
            one, other = hold(vectors[first]), hold(vectors[first + i32(distance)])
            store(vectors, first, (one + other) * scale)
            store(vectors, first + i32(distance), (one - other) * scale)
        barrier()
        distance *= 2

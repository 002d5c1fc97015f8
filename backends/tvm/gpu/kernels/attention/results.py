"""The results of attention: from a workgroup's memory to `mixed`, float32 [tokens, padded heads · head]."""

from __future__ import annotations

from edge.backends.tvm.gpu.design import RowForm, Tables
from edge.backends.tvm.gpu.kernels.attention.rows import slots_of
from edge.backends.tvm.gpu.kernels.attention.transform import hadamard, reflect
from edge.backends.tvm.gpu.kernels.functions import sigmoid
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Scope,
    Value,
    barrier,
    let,
    quotient,
    remainder,
    store,
    strided,
)
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Attention


def give(scope: Scope, core: Attention, token: Value, query: Value, value: Value, total: Value) -> None:
    """Write a value of a query's result."""
    if core.gated:
        slot = slots_of(core) - core.heads + query
        total = total * sigmoid(scope.qkv[(token * slots_of(core) + slot) * core.head_dim + value])
    store(scope.mixed, token * round_up(core.mixed, PART) + query * core.row.value + value, total)


def restore(
    scope: Scope, core: Attention, tables: Tables, form: RowForm, ready: Buffer, count: int, token: Value,
    first: Value, head: Value, factors: Buffer,
) -> None:  # fmt: skip
    """Transform the results of `count` query heads of a token from `first` on, [count, form.stored] in shared memory,
    back from the form of rows, and write them. The arguments are those of `attention.load_queries`."""
    barrier()
    hadamard(scope, form, ready, count)
    if form.shared:  # reflected, as keys are
        reflect(scope, tables, form, ready, count, factors, head)
    with strided(scope, count * core.row.value) as index:
        number, value = let(quotient(index, core.row.value)), let(remainder(index, core.row.value))
        give(scope, core, token, first + number, value, ready[number * form.stored + value])

"""Rows of the KV cache: written from products, and moved.

A row of a head is `words(…)` uint32 words of codes; with integers, a float32 scale for its key and one for its value
besides. Keys lie in tiles of 16 rows, so that 16 threads that read 16 bytes each of 16 rows read neighbours; values row
by row.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import KEYS, MOST_MOVED, VALUES, RowForm, State, Tables
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    as_float,
    as_word,
    barrier,
    build,
    f32,
    half,
    halves,
    i32,
    let,
    quotient,
    reduce,
    remainder,
    select,
    store,
    strided,
    to_float,
    to_int,
    u32,
    when,
)  # fmt: skip
from edge.backends.tvm.gpu.weights import LayerLayout
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.packing.layout import Shape

_THREADS = 64


def key_unit(form: RowForm, row: Value, unit: Value) -> Value:
    """Where 16 bytes of a key lie, in units."""
    return (quotient(row, TILE) * form.units + unit) * TILE + remainder(row, TILE)


def key_word(form: RowForm, row: Value, word: Value) -> Value:
    return key_unit(form, row, quotient(word, 4)) * 4 + remainder(word, 4)


def unpack(form: RowForm, word: Value) -> list[Value]:
    """The values of a word as float32, without the row's scale."""
    if form.dtype == "f32":
        return [as_float(word)]
    if form.dtype == "f16":
        return [half(word, 0), half(word, 1)]
    number = let(to_int(word))
    return [to_float(T.shift_right(T.shift_left(number, i32(24 - 8 * at)), i32(24))) for at in range(4)]


def pack(form: RowForm, values: Sequence[Value], inverse: Value) -> Value:
    """The inverse of `unpack`; inverse: 1 / scale."""
    if form.dtype == "f32":
        return as_word(values[0])
    if form.dtype == "f16":
        return halves(*values)
    codes = [to_int(T.floor(value * inverse + f32(0.5))) for value in values]
    fields = [T.shift_left(T.bitwise_and(as_word(code), u32(255)), u32(8 * at)) for at, code in enumerate(codes)]
    return fields[0] | fields[1] | fields[2] | fields[3]


def first_row(scope: Scope, tables: Tables, head: Value) -> Value:
    """Of a head's rows in the arena, by its number among all layers'."""
    return to_int(scope.tables[head + tables.starts])


def rows_before(scope: Scope, tables: Tables, head: Value) -> Value:
    """Rows that a head has before this pass."""
    return to_int(scope.tables[head + tables.lengths]) + to_int(scope.tables[State.APPENDED])


def store_rows(
    name: str, layout: LayerLayout, shape: Shape, tables: Tables, dtype: str, *, halves: bool, tokens: int,
    observes: bool,
) -> Built:  # fmt: skip
    """Of each token, the queries, ready for attention, in their place; keys and values in the cache.

    Buffers: qkv float32 [tokens, all heads' queries, keys, values]. Scalars: layer; angles, the word of `tables` where
    this layer's kind of rope begins. halves: see `Design`. observes: `paid` of the new rows becomes 0.
    """
    form = RowForm(dtype, shape.padded_head)
    slots = shape.heads + 2 * shape.kv_heads
    norms = [layout.vector("attn_q_norm"), layout.vector("attn_k_norm")]
    loads_per_row = 2 * tables.pairs

    def body(scope: Scope) -> None:
        slot, token = scope.group, scope.row
        vector, rotated = scope.shared(form.head), scope.shared(form.head)
        memory = scope.shared(_THREADS)
        with when(token < to_int(scope.tables[State.COUNT])):
            at = let((token * slots + slot) * shape.head)
            is_query, is_value = slot < shape.heads, slot >= shape.heads + shape.kv_heads
            with strided(scope, form.head) as index:
                store(vector, index, f32(0.0))
                with when(index < shape.head):
                    store(vector, index, scope.qkv[at + index])
            barrier()
            if any(norms):
                _normalise(scope, vector, memory, is_query, is_value)
            with strided(scope, form.head) as index:
                store(rotated, index, vector[index])
                with when(T.And(T.Not(is_value), index < 2 * tables.pairs)):
                    store(rotated, index, _rotated(scope, vector, token, index))
            barrier()
            with when(is_query), strided(scope, shape.head) as index:
                value = rotated[index] * f32(shape.query_scale)
                if shape.tempered:
                    value = value * as_float(scope.tables[token + tables.temperatures])
                store(scope.qkv, at + index, value)
            with when(T.Not(is_query)):
                _encode(scope, rotated, memory, token, slot)

    def _normalise(scope: Scope, vector: Buffer, memory: Buffer, is_query: Value, is_value: Value) -> None:
        """RMSNorm of one head."""
        square = Register(f32(0.0))
        with strided(scope, form.head) as index:
            square.value = square.value + vector[index] * vector[index]
        total = reduce(scope, memory, square.value, _THREADS, lambda one, other: one + other)
        scale = let(f32(1.0) / T.sqrt(total * f32(1 / shape.head) + f32(shape.norm_eps)))
        for norm, applies in zip(norms, (is_query, T.And(T.Not(is_query), T.Not(is_value))), strict=True):
            if norm:
                with when(applies), strided(scope, shape.head) as index:
                    store(vector, index, vector[index] * scale * as_float(scope.w1[index + norm.at]))
        barrier()

    def _rotated(scope: Scope, vector: Buffer, token: Value, index: Value) -> Value:
        """(a, b) → (a cos − b sin, b cos + a sin)."""
        if halves:
            second = index >= tables.pairs
            pair = select(second, index - tables.pairs, index)
            other = select(second, index - tables.pairs, index + tables.pairs)
        else:
            second, pair = remainder(index, 2) == 1, quotient(index, 2)
            other = T.bitwise_xor(index, i32(1))
        angle = let(scope.angles + (to_int(scope.tables[State.ANGLE]) + token) * loads_per_row + pair)
        cosine, sine = as_float(scope.tables[angle]), as_float(scope.tables[angle + tables.pairs])
        return vector[index] * cosine + vector[other] * select(second, sine, f32(0.0) - sine)

    def _encode(scope: Scope, vector: Buffer, memory: Buffer, token: Value, slot: Value) -> None:
        number = let(remainder(slot - shape.heads, shape.kv_heads))
        is_value = let(slot >= shape.heads + shape.kv_heads)
        head = let(scope.layer * shape.kv_heads + number)
        row = let(first_row(scope, tables, head) + rows_before(scope, tables, head) + token)
        inverse: Value = f32(1.0)
        if observes:
            with when(scope.thread == 0):
                store(scope.paid, row, f32(0.0))
        if form.scaled:
            most = Register(f32(0.0))
            with strided(scope, form.head) as index:
                most.value = T.max(most.value, T.abs(vector[index]))
            scale = let(reduce(scope, memory, most.value, _THREADS, T.max) * f32(1 / 127))
            inverse = let(f32(1.0) / select(scale > f32(0.0), scale, f32(1.0)))
            with when(scope.thread == 0):
                store(scope.row_scales, row * 2 + to_int(is_value), scale)
        with strided(scope, form.words) as word:
            values = [vector[word * form.per_word + index] for index in range(form.per_word)]
            packed = let(pack(form, values, inverse))
            with when(is_value):
                store(scope.values, row * form.words + word, packed)
            with when(T.Not(is_value)):
                store(scope.keys, key_word(form, row, word), packed)

    reads = {"tables": "uint32"} | ({"w1": "uint32"} if any(norms) else {})
    writes = {"qkv": "float32", "keys": "uint32", "values": "uint32"}
    writes |= {"row_scales": "float32"} if form.scaled else {}
    writes |= {"paid": "float32"} if observes else {}
    return build(name, _THREADS, reads, writes, ("layer", "angles"), body, (slots, tokens), 1)


def move(name: str, dtype: str, head: int) -> Built:
    """Copy rows: workgroup y the y-th pair (source, target) of `pairs`, int32 [n, 2]. Sources are not targets of other
    pairs. Scalars: which, `KEYS`, `VALUES` or their sum."""
    form = RowForm(dtype, head)

    def body(scope: Scope) -> None:
        source, target = let(scope.pairs[scope.row * 2]), let(scope.pairs[scope.row * 2 + 1])
        for kind, bit in enumerate((KEYS, VALUES)):
            with when(T.bitwise_and(scope.which, i32(bit)) != 0):
                with strided(scope, form.words) as word:
                    if bit == KEYS:
                        store(scope.keys, key_word(form, target, word), scope.keys[key_word(form, source, word)])
                    else:
                        store(scope.values, target * form.words + word, scope.values[source * form.words + word])
                if form.scaled:
                    with when(scope.thread == 0):
                        store(scope.row_scales, target * 2 + kind, scope.row_scales[source * 2 + kind])

    writes = {"keys": "uint32", "values": "uint32"}
    writes |= {"row_scales": "float32"} if form.scaled else {}
    return build(name, _THREADS, {"pairs": "int32"}, writes, ("which",), body, (1, MOST_MOVED), 1)

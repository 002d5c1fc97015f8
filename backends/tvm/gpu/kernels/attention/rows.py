"""Rows of the KV cache: writing them from products, and moving them.

`design.RowForm` defines a row's layout in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce as fold

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import KEYS, MOST_MOVED, VALUES, Design, RowForm, State, Tables
from edge.backends.tvm.gpu.kernels.attention.transform import hadamard, reflect
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
    hold,
    i32,
    join,
    let,
    loop,
    quotient,
    remainder,
    select,
    store,
    strided,
    to_float,
    to_int,
    to_word,
    u32,
    when,
)
from edge.backends.tvm.gpu.weights import Vector
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.kv.row_formats import LARGEST, STEPS
from edge.model.cores import Attention

_THREADS = 64


def key_unit(form: RowForm, row: Value, unit: Value) -> Value:
    """The place of 16 bytes of a key, in units."""
    return (quotient(row, TILE) * form.units + unit) * TILE + remainder(row, TILE)


def key_word(form: RowForm, row: Value, word: Value) -> Value:
    return key_unit(form, row, quotient(word, 4)) * 4 + remainder(word, 4)


def row_scale(scope: Scope, form: RowForm, at: Value) -> list[Value]:
    """The scale of element `at` of `row_scales`; for int4 the scale and the least value; empty if there is none."""
    if form.dtype == "int4":
        both = let(scope.row_scales[at])
        return [hold(half(both, 0)), hold(half(both, 1))]
    return [let(scope.row_scales[at])] if form.scaled else []


def unpack(form: RowForm, word: Value, scale: Sequence[Value] = ()) -> list[Value]:
    """The values of a word as float32, for int8 without the row's scale."""
    if form.dtype == "f32":
        return [as_float(word)]
    if form.dtype == "f16":
        return [half(word, 0), half(word, 1)]
    if form.dtype == "int4":
        codes = [T.bitwise_and(T.shift_right(word, u32(4 * at)), u32(15)) for at in range(8)]
        return [to_float(code) * scale[0] + scale[1] for code in codes]
    number = let(to_int(word))
    return [to_float(T.shift_right(T.shift_left(number, i32(24 - 8 * at)), i32(24))) for at in range(4)]


def pack(form: RowForm, values: Sequence[Value], inverse: Value, least: Value) -> Value:
    """The inverse of `unpack`; inverse: 1 / scale. least: of int4."""
    if form.dtype == "f32":
        return as_word(values[0])
    if form.dtype == "f16":
        return halves(*values)
    if form.dtype == "int4":
        steps = [T.floor((value - least) * inverse + f32(0.5)) for value in values]
        small = [to_word(to_int(T.max(T.min(step, f32(STEPS)), f32(0.0)))) for step in steps]
        return fold(lambda one, other: one | other, (T.shift_left(code, u32(4 * at)) for at, code in enumerate(small)))
    codes = [to_int(T.floor(value * inverse + f32(0.5))) for value in values]
    fields = [T.shift_left(T.bitwise_and(as_word(code), u32(255)), u32(8 * at)) for at, code in enumerate(codes)]
    return fields[0] | fields[1] | fields[2] | fields[3]


def first_row(scope: Scope, tables: Tables, head: Value, token: Value) -> Value:
    """The first row in the arena of a head of a token; head: its number among those of all layers."""
    return to_int(scope.tables[_of_token(tables, head, token) + tables.starts])


def new_row(scope: Scope, tables: Tables, head: Value, token: Value) -> Value:
    """The arena row of a token of this pass."""
    row = first_row(scope, tables, head, token) + rows_before(scope, tables, head, token)
    return row if tables.alone else row + token


def position_of(scope: Scope, tables: Tables, token: Value) -> Value:
    """The position of a token of this pass."""
    if tables.alone:
        return to_int(scope.tables[token + tables.places])
    return to_int(scope.tables[State.POSITION]) + token


def rows_seen(scope: Scope, core: Attention, tables: Tables, before: Value, token: Value) -> Value:
    """Rows that a token of a chunk sees, behind `before` rows: those up to its own, or to the end of its span."""
    if tables.alone:
        return before + 1
    if not core.spans:
        return before + token + 1
    first, stop = (to_int(scope.tables[word]) for word in (State.SPAN, State.SPAN_STOP))
    return before + select(T.And(token >= first, token < stop), stop, token + 1)


def text_seen(scope: Scope, tables: Tables, token: Value) -> tuple[Value, Value]:
    """The first row that a token of an encoder sees, counted from a head's first, and the number of those that it
    sees."""
    at = let(token * 2 + tables.texts)
    return to_int(scope.tables[at]), to_int(scope.tables[at + 1])


def rows_before(scope: Scope, tables: Tables, head: Value, token: Value) -> Value:
    """The number of rows of a head of a token before this pass; of tokens that run as if alone, before the token."""
    lengths = to_int(scope.tables[_of_token(tables, head, token) + tables.lengths])
    return lengths if tables.alone else lengths + to_int(scope.tables[State.APPENDED])


def _of_token(tables: Tables, head: Value, token: Value) -> Value:
    """The place of a head of a token among starts and lengths."""
    return head + token * tables.heads if tables.alone else head


def rows_across(scope: Scope, tables: Tables, head: Value) -> Value:
    """The number of an encoder's rows that a head sees across."""
    return to_int(scope.tables[head + tables.lengths])


def buffers_of(form: RowForm) -> dict[str, str]:
    """The cache's buffers, with the types that most kernels use."""
    values = {} if form.shared else {"values": "uint32"}
    return {"keys4": "uint32x4"} | values | ({"row_scales": form.scale_type} if form.scaled else {})


def slots_of(core: Attention) -> int:
    """Heads in a row of `qkv`."""
    own = 2 * core.kv_heads if core.makes_rows and not core.latent else 0
    return core.heads * (2 if core.gated else 1) + own


@dataclass(frozen=True)
class Heads:
    """The processing of a token's heads between their products and attention. Slots are query heads, then keys, then
    values, then the gates of query heads, which are left as they are.

    halves, apart: see `Design`. norms: of queries and keys, where a model has one, with this epsilon.
    """

    core: Attention
    tables: Tables
    form: RowForm
    halves: bool
    norms: tuple[Vector | None, Vector | None]
    epsilon: float
    apart: int = 0

    @classmethod
    def of(cls, design: Design, core: Attention, layer: int) -> Heads:
        layout, form = design.weights.layers[layer], design.row_form(core)
        norms = layout.vector("attn_q_norm"), layout.vector("attn_k_norm")
        return cls(core, design.tables, form, design.halves, norms, design.shape.norm_eps, design.apart)

    @property
    def slots(self) -> int:
        return slots_of(self.core)

    @property
    def made_ready(self) -> int:
        """Slots that `make_ready` takes."""
        return self.slots - self.core.heads * self.core.gated

    @property
    def reads(self) -> dict[str, str]:
        """Input buffers besides `qkv`."""
        return {"tables": "uint32"} | ({"w1": "uint32"} if any(self.norms) else {})

    @property
    def rows(self) -> dict[str, str]:
        """Buffers of the cache."""
        return buffers_of(self.form)

    def is_query(self, slot: Value) -> Value:
        return slot < self.core.heads

    def is_value(self, slot: Value) -> Value:
        return slot >= self.core.heads + self.core.kv_heads


def make_ready(
    scope: Scope, heads: Heads, slots: int, slot_of: Callable[[Value], Value], token: Value, raw: Buffer,
    ready: Buffer, factors: Buffer,
) -> None:  # fmt: skip
    """Normalize, rotate and scale a token's heads, from `qkv` to `ready`, shared [slots, form.stored]. Ends with a
    barrier.

    raw: scratch of the same size. factors: shared [2 · slots]. slot_of: maps 0 … slots − 1 to slots.
    """
    core, head = heads.core, heads.form.stored
    with strided(scope, slots * head) as index:
        own, value = let(quotient(index, head)), let(remainder(index, head))
        store(raw, index, f32(0.0))
        with when(value < core.head_dim):
            store(raw, index, scope.qkv[(token * heads.slots + slot_of(own)) * core.head_dim + value])
    barrier()
    if any(heads.norms) or core.unit_values:  # RMSNorm of each head
        with strided(scope, slots) as own:
            squares = Register(f32(0.0))
            with loop(0, core.head_dim) as value:
                each = let(raw[own * head + value])
                squares.value = squares.value + each * each
            store(factors, own, f32(1.0) / T.sqrt(squares.value * f32(1 / core.head_dim) + f32(heads.epsilon)))
        barrier()
    with strided(scope, slots * head) as index:
        own, value = let(quotient(index, head)), let(remainder(index, head))
        slot = let(slot_of(own))
        for applies, norm, scaled in (
            (heads.is_query(slot), heads.norms[0], True),
            (T.And(T.Not(heads.is_query(slot)), T.Not(heads.is_value(slot))), heads.norms[1], False),
        ):
            with when(applies):
                _rotate(scope, heads, raw, ready, factors, own, value, norm, token, scaled=scaled)
        with when(heads.is_value(slot)):
            store(ready, index, raw[index] * factors[own] if core.unit_values else raw[index])
    barrier()


def _rotate(
    scope: Scope, heads: Heads, raw: Buffer, ready: Buffer, factors: Buffer, own: Value, value: Value,
    norm: Vector | None, token: Value, *, scaled: bool,
) -> None:  # fmt: skip
    """Apply RoPE: (a, b) → (a cos − b sin, b cos + a sin). scaled: scale as queries."""
    core, tables, head = heads.core, heads.tables, heads.form.stored

    def normed(at: Value) -> Value:
        x = raw[own * head + at]
        if norm is None:
            return x
        weight = as_float(scope.w1[T.min(at, i32(core.head_dim - 1)) + norm.at])
        return x * factors[own] * weight

    scale: Value = f32(core.scale) if scaled else f32(1.0)
    if scaled and core.temperature:
        scale = scale * as_float(scope.tables[token + tables.temperatures])
    result = Register(normed(value))
    pairs = min(tables.pairs, core.head_dim // 2)
    with when(value < 2 * pairs):
        if size := heads.apart:
            within, section = let(remainder(value, 2 * size)), quotient(value, 2 * size)
            second = within >= size
            pair = section * size + select(second, within - size, within)
            other = select(second, value - size, value + size)
        elif heads.halves:
            second = value >= pairs
            pair = select(second, value - pairs, value)
            other = select(second, value - pairs, value + pairs)
        else:
            second, pair = remainder(value, 2) == 1, quotient(value, 2)
            other = T.bitwise_xor(value, i32(1))
        angle = let(scope.angles + (to_int(scope.tables[State.ANGLE]) + token) * (2 * tables.pairs) + pair)
        cosine, sine = as_float(scope.tables[angle]), as_float(scope.tables[angle + tables.pairs])
        result.value = result.value * cosine + normed(other) * select(second, sine, f32(0.0) - sine)
    store(ready, own * head + value, result.value * scale)


def write_row(
    scope: Scope, form: RowForm, ready: Buffer, own: int, row: Value, exists: Value | None, is_value: Value,
    scales: Buffer,
) -> None:  # fmt: skip
    """Write key or value number `own` of `ready` to an arena row, if it exists; `ready` is rounded to the stored
    values. exists: None for the rounding alone.

    scales: shared; elements 2 · own and the next are used. Begins with a barrier where rows are scaled.
    """
    at = own * form.stored
    scale: Value = f32(1.0)
    least: Value = f32(0.0)
    if form.scaled:
        with when(scope.thread == 0):
            for number, found in enumerate(_find_scale(form, ready, at)):
                store(scales, 2 * own + number, found)
        barrier()
        scale = let(scales[2 * own])
        least = let(scales[2 * own + 1]) if form.dtype == "int4" else least
        if exists is not None:
            with when(T.And(exists, scope.thread == 0)):
                word = halves(scale, least) if form.dtype == "int4" else scale
                store(scope.row_scales, row * 2 + to_int(is_value), word)
    inverse = let(f32(1.0) / select(scale > f32(0.0), scale, f32(1.0))) if form.scaled else f32(1.0)
    each = 4 * form.per_word
    with strided(scope, form.units) as unit:
        first = let(unit * each + at)
        values = [let(ready[first + index]) for index in range(each)]
        words = [
            hold(pack(form, values[start : start + form.per_word], inverse, least), "uint32")
            for start in range(0, each, form.per_word)
        ]
        for number, word in enumerate(words):
            for index, value in enumerate(unpack(form, word, (scale, least))):
                rounded = value * scale if form.dtype == "int8" else value
                store(ready, first + (number * form.per_word + index), rounded)
        if exists is not None and not form.shared:
            with when(T.And(exists, is_value)):
                for number, word in enumerate(words):
                    store(scope.values, row * form.words + unit * 4 + number, word)
        if exists is not None:
            with when(T.And(exists, T.Not(is_value))):
                store(scope.keys4, key_unit(form, row, unit), join(words))


def _find_scale(form: RowForm, ready: Buffer, at: Value | int) -> list[Value]:
    """The scale of a row in `ready`; for int4 also its least value, both as float16 holds them."""
    if form.dtype == "int8":
        most = Register(f32(0.0))
        with loop(0, form.head) as value:
            most.value = T.max(most.value, T.abs(ready[at + value]))
        return [most.value * f32(1 / 127)]
    low, high = Register(ready[at]), Register(ready[at])
    with loop(0, form.head) as value:
        low.value, high.value = T.min(low.value, ready[at + value]), T.max(high.value, ready[at + value])
    numbers = (high.value - low.value) * f32(1 / STEPS), low.value
    both = hold(halves(*(T.max(T.min(each, f32(LARGEST)), f32(-LARGEST)) for each in numbers)), "uint32")
    return [half(both, 0), half(both, 1)]


def store_rows(name: str, heads: Heads, *, tokens: int, observes: bool, queries: bool = True) -> Built:
    """Make each token's queries ready for attention, in place, unless they stay as they are; and store its keys and
    values in the cache.

    Buffers: qkv float32 [tokens, slots, head]. Scalars: layer; angles, the word of `tables` where this layer's kind of
    RoPE begins. observes: clear `paid` of the new rows.
    """
    core, form = heads.core, heads.form
    first = 0 if queries else core.heads  # slot

    def body(scope: Scope) -> None:
        raw, ready, factors = scope.shared(form.stored), scope.shared(form.stored), scope.shared(2)
        slot, exists = scope.group + first if first else scope.group, scope.row < to_int(scope.tables[State.COUNT])
        token = let(T.min(scope.row, to_int(scope.tables[State.COUNT]) - 1))
        make_ready(scope, heads, 1, lambda _: slot, token, raw, ready, factors)
        if queries:
            with when(T.And(exists, heads.is_query(slot))), strided(scope, core.head_dim) as index:
                store(scope.qkv, (token * heads.slots + slot) * core.head_dim + index, ready[index])
        if not core.makes_rows:  # there are queries only
            return
        barrier()  # `write_row` changes `ready`
        kv_head = remainder(T.max(slot - core.heads, i32(0)), core.kv_heads)
        head = let(scope.layer * heads.tables.kv_heads + kv_head)
        row = let(new_row(scope, heads.tables, head, token))
        if form.transformed:
            reflect(scope, heads.tables, form, ready, 1, factors, head, lambda _: T.Not(heads.is_value(slot)))
            hadamard(scope, form, ready, 1)
        is_row = T.And(exists, T.Not(heads.is_query(slot)))
        write_row(scope, form, ready, 0, row, is_row, heads.is_value(slot), factors)
        if observes:
            with when(T.And(is_row, scope.thread == 0)):
                store(scope.paid, row, f32(0.0))

    reads, writes = heads.reads, {"qkv": "float32"}
    if not core.heads or not queries:
        reads, writes = reads | writes, {}
    if core.makes_rows:
        writes |= heads.rows | ({"paid": "float32"} if observes else {})
    return build(name, _THREADS, reads, writes, ("layer", "angles"), body, (heads.made_ready - first, tokens), 1)


def move(name: str, form: RowForm) -> Built:
    """Copy rows: workgroup y copies the y-th pair (source, target) of `pairs`, int32 [n, 2]. Sources are not targets of
    other pairs. Scalars: which, `KEYS`, `VALUES` or their sum."""

    def body(scope: Scope) -> None:
        source, target = let(scope.pairs[scope.row * 2]), let(scope.pairs[scope.row * 2 + 1])
        for kind, bit in enumerate((KEYS,) if form.shared else (KEYS, VALUES)):
            with when(T.bitwise_and(scope.which, i32(bit)) != 0):
                with strided(scope, form.words) as word:
                    if bit == KEYS:
                        store(scope.keys, key_word(form, target, word), scope.keys[key_word(form, source, word)])
                    else:
                        store(scope.values, target * form.words + word, scope.values[source * form.words + word])
                if form.scaled:
                    with when(scope.thread == 0):
                        store(scope.row_scales, target * 2 + kind, scope.row_scales[source * 2 + kind])

    writes = {"keys": "uint32"} | ({} if form.shared else {"values": "uint32"})
    writes |= {"row_scales": form.scale_type} if form.scaled else {}
    return build(name, _THREADS, {"pairs": "int32"}, writes, ("which",), body, (1, MOST_MOVED), 1)

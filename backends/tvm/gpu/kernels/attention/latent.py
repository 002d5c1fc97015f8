"""Multi-head latent attention (`edge.model.cores.Latent`): its row, and the ends of its queries, which are rotated."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import Design, RowForm, State, Tables
from edge.backends.tvm.gpu.kernels.attention.rows import buffers_of, new_row, write_row
from edge.backends.tvm.gpu.kernels.attention.transform import hadamard, reflect
from edge.backends.tvm.gpu.kernels.functions import sigmoid
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    as_float,
    barrier,
    build,
    f32,
    hold,
    i32,
    let,
    quotient,
    reduce,
    remainder,
    select,
    store,
    strided,
    to_int,
    when,
)
from edge.backends.tvm.gpu.weights import Vector
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Attention

_THREADS = 64


@dataclass(frozen=True)
class LatentRows:
    """What a layer's row and queries depend on. halves: see `Design`. query_norm: of the queries' latent vector, where
    they have one. norm: of the row's."""

    core: Attention
    tables: Tables
    form: RowForm
    halves: bool
    query_norm: Vector | None
    norm: Vector
    epsilon: float

    @classmethod
    def of(cls, design: Design, core: Attention, layer: int) -> LatentRows:
        layout, form = design.weights.layers[layer], RowForm.of(core, design.kv_dtype)
        query_norm, norm = layout.vector("attn_q_a_norm"), layout.vector("attn_kv_a_norm")
        assert norm
        return cls(core, design.tables, form, design.halves, query_norm, norm, design.shape.norm_eps)

    @property
    def rank(self) -> int:
        """Values of the queries' latent vector; 0: there is none."""
        return self.core.latent.rank if self.core.latent else 0

    @property
    def stride(self) -> int:
        """Values of a token's row of `latents`: the queries' latent vector, the row, and the heads' gates."""
        gates = self.core.heads if self.core.latent and self.core.latent.gated else 0
        return self.rank + self.core.row.key + gates


def store_latent(name: str, rows: LatentRows, *, tokens: int, observes: bool) -> Built:
    """Store each token's row, the normalised latent vector and the rotated key, of `latents` float32 [tokens,
    stride]; and normalise the queries' latent vector in front of them into `ranked`, float32 [tokens, rank].

    Scalars: as of `rows.store_rows`. observes: clear `paid` of the new rows.
    """
    row, form, rank = rows.core.row, rows.form, rows.rank

    def body(scope: Scope) -> None:
        ready, memory, factors = scope.shared(form.stored), scope.shared(_THREADS), scope.shared(2)
        count = to_int(scope.tables[State.COUNT])
        exists, token = scope.row < count, let(T.min(scope.row, count - 1))
        first = let(token * rows.stride)
        if rows.query_norm:
            scale = _scale(scope, memory, first, rank)
            with strided(scope, rank) as at:
                weight = as_float(scope.w1[at + rows.query_norm.at])
                store(scope.ranked, token * rank + at, scope.latents[first + at] * scale * weight)
        own = let(first + rank)
        scale = _scale(scope, memory, own, row.value)
        with strided(scope, form.stored) as at:
            value = let(scope.latents[own + T.min(at, i32(row.value - 1))])
            weight = as_float(scope.w1[T.min(at, i32(row.value - 1)) + rows.norm.at])
            with when(T.Or(at < row.value, at >= row.key)):  # padding is zero
                store(ready, at, select(at < row.value, value * scale * weight, f32(0.0)))
        with strided(scope, rows.core.rotated) as at:
            store(ready, at + row.value, _rotated(scope, rows, scope.latents, let(own + row.value), at, token))
        barrier()
        head = let(scope.layer * rows.tables.kv_heads)
        if form.transformed:
            reflect(scope, rows.tables, form, ready, 1, factors, head)
            hadamard(scope, form, ready, 1)
        target = let(new_row(scope, rows.tables, head, token))
        write_row(scope, form, ready, 0, target, exists, i32(0) == i32(1), factors)
        if observes:
            with when(T.And(exists, scope.thread == 0)):
                store(scope.paid, target, f32(0.0))

    def _scale(scope: Scope, memory: Buffer, start: Value, size: int) -> Value:
        """1 / the root of the mean of squares."""
        squares = _squares(scope, memory, start, size)
        return hold(f32(1.0) / T.sqrt(squares * f32(1 / size) + f32(rows.epsilon)))

    reads = {"latents": "float32", "tables": "uint32", "w1": "uint32"}
    writes = buffers_of(form) | ({"ranked": "float32"} if rank else {}) | ({"paid": "float32"} if observes else {})
    return build(name, _THREADS, reads, writes, ("layer", "angles"), body, (1, tokens), 1)


def rotate_queries(name: str, rows: LatentRows, *, tokens: int) -> Built:
    """Rotate and scale the ends of queries, float32 [tokens, heads, plain + rotated], into those of `qkv`, float32
    [tokens, heads, key]. Scalars: angles."""
    core = rows.core

    def body(scope: Scope) -> None:
        token = let(T.min(scope.row, to_int(scope.tables[State.COUNT]) - 1))
        line = let(token * core.heads + scope.group)
        source = let(line * rows.core.query + (rows.core.query - rows.core.rotated))
        with strided(scope, rows.core.rotated) as at:
            value = _rotated(scope, rows, scope.queries, source, at, token)
            store(scope.qkv, line * core.row.key + core.row.value + at, value * f32(core.scale))

    reads = {"queries": "float32", "tables": "uint32"}
    return build(name, _THREADS, reads, {"qkv": "float32"}, ("angles",), body, (core.heads, tokens), 1)


def gate_heads(name: str, rows: LatentRows, *, tokens: int) -> Built:
    """Multiply the heads' outputs in `expanded` by the sigmoids of their gates, which are the ends of `latents`."""
    core, padded = rows.core, round_up(rows.core.width, PART)
    assert core.latent
    size = core.latent.value

    def body(scope: Scope) -> None:
        gate = let(sigmoid(scope.latents[scope.row * rows.stride + (rows.rank + core.row.key) + scope.group]))
        with strided(scope, size) as at:
            out = let(scope.row * padded + scope.group * size + at)
            store(scope.expanded, out, scope.expanded[out] * gate)

    writes = {"expanded": "float32"}
    return build(name, _THREADS, {"latents": "float32"}, writes, (), body, (core.heads, tokens), 1)


def _squares(scope: Scope, memory: Buffer, start: Value, size: int) -> Value:
    """The sum of the squares of `size` values of `latents`, by all threads."""
    found = Register(f32(0.0))
    with strided(scope, size) as at:
        value = let(scope.latents[start + at])
        found.value = found.value + value * value
    return reduce(scope, memory, found.value, _THREADS, lambda one, other: one + other)


def _rotated(scope: Scope, rows: LatentRows, values: Buffer, start: Value, at: Value, token: Value) -> Value:
    """Value `at` of those that are rotated, which begin at `start`."""
    pairs, tables = rows.core.rotated // 2, rows.tables
    if rows.halves:
        second, pair, before = at >= pairs, remainder(at, pairs), 0
        other = select(second, at - pairs, at + pairs)
    else:  # the tables have values that are not rotated, too
        second, pair, before = remainder(at, 2) == 1, quotient(at, 2), rows.core.row.value // 2
        other = T.bitwise_xor(at, i32(1))
    angle = let(scope.angles + (to_int(scope.tables[State.ANGLE]) + token) * (2 * tables.pairs) + (pair + before))
    cosine, sine = as_float(scope.tables[angle]), as_float(scope.tables[angle + tables.pairs])
    return let(values[start + at] * cosine + values[start + other] * select(second, sine, f32(0.0) - sine))

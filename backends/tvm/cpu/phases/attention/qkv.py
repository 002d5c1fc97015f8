"""Queries to scratch, keys and values to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import (
    Strip,
    Value,
    floats,
    i64,
    let,
    load,
    loop,
    quotient,
    remainder,
    spread,
    store,
    swap_pairs,
    total,
    when,
)
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.cpu.phases.project import multiply_rows
from edge.backends.tvm.packing.cores import round_up


def qkv(b: PassBuilder, layer: Value, inputs: Inputs) -> None:
    """Queries to scratch, keys and values to the cache; keys and queries are rotated by RoPE.

    A head of keys or values is one piece of work, because quantized rows need its largest value; so is a head of
    queries that is normalised or transformed. It belongs to the thread that has its first tile.
    """
    core = b.attention
    queries_whole = "attn_q_norm" in b.names or b.cache.form.transformed
    before = 0
    for name in ("attn_q", *(("attn_k", "attn_v") if core.makes_rows else ())):
        heads, parts = core.heads if name == "attn_q" else core.kv_heads, _parts(b, name)
        if name == "attn_q" and not queries_whole:
            with _pieces(b, heads * parts, before, 1) as tile:
                _query_tile(b, layer, tile, inputs)
        else:
            with _pieces(b, heads, before, parts) as head:
                _whole_head(b, name, layer, head, inputs)
        before += heads * parts
    if "attn_q_gate" in b.names:
        multiply_rows(
            b, layer, "attn_q_gate", inputs, round_up(core.width, 16), b.at("gates"), round_up(core.width, 32)
        )


def cross(b: PassBuilder, layer: Value, inputs: Inputs) -> None:
    """Keys and values of an encoder's states, from row `position` on. A head is a piece, first of keys, then of
    values."""
    heads = b.attention.kv_heads

    def write(name: str, head: Value, token: Value, vectors: Sequence[Value]) -> None:
        store_row = b.cache.write_key if name == "attn_k" else b.cache.write_value
        store_row(b.first_row(layer, head, token), let(b.position + token), vectors)

    with b.dealt_out(i64(2 * heads)) as piece:
        for name, first in zip(b.attention.crossing, (0, heads), strict=True):
            with when(T.And(piece >= first, piece < first + heads)):
                _whole_head(b, name, layer, let(piece - first), inputs, write)


@contextmanager
def _pieces(b: PassBuilder, count: int, before: int, size: int) -> Iterator[Value]:
    """The thread's pieces of `count`, each of `size` tiles, after `before` tiles of the same phase."""
    if b.dealt:
        with b.dealt_out(i64(count)) as piece:
            yield piece
        return
    own = b.attention.makes_rows * b.attention.kv_heads * (b.cache.key + b.cache.value) // 16
    tiles = b.attention.heads * (b.cache.key // 16) + own
    first, last = (_clip(T.truncdiv(edge - before + (size - 1), i64(size)), count) for edge in b.range(i64(tiles)))
    with loop(first, last) as piece:
        yield piece


def _parts(b: PassBuilder, name: str) -> int:
    """Tiles of a head."""
    return (b.cache.value if name == "attn_v" else b.cache.key) // 16


def _query_tile(b: PassBuilder, layer: Value, tile: Value, inputs: Inputs) -> None:
    parts = b.cache.key // 16
    head, part = let(quotient(tile, parts)), let(remainder(tile, parts))
    with b.batches() as tokens:
        sums = b.product("attn_q", layer, tile, inputs, b.rows(tokens))
        for token, each in zip(tokens, sums, strict=True):
            store_query(b, head, token, part, rotate(b, layer, each.value, token, part))


def store_query(b: PassBuilder, head: Value, token: Value, part: Value | int, vector: Value) -> None:
    """The query heads of a KV head lie side by side, [KV heads, tokens · group, head]."""
    core, size = b.attention, b.cache.key
    first = b.at("queries") + quotient(head, core.group) * b.at("query_rows") * size
    at = first + (token * core.group + remainder(head, core.group)) * size + part * 16
    if core.temperature:
        vector = vector * spread(b.floats[b.at("temperatures") + token])
    store(b.floats, at, vector * floats(core.scale))


Store = Callable[[str, Value, Value, Sequence[Value]], None]
"""Stores a head of a matrix's product with a token."""


def _whole_head(
    b: PassBuilder, name: str, layer: Value, head: Value, inputs: Inputs, write: Store | None = None
) -> None:
    parts = _parts(b, name)
    with b.batches() as tokens:
        strip = Strip(len(tokens) * parts)
        with loop(i64(0), i64(parts)) as part:
            tile = let(head * parts + part)
            sums = b.product(name, layer, tile, inputs, b.rows(tokens))
            for index, each in enumerate(sums):
                strip[index * parts + part] = each.value
        with loop(i64(0), i64(len(tokens))) as index:
            token = let(tokens[0] + index)
            with b.if_in_chunk(token):
                vectors = [let(strip[index * parts + part]) for part in range(parts)]
                if write:
                    write(name, head, token, vectors)
                else:
                    _store_head(b, name, layer, head, token, vectors)


def _store_head(b: PassBuilder, name: str, layer: Value, head: Value, token: Value, vectors: Sequence[Value]) -> None:
    core = b.attention
    kv_head = quotient(head, core.group) if name == "attn_q" else head
    if name == "attn_v":
        vectors = unit(vectors, core.row.value, b.shape.norm_eps) if core.unit_values else vectors
        b.cache.write_value(b.first_row(layer, head, token), b.row(layer, head, token), vectors)
        return
    if f"{name}_norm" in b.names:
        vectors = _norm_head(b, f"{name}_norm", layer, vectors)
    vectors = [let(rotate(b, layer, vector, token, i64(part))) for part, vector in enumerate(vectors)]
    if name == "attn_k":
        vectors = placed_key(b, layer, kv_head, vectors)
        b.cache.write_key(b.first_row(layer, head, token), b.row(layer, head, token), vectors)
    else:
        if b.cache.form.transformed and not b.centred:
            vectors = b.reflected(layer, kv_head, vectors)
        for part, vector in enumerate(b.cache.transform(vectors)):
            store_query(b, head, token, part, vector)


def _norm_head(b: PassBuilder, norm: str, layer: Value, vectors: Sequence[Value]) -> list[Value]:
    """RMSNorm of one head."""
    weight, normed = let(b.layer_at(layer, norm)), unit(vectors, b.attention.head_dim, b.shape.norm_eps)
    return [let(vector * load(b.weights.floats, weight + part * 16)) for part, vector in enumerate(normed)]


def unit(vectors: Sequence[Value], size: int, epsilon: float) -> list[Value]:
    """`size` values, padded with zeros, divided by their root mean square."""
    squares: Value = floats(0)
    for vector in vectors:
        squares = let(squares + vector * vector)
    mean = total(squares) * T.float32(1 / size)
    scale = let(spread(T.float32(1) / T.sqrt(mean + T.float32(epsilon))))
    return [vector * scale for vector in vectors]


def rotate(b: PassBuilder, layer: Value, vector: Value, token: Value, part: Value) -> Value:
    """RoPE on 8 neighbouring pairs: (a, b) → (a cos − b sin, b cos + a sin). The table holds −sin, +sin."""
    head = b.shape.padded_head
    at = let(b.layer_at(layer, "angles") + (b.first_angle + token) * (2 * head) + part * 16)
    vector = let(vector)
    return vector * load(b.rope, at) + swap_pairs(vector) * load(b.rope, at + head)


def _clip(value: Value, most: int) -> Value:
    return let(T.max(i64(0), T.min(value, i64(most))))


def placed_key(b: PassBuilder, layer: Value, kv_head: Value, vectors: Sequence[Value]) -> list[Value]:
    """A rotated key, 16 values a vector, as the cache takes it: reflected, or without its mean."""
    if b.centred:
        means = b.normal(layer, kv_head, len(vectors))
        return [let(vector - mean) for vector, mean in zip(vectors, means, strict=True)]
    return b.reflected(layer, kv_head, vectors) if b.cache.form.transformed else list(vectors)

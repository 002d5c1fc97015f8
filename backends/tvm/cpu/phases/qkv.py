"""Queries to scratch, keys and values to the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.hadamard import reflect
from edge.backends.tvm.cpu.kernels.lanes import (
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
)
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.phases.frame import Frame
from edge.backends.tvm.packing.layout import GROUPS


def qkv(f: Frame, layer: Value, inputs: Inputs) -> None:
    """Queries to scratch, keys and values to the cache; keys and queries turned by RoPE.

    A head of keys or values is one piece of work, as quantized rows need its largest value, and so are queries
    that are normalised or turned as such rows are. It is the thread's that has its first tile.
    """
    shape, parts = f.shape, f.shape.padded_head // 16
    queries_whole = "attn_q_norm" in f.design.vectors or f.cache.form.transformed
    before = 0
    for name in GROUPS["qkv"]:
        heads = shape.heads if name == "attn_q" else shape.kv_heads
        if name == "attn_q" and not queries_whole:
            with _pieces(f, heads * parts, before, 1) as tile:
                _query_tile(f, layer, tile, inputs)
        else:
            with _pieces(f, heads, before, parts) as head:
                _whole_head(f, name, layer, head, inputs)
        before += heads * parts


@contextmanager
def _pieces(f: Frame, count: int, before: int, size: int) -> Iterator[Value]:
    """The thread's pieces of `count`, each of `size` tiles, behind `before` tiles of the same phase."""
    if f.dealt:
        with f.dealt_out(i64(count)) as piece:
            yield piece
        return
    tiles = (f.shape.heads + 2 * f.shape.kv_heads) * (f.shape.padded_head // 16)
    first, last = (_clip(T.truncdiv(edge - before + (size - 1), i64(size)), count) for edge in f.range(i64(tiles)))
    with loop(first, last) as piece:
        yield piece


def _query_tile(f: Frame, layer: Value, tile: Value, inputs: Inputs) -> None:
    parts = f.shape.padded_head // 16
    head, part = let(quotient(tile, parts)), let(remainder(tile, parts))
    with f.batches() as tokens:
        sums = f.product("attn_q", layer, tile, inputs, f.rows(tokens))
        for token, each in zip(tokens, sums, strict=True):
            _store_query(f, head, token, part, _turn(f, layer, each.value, token, part))


def _store_query(f: Frame, head: Value, token: Value, part: Value | int, vector: Value) -> None:
    """The query heads of a KV head lie together, [KV heads, tokens · group, head]."""
    shape = f.shape
    first = f.at("queries") + quotient(head, shape.group) * f.at("query_rows") * shape.padded_head
    at = first + (token * shape.group + remainder(head, shape.group)) * shape.padded_head + part * 16
    store(f.floats, at, vector * floats(shape.query_scale))


def _whole_head(f: Frame, name: str, layer: Value, head: Value, inputs: Inputs) -> None:
    parts = f.shape.padded_head // 16
    with f.batches() as tokens:
        strip = Strip(len(tokens) * parts)
        with loop(i64(0), i64(parts)) as part:
            tile = let(head * parts + part)
            sums = f.product(name, layer, tile, inputs, f.rows(tokens))
            for index, each in enumerate(sums):
                strip[index * parts + part] = each.value
        with loop(i64(0), i64(len(tokens))) as index:
            token = let(tokens[0] + index)
            with f.if_real(token):
                vectors = [let(strip[index * parts + part]) for part in range(parts)]
                _store_head(f, name, layer, head, token, vectors)


def _store_head(f: Frame, name: str, layer: Value, head: Value, token: Value, vectors: Sequence[Value]) -> None:
    kv_head = quotient(head, f.shape.group) if name == "attn_q" else head
    if name == "attn_v":
        row = let(f.length(layer, head) + token)
        f.cache.write_value(let(f.cache.first_row(layer, head)), row, vectors)
        return
    if f"{name}_norm" in f.design.vectors:
        vectors = _norm_head(f, f"{name}_norm", layer, vectors)
    vectors = [let(_turn(f, layer, vector, token, i64(part))) for part, vector in enumerate(vectors)]
    if f.cache.form.transformed:
        normals = let(f.at("mirrors") + (layer * f.shape.kv_heads + kv_head) * f.shape.padded_head)
        mirrors = [let(load(f.floats, normals + part * 16)) for part in range(len(vectors))]
        vectors = reflect(vectors, mirrors)
    if name == "attn_k":
        row = let(f.length(layer, head) + token)
        f.cache.write_key(let(f.cache.first_row(layer, head)), row, vectors)
    else:
        for part, vector in enumerate(f.cache.turn(vectors)):
            _store_query(f, head, token, part, vector)


def _norm_head(f: Frame, norm: str, layer: Value, vectors: Sequence[Value]) -> list[Value]:
    """RMSNorm of one head."""
    squares: Value = floats(0)
    for vector in vectors:
        squares = let(squares + vector * vector)
    mean = total(squares) * T.float32(1 / f.shape.head)
    scale = let(spread(T.float32(1) / T.sqrt(mean + T.float32(f.shape.norm_eps))))
    weight = let(f.layer_at(layer, norm))
    return [let(vector * scale * load(f.weights.floats, weight + part * 16)) for part, vector in enumerate(vectors)]


def _turn(f: Frame, layer: Value, vector: Value, token: Value, part: Value) -> Value:
    """RoPE on 8 neighbouring pairs: (a, b) → (a cos − b sin, b cos + a sin). The table holds −sin, +sin."""
    head = f.shape.padded_head
    at = let(f.layer_at(layer, "angles") + (f.first_angle + token) * (2 * head) + part * 16)
    vector = let(vector)
    return vector * load(f.rope, at) + swap_pairs(vector) * load(f.rope, at + head)


def _clip(value: Value, most: int) -> Value:
    return let(T.max(i64(0), T.min(value, i64(most))))

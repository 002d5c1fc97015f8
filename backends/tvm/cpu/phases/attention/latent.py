"""Multi-head latent attention (`edge.model.cores.Latent`): what stands in place of qkv.py, and before the output.

All heads read one row, so that attention itself is that of a single KV head. A matrix of each head multiplies its query
before, and its output behind: a head's tiles read its share of the row that holds all heads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.functions import NORMS
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, load, quotient, remainder, spread, store, when
from edge.backends.tvm.cpu.phases.adapt import adapt
from edge.backends.tvm.cpu.phases.attention.expanded import attend_heads, expands, gate_head, turn_matrices
from edge.backends.tvm.cpu.phases.attention.qkv import placed_key, rotate, store_query, unit
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import Part, multiply_rows, of_normalised
from edge.backends.tvm.kv.row_formats import BALANCED
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Latent


def make_latent_rows(b: PassBuilder, layer: Value) -> None:
    """Queries to scratch, the row to the cache."""
    latent = _latent(b)
    with of_normalised(b, layer, "qkv") as inputs:
        if latent.rank:
            multiply_rows(b, layer, "attn_q_a", inputs, latent.rank, b.at("ranked"), latent.rank)
        else:
            _make_queries(b, layer, "attn_q", inputs)
        multiply_rows(b, layer, "attn_kv_a_mqa", inputs, b.attention.row.key, b.at("latents"), b.attention.row.key)
        if latent.gated:
            gates = round_up(b.attention.heads, 16)
            multiply_rows(b, layer, "attn_gate", inputs, gates, b.at("gates"), gates)
    if latent.rank:
        _rank(b, layer)
    if (expanded := expands(b)) is not None:
        with when(expanded):
            turn_matrices(b, layer)
    with _unless(expanded):
        width = b.attention.heads * latent.plain
        b.quantize_chunk("plain", width, layer, "absorb")
        with b.phase("absorb", layer):
            _absorb(b, layer, b.quantized_inputs("plain", width, layer, "absorb", private=False))
            if expanded is None:
                _store_rows(b, layer)
    if expanded is not None:
        with b.phase("absorb", layer):
            _store_rows(b, layer)
    if b.cache.form.transformed:
        _transform_queries(b, layer)


def attend_latent(b: PassBuilder, layer: Value, attend: Unit) -> None:
    """Attend by `attend`, or in the expanded form."""
    if (expanded := expands(b)) is not None:
        with when(expanded):
            attend_heads(b, layer)
    with _unless(expanded):
        attend(b, layer)


def expand(b: PassBuilder, layer: Value, width: int, first: Part | None) -> None:
    """`attn_v_b` of each head times what it has mixed, unless values were expanded before. first: as for `project`."""
    with _unless(expands(b)):
        _expand(b, layer, width, first)


def _expand(b: PassBuilder, layer: Value, width: int, first: Part | None) -> None:
    if not b.apart:
        b.quantize_chunk("mixed", width, layer, "expand")
    with b.phase("expand", layer):
        if first:
            first(b, layer)
        if b.apart:
            inputs = b.inputs("mixed", width)
        else:
            inputs = b.quantized_inputs("mixed", width, layer, "expand", private=True)
        core, parts = b.attention, _latent(b).value // 16
        with b.tiles(core.heads * parts) as tile:
            head = let(quotient(tile, parts))
            own = inputs.from_block(let(head * (core.row.value // 32)))
            with b.batches() as tokens:
                sums = b.product("attn_v_b", layer, tile, own, b.rows(tokens), adapted=False)
                for token, each in zip(tokens, sums, strict=True):
                    out = b.at("expanded") + token * core.width + tile * 16
                    store(b.floats, out, gate_head(b, token, head, [each.value])[0])


def _unless(condition: Value | None) -> AbstractContextManager[None]:
    return nullcontext() if condition is None else when(T.Not(condition))


def _latent(b: PassBuilder) -> Latent:
    assert b.attention.latent is not None
    return b.attention.latent


def _rank(b: PassBuilder, layer: Value) -> None:
    """Queries from their own latent vector."""
    rank = _latent(b).rank

    def norm(token: Value, row: Value) -> None:
        NORMS["rms"](
            b.floats, let(b.at("ranked") + token * rank), b.weights.floats, let(b.layer_at(layer, "attn_q_a_norm")),
            None, rank, rank, b.shape.norm_eps, b.floats, let(b.at("ranked_normed") + row * rank),
        )  # fmt: skip
        b.quantize_row("ranked_normed", rank, row, row, b.blocks("queries"))

    if not b.single:
        with b.phase("rank", layer), b.shared_out(b.count) as token:
            norm(token, token)
    with b.phase("queries", layer):
        if b.single:
            norm(i64(0), b.thread)
            b.mark("rank", layer)
        inputs = b.inputs("ranked_normed", rank)
        adapt(b, "queries", layer, inputs)
        _make_queries(b, layer, "attn_q_b", inputs)


def _make_queries(b: PassBuilder, layer: Value, name: str, inputs: Inputs) -> None:
    """The parts of queries without a position to `plain`; the others, rotated, to the ends of queries."""
    core, latent = b.attention, _latent(b)
    plain, parts = latent.plain // 16, core.query // 16
    with b.tiles(core.heads * parts) as tile:
        head, part = let(quotient(tile, parts)), let(remainder(tile, parts))
        behind = let(part - plain + core.row.value // 16)
        with b.batches() as tokens:
            for token, each in zip(tokens, b.product(name, layer, tile, inputs, b.rows(tokens)), strict=True):
                with when(part < plain):
                    at = b.at("plain") + (token * core.heads + head) * latent.plain + part * 16
                    store(b.floats, at, each.value)
                with when(part >= plain):
                    end = rotate(b, layer, each.value, token, behind)
                    store_query(b, head, token, behind, _balanced(b, layer, end, -1))


def _balanced(b: PassBuilder, layer: Value, rotated: Value, sign: int) -> Value:
    """Times 2 to the layer's balance, or divided by it (sign −1)."""
    if b.design.kv_dtype not in BALANCED:
        return rotated
    exponent = let(T.cast(b.layer_at(layer, "balance"), "int32"))
    return rotated * spread(T.reinterpret("float32", (exponent * T.int32(sign) + T.int32(127)) * T.int32(1 << 23)))


def _absorb(b: PassBuilder, layer: Value, inputs: Inputs) -> None:
    """The beginnings of queries: `attn_k_b` of each head times the part without a position."""
    core, parts = b.attention, b.attention.row.value // 16
    with b.tiles(core.heads * parts) as tile:
        head, part = let(quotient(tile, parts)), let(remainder(tile, parts))
        own = inputs.from_block(let(head * (_latent(b).plain // 32)))
        with b.batches() as tokens:
            sums = b.product("attn_k_b", layer, tile, own, b.rows(tokens), adapted=False)
            for token, each in zip(tokens, sums, strict=True):
                store_query(b, head, token, part, each.value)


def _store_rows(b: PassBuilder, layer: Value) -> None:
    with b.shared_out(b.count) as token:
        _store_row(b, layer, token)


def _store_row(b: PassBuilder, layer: Value, token: Value) -> None:
    """The normalised latent vector, and the key behind it, rotated."""
    row, first = b.attention.row, let(b.at("latents") + token * b.attention.row.key)
    vectors = [let(load(b.floats, first + part * 16)) for part in range(row.key // 16)]
    parts, weight = row.value // 16, let(b.layer_at(layer, "attn_kv_a_norm"))
    normed = unit(vectors[:parts], row.value, b.shape.norm_eps)
    values = [let(each * load(b.weights.floats, weight + part * 16)) for part, each in enumerate(normed)]
    keys = [rotate(b, layer, each, token, i64(parts + part)) for part, each in enumerate(vectors[parts:])]
    keys = [let(_balanced(b, layer, each, 1)) for each in keys]
    at = b.first_row(layer, i64(0), token), b.row(layer, i64(0), token)
    whole = [*values, *keys]
    b.cache.write_key(*at, placed_key(b, layer, i64(0), whole))


def _transform_queries(b: PassBuilder, layer: Value) -> None:
    """Whole queries, as the cache transforms keys."""
    size = b.cache.key
    with b.phase("transform", layer), b.shared_out(let(b.count * b.attention.heads)) as line:
        first = let(b.at("queries") + line * size)
        vectors = [let(load(b.floats, first + part * 16)) for part in range(size // 16)]
        for part, each in enumerate(b.cache.transform(b.reflected(layer, i64(0), vectors))):
            store(b.floats, first + part * 16, each)

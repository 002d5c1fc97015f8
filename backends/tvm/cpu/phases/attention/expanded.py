"""Long chunks of latent attention, in its expanded form (`kernels/expanded.py`), where that costs less.

Each head's matrices are read out of their blocks by products with the rows of an identity matrix, once a chunk, into
the memory of the heads' outputs, which the expanded form does not use.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import gcd

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import Query, ScoreLimits, Work, finish
from edge.backends.tvm.cpu.kernels.expanded import Expanded, HeadMatrices, attend_expanded
from edge.backends.tvm.cpu.kernels.functions import sigmoid
from edge.backends.tvm.cpu.kernels.isas.generic import PairIsa
from edge.backends.tvm.cpu.kernels.vectors import (
    Value,
    floats,
    i64,
    let,
    load,
    loop,
    opaque,
    quotient,
    spread,
    store,
    when,
)
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.cpu.scratch import EXPANDED_BLOCK, expanded_offsets
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Attention

_IDENTITY = 64  # rows of an identity matrix that are multiplied at once, at most


def crossover(core: Attention) -> int:
    """Tokens of a chunk from which on the expanded form takes fewer products, and its matrices fit their place.

    A row costs a query 2 · key products in the absorbed form, or those of the head's own key and value; expanding it
    costs rank · (plain + value).
    """
    assert core.latent
    row, own = core.row, core.latent.plain + core.latent.value
    saved = 2 * row.key - (own + row.key - row.value)
    fitting = -(-_IDENTITY // core.heads) + -(-own // 2)
    return max(_IDENTITY, fitting, -(-row.value * own // saved)) if saved > 0 else 1 << 30


def expands(b: PassBuilder) -> Value | None:
    """Whether this pass of latent attention runs in the expanded form; None: none does. Rows of 4 bits are mixed by
    their transformation, apps share code with CPUs without BF16, and observers want the absorbed queries."""
    paired = isinstance(b.isa, PairIsa) and not b.design.exact and b.target.pair_rows > 0
    if not b.attention.latent or b.stepwise or b.apart or not paired or b.cache.form.transformed or b.design.exported:
        return None
    return let(T.And(b.count >= crossover(b.attention), b.observed == 0))


def turn_matrices(b: PassBuilder, layer: Value) -> None:
    """Write all heads' matrices in BF16, in phases of their own."""
    core, isa = b.attention, b.isa
    assert core.latent
    assert isinstance(isa, PairIsa)
    rank, plain, value = core.row.value, core.latent.plain, core.latent.value
    for name, columns, rows in (("attn_k_b", plain, rank), ("attn_v_b", rank, value)):
        group = "absorb" if name == "attn_k_b" else "expand"
        inputs, at_once = b.inputs("mixed", columns), gcd(columns, _IDENTITY)
        assert at_once % b.batch == b.batch % 2 == 0
        with loop(i64(0), i64(columns // at_once)) as turn:
            first = let(turn * at_once)
            with b.phase("absorb", layer), b.shared_out(i64(at_once)) as row:
                _write_identity(b, row, let(first + row), columns, b.blocks(group))
            with b.phase("absorb", layer), b.tiles(core.heads * rows // 16) as tile:
                matrices = _matrices(b, let(quotient(tile, rows // 16)))
                part = let(tile - quotient(tile, rows // 16) * (rows // 16))
                with loop(i64(0), i64(at_once // b.batch)) as batch:
                    chosen = [let(batch * b.batch + index) for index in range(b.batch)]
                    sums = [each.value for each in b.product(name, layer, tile, inputs, chosen, adapted=False)]
                    if name == "attn_k_b":
                        for own, each in zip(chosen, sums, strict=True):
                            at = matrices.keys + (first + own) * (rank // 2) + part * 8
                            store(b.floats, at, isa.neighbours(each), 8)
                    else:
                        for own, one, other in zip(chosen[::2], sums[::2], sums[1::2], strict=True):
                            at = matrices.values + quotient(first + own, 2) * value + part * 16
                            store(b.floats, at, isa.pair(one, other))


def attend_heads(b: PassBuilder, layer: Value) -> None:
    """Each thread attends for all queries of a head at a time; outputs go to `expanded`."""
    core, source, height = b.attention, b.rows_of(layer), b.target.score_rows
    assert core.latent
    latent, size, rotated = core.latent, b.cache.key, core.rotated
    groups, first_row = let(quotient(b.count + (height - 1), height)), b.first_row(source, i64(0), i64(0))
    fixed = expanded_offsets(core, b.target)
    start = let(b.at("pairs") + b.thread * b.at("pair_stride"))
    at = {name: let(start + offset) for name, offset in fixed.items()}
    lines = let(quotient(groups * height + 15, 16) * 16)
    sums, outs = let(at["size"] + lines), let(at["size"] + 2 * lines)
    work = Work(b.floats, at["scores"], outs, at["size"], sums, EXPANDED_BLOCK)
    own = replace(b.cache, value=latent.value)
    memory = Expanded(at["rows"], at["keys"], at["values"], let(outs + lines * latent.value))
    with b.dealt_out(i64(core.heads)) as head:

        def query(line: Value) -> Query:
            token = opaque(T.min(line, b.count - 1))
            visible = let(b.row(source, i64(0), b.seen(token)) + 1)
            return Query(let(token * core.heads + head), visible, b.position_of(token))

        def pack_query(query: Query, out: Value) -> None:
            isa = b.isa
            assert isinstance(isa, PairIsa)
            plain = let(b.at("plain") + query.at * latent.plain)
            end = let(b.at("queries") + query.at * size + core.row.value)
            for part in range(latent.plain // 16):
                scaled = load(b.floats, plain + part * 16) * floats(core.scale)
                store(b.floats, out + part * 8, isa.neighbours(scaled), 8)
            for part in range(rotated // 16):
                place = out + latent.plain // 2 + part * 8
                store(b.floats, place, isa.neighbours(load(b.floats, end + part * 16)), 8)

        def rows_of(group: Value) -> list[Query]:
            return [query(let(group * height + index)) for index in range(height)]

        last = query(let(b.count - 1))
        attend_expanded(
            b.target, b.cache, _matrices(b, head), b.floats, rows_of, pack_query, groups, first_row, last.visible, work,
            memory, ScoreLimits(core.score_cap, None, b.positions),
        )  # fmt: skip
        with loop(i64(0), groups) as group:
            for index in range(height):
                line = let(group * height + index)
                with when(line < b.count):
                    out = let(b.at("expanded") + line * core.width + head * latent.value)
                    done = work.of_rows(let(group * height), latent.value)
                    finish(own, latent.value, index, done, b.floats, out, partial(gate_head, b, line, head))


def gate_head(b: PassBuilder, token: Value, head: Value, vectors: list[Value]) -> list[Value]:
    """What a head has mixed, times its gate if it has one."""
    if not (b.attention.latent and b.attention.latent.gated):
        return vectors
    at = b.at("gates") + token * round_up(b.attention.heads, 16) + head
    gate = let(spread(sigmoid(b.floats[at], 1)))
    return [each * gate for each in vectors]


def _matrices(b: PassBuilder, head: Value) -> HeadMatrices:
    core = b.attention
    assert core.latent
    rank, plain, value = core.row.value, core.latent.plain, core.latent.value
    first = let(b.at("mixed") + _IDENTITY * rank + head * ((plain + value) * rank // 2))
    return HeadMatrices(b.floats, first, let(first + plain * rank // 2), rank, plain, value)


def _write_identity(b: PassBuilder, row: Value, column: Value, columns: int, blocks: list[str]) -> None:
    """A row with 1 in a column and 0 in the others, quantized where the weights want that."""
    first = let(b.at("mixed") + row * columns)
    with loop(i64(0), i64(columns // 16)) as part:
        store(b.floats, first + part * 16, floats(0))
    T.buffer_store(b.floats, T.float32(1), [first + column])
    b.quantize_row("mixed", columns, row, row, blocks)

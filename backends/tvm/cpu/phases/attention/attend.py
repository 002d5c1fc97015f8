"""Attention: how the threads divide queries and rows of the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import (
    NEVER,
    Query,
    ScoreLimits,
    Tiles,
    Work,
    attend,
    finish,
    merge,
)
from edge.backends.tvm.cpu.kernels.byte_rows import attend_byte_rows
from edge.backends.tvm.cpu.kernels.byte_scores import Held, attend_bytes
from edge.backends.tvm.cpu.kernels.observe import observe
from edge.backends.tvm.cpu.kernels.pairs import Paired, attend_pairs
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, loop, opaque, quotient, remainder, when
from edge.backends.tvm.cpu.phases.attention.pages import list_pages
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.cpu.scratch import byte_offsets, pair_offsets, work_offsets
from edge.backends.tvm.packing.cores import round_up


def attend_step(b: PassBuilder, layer: Value) -> None:
    """Attend to the thread's parts of the rows that each token sees, for all heads."""
    core, head, source = b.attention, b.cache.key, b.rows_of(layer)
    rows, limits, parts = b.target.score_rows, _limits(b, layer), b.sums()
    in_bytes = b.target.byte_rows > 0 and b.cache.dtype == "int8" and not (b.cache.shared or b.design.exact)
    with b.each_token() as token, loop(i64(0), i64(core.kv_heads)) as kv_head:
        visible = let(b.row(source, kv_head, token) + 1)
        tiles = let(quotient(visible + 15, 16))
        pages = None if b.bounds is None else list_pages(b, layer, kv_head, tiles)
        first = let(b.at("queries") + (kv_head * b.at("query_rows") + token * core.group) * head)
        position = b.position_of(token)
        with loop(*parts) as part:
            mine = Tiles(*b.range_of(part, tiles)) if pages is None else pages.of(*b.range_of(part, pages.count))
            for start in range(0, core.group, rows):
                lines = range(start, min(start + rows, core.group))
                sinks = [_sink_of_one(b, layer, kv_head, line, part) for line in lines]
                queries = [
                    Query(first + line * head, visible, position, sink) for line, sink in zip(lines, sinks, strict=True)
                ]
                work = _work(b, let(token * b.parts + part), let(kv_head * core.group + start))
                first_row = b.first_row(source, kv_head, token)
                if in_bytes:
                    codes = let(work.scores + rows * (work.block * 16))
                    attend_byte_rows(b.target, b.cache, b.floats, queries, first_row, mine, work, codes, limits)
                else:
                    attend(b.target, b.cache, b.floats, queries, first_row, mine, work, limits, fetch=True)


def merge_parts(b: PassBuilder, layer: Value, token: Value, row: Value) -> None:
    """Merge all parts of a token into row `row` of the heads' outputs."""
    core, work = b.attention, _work(b, let(token * b.parts), i64(0))
    out = let(b.at("mixed") + row * round_up(core.mixed, 32))
    with loop(i64(0), i64(core.heads)) as head:
        merge(
            b.cache, b.floats, core.row.value, b.parts, b.at("part_stride"), head,
            work.out, work.maxima, work.sums, b.floats, out + head * core.row.value, b.restore(layer),
        )  # fmt: skip


def attend_chunk(b: PassBuilder, layer: Value) -> None:
    """Blocks of query rows go to the threads in turn: later ones see more rows and cost more."""
    core, source, limits, height = b.attention, b.rows_of(layer), _limits(b, layer), b.target.score_rows
    many, side = _shared_blocks(b)
    rows = let(b.count * core.group)
    units = let(quotient(rows + (side - 1), side) * core.kv_heads)
    work = many.work if many else _work(b, b.thread, i64(0))
    with b.dealt_out(units) as unit:
        kv_head, first = opaque(remainder(unit, core.kv_heads)), opaque(quotient(unit, core.kv_heads) * side)
        start = let(b.at("queries") + kv_head * b.at("query_rows") * b.cache.key)
        first_row = b.first_row(source, kv_head, i64(0))

        def token_of(line: Value) -> Value:
            return opaque(T.min(quotient(line, core.group), b.count - 1))

        def query(line: Value) -> Query:
            token, at, sink = token_of(line), let(start + line * b.cache.key), _sink(b, layer, kv_head, line)
            if b.shape.encoder:  # tokens are rows
                first_seen, visible = b.span_of(layer, token)
                return Query(at, visible, token, sink, first_seen)
            visible = let(b.row(source, kv_head, b.seen(token)) + 1)
            return Query(at, visible, b.position_of(token), sink)

        def lines(first: Value) -> list[Query]:
            return [query(let(first + index)) for index in range(height)]

        def tiles(first: Query, last: Query) -> Tiles:
            """The first query sees the first rows, the last one the last."""
            begin = i64(0) if first.first is None else let(quotient(first.first, 16))
            return Tiles(begin, let(quotient(last.visible + 15, 16)))

        def store_heads(first: Value, work: Work) -> None:
            for index in range(height):
                line = let(first + index)
                with when(line < rows):
                    head = kv_head * core.group + remainder(line, core.group)
                    at = let(b.at("mixed") + token_of(line) * round_up(core.mixed, 32) + head * core.row.value)
                    finish(b.cache, core.row.value, index, work, b.floats, at, b.restore(layer))

        if many:
            groups = let(quotient(T.min(i64(side), rows - first) + (height - 1), height))
            last = query(let(first + side - 1))
            many.attend(
                b.target, b.cache, b.floats, lambda group: lines(first + group * height), groups, first_row,
                tiles(query(first), last), last.visible, work, many.held, limits,
            )  # fmt: skip
            with loop(i64(0), groups) as group:
                store_heads(let(first + group * height), work.of_rows(group * height, b.cache.value))
        else:
            queries = lines(first)
            seen = tiles(queries[0], queries[-1])
            attend(b.target, b.cache, b.floats, queries, first_row, seen, work, limits, fetch=False)
            store_heads(first, work)


def observe_last(b: PassBuilder, layer: Value) -> None:
    """The attention (or votes) of the last `observed` tokens, mean over the query heads of a group."""
    core, limits, source = b.attention, _limits(b, layer), b.rows_of(layer)
    raw = let(b.at("raw") + b.thread * b.at("raw_stride"))
    with b.shared_out(i64(core.kv_heads)) as kv_head:
        first = let(b.at("queries") + kv_head * b.at("query_rows") * b.cache.key)
        before = i64(0) if b.apart else b.count - b.observed
        with loop(before * core.group, b.count * core.group) as line:
            token = let(quotient(line, core.group))
            with b.if_observed(token) as votes:
                sink, visible = _sink(b, layer, kv_head, line), let(b.row(source, kv_head, b.seen(token)) + 1)
                query = Query(let(first + line * b.cache.key), visible, b.position_of(token), sink)
                first_row = b.first_row(source, kv_head, token)
                observe(b.cache, b.floats, query, first_row, raw, 1 / core.group, votes, b.paid, limits)


def _sink(b: PassBuilder, layer: Value, kv_head: Value, line: Value | int) -> Value | None:
    """The sink of a row of queries."""
    if "attn_sinks" not in b.names:
        return None
    group = b.attention.group
    head = kv_head * group + (line if isinstance(line, int) else remainder(line, group))
    return let(b.weights.floats[b.layer_at(layer, "attn_sinks") + head])


def _sink_of_one(b: PassBuilder, layer: Value, kv_head: Value, line: int, part: Value) -> Value | None:
    """The sink in the first part, NEVER in the others, since all parts are merged."""
    sink = _sink(b, layer, kv_head, line)
    return None if sink is None else let(T.if_then_else(part == 0, sink, T.float32(NEVER)))


def _limits(b: PassBuilder, layer: Value) -> ScoreLimits:
    window = let(b.layer_at(layer, "window")) if b.attention.window else None
    return ScoreLimits(b.attention.score_cap, window, b.positions)


def _work(b: PassBuilder, part: Value, line: Value) -> Work:
    """Working memory. part: its number; a chunk has one for each thread, others one for each token and part."""
    sizes = work_offsets(b.attention, b.target)
    start = let(b.at("work") + part * b.at("part_stride"))
    return Work(
        b.floats, scores=start + sizes["scores"], out=let(start + line * b.cache.value),
        maxima=let(start + sizes["maxima"] + line), sums=let(start + sizes["sums"] + line),
        block=b.target.step_block if b.stepwise else b.target.chunk_block,
    )  # fmt: skip


@dataclass(frozen=True)
class _Many:
    """Attention of many query rows that share a converted block of keys and values, and the thread's memory for it."""

    attend: Callable[..., None]
    work: Work
    held: Paired | Held


def _shared_blocks(b: PassBuilder) -> tuple[_Many | None, int]:
    """None if query rows convert keys and values for themselves; the query rows of a piece of work."""
    target, form = b.target, b.cache.form
    floats = not form.scales and form.packed == 1 and not b.cache.shared
    in_bytes = b.shape.encoder and target.byte_rows > 0 and floats
    if b.design.exact or not (in_bytes or target.pair_rows):
        return None, target.score_rows
    offsets = (byte_offsets if in_bytes else pair_offsets)(b.attention, target)
    start = let(b.at("pairs") + b.thread * b.at("pair_stride"))
    at = {name: let(start + offset) for name, offset in offsets.items() if name != "size"}
    scores, out, maxima, sums = (at.pop(name) for name in ("scores", "out", "maxima", "sums"))
    work = Work(b.floats, scores, out, maxima, sums, target.chunk_block)
    if in_bytes:
        return _Many(attend_bytes, work, Held(**at)), target.quantized_rows
    return _Many(attend_pairs, work, Paired(**at)), target.paired

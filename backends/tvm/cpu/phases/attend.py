"""Attention: who works on which queries and which rows of the cache."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import Limits, Query, Work, attend, finish, merge
from edge.backends.tvm.cpu.kernels.lanes import Value, i64, let, loop, quotient, remainder, when
from edge.backends.tvm.cpu.kernels.observe import observe
from edge.backends.tvm.cpu.phases.frame import Frame
from edge.backends.tvm.packing.layout import work_offsets


def attend_step(f: Frame, layer: Value) -> None:
    """The thread's share of the cache's rows, for all heads."""
    shape, rows, limits = f.shape, f.target.score_rows, _limits(f, layer)
    with loop(i64(0), i64(shape.kv_heads)) as kv_head:
        visible = let(f.length(layer, kv_head) + 1)
        mine = f.range(let(quotient(visible + 15, 16)))
        first = let(f.at("queries") + kv_head * f.at("query_rows") * shape.padded_head)
        for start in range(0, shape.group, rows):
            lines = range(start, min(start + rows, shape.group))
            queries = [Query(first + line * shape.padded_head, visible, f.position) for line in lines]
            work = _work(f, f.thread, let(kv_head * shape.group + start))
            first_row = let(f.cache.first_row(layer, kv_head))
            attend(f.target, f.cache, f.floats, queries, first_row, mine, work, limits, fetch=True)


def merge_parts(f: Frame) -> None:
    """Every thread makes its own copy of the heads' outputs from all threads' parts."""
    shape, work = f.shape, _work(f, i64(0), i64(0))
    out = let(f.at("mixed") + f.thread * shape.padded_mixed)
    with loop(i64(0), i64(shape.heads)) as head:
        merge(
            f.cache, f.floats, shape.head, f.threads, f.at("part_stride"), head,
            work.out, work.maxima, work.sums, f.floats, out + head * shape.head,
        )  # fmt: skip


def attend_chunk(f: Frame, layer: Value) -> None:
    """Blocks of query rows, dealt out in turn: later ones see more rows and cost more."""
    shape, side, limits = f.shape, f.target.score_rows, _limits(f, layer)
    rows = let(f.count * shape.group)
    units = let(quotient(rows + (side - 1), side) * shape.kv_heads)
    with f.dealt_out(units) as unit:
        kv_head, first = let(remainder(unit, shape.kv_heads)), let(quotient(unit, shape.kv_heads) * side)
        length = let(f.length(layer, kv_head))
        start = let(f.at("queries") + kv_head * f.at("query_rows") * shape.padded_head)
        lines = [let(first + index) for index in range(side)]
        tokens = [let(T.min(quotient(line, shape.group), f.count - 1)) for line in lines]
        queries = [
            Query(let(start + line * shape.padded_head), let(length + token + 1), f.position + token)
            for line, token in zip(lines, tokens, strict=True)
        ]
        work = _work(f, f.thread, i64(0))
        tiles = (i64(0), let(quotient(queries[-1].visible + 15, 16)))
        first_row = let(f.cache.first_row(layer, kv_head))
        attend(f.target, f.cache, f.floats, queries, first_row, tiles, work, limits, fetch=False)
        for index, (line, token) in enumerate(zip(lines, tokens, strict=True)):
            with when(line < rows):
                head = kv_head * shape.group + remainder(line, shape.group)
                at = let(f.at("mixed") + token * shape.padded_mixed + head * shape.head)
                finish(f.cache, shape.head, index, work, f.floats, at)


def observe_last(f: Frame, layer: Value) -> None:
    """The attention (or votes) of the last `observed` tokens, mean over the query heads of a group."""
    shape, limits = f.shape, _limits(f, layer)
    raw = let(f.at("raw") + f.thread * f.at("raw_stride"))
    with f.shared_out(i64(shape.kv_heads)) as kv_head:
        first = let(f.at("queries") + kv_head * f.at("query_rows") * shape.padded_head)
        first_row, length = let(f.cache.first_row(layer, kv_head)), let(f.length(layer, kv_head))
        with loop((f.count - f.observed) * shape.group, f.count * shape.group) as line:
            token = let(quotient(line, shape.group))
            query = Query(let(first + line * shape.padded_head), let(length + token + 1), f.position + token)
            observe(f.cache, f.floats, query, first_row, raw, 1 / shape.group, f.votes, f.attention, limits)


def _limits(f: Frame, layer: Value) -> Limits:
    window = let(f.layer_at(layer, "window")) if f.shape.windowed else None
    return Limits(f.shape.score_cap, window, f.positions)


def _work(f: Frame, thread: Value, line: Value) -> Work:
    sizes = work_offsets(f.shape, f.target)
    start = let(f.at("work") + thread * f.at("part_stride"))
    return Work(
        f.floats, scores=start + sizes["scores"], out=let(start + line * f.shape.padded_head),
        maxima=let(start + sizes["maxima"] + line), sums=let(start + sizes["sums"] + line),
        block=f.target.step_block if f.single else f.target.chunk_block,
    )  # fmt: skip

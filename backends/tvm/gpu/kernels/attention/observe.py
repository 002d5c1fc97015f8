"""The attention that cached rows receive, which policies such as H2O, TOVA and SnapKV evict by.

It is computed after attention, for the last queries of a pass, and only if the engine observes. It costs a second Q Kᵀ
for those queries; it reuses attention's largest scores and sums of exponentials.
"""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import RowForm, State, Tables, Tuning
from edge.backends.tvm.gpu.kernels.attention.attention import NEVER, HeadSplit, load_queries, row_scores
from edge.backends.tvm.gpu.kernels.attention.rows import first_row, rows_before, rows_seen
from edge.backends.tvm.gpu.kernels.threads import (
    Built,
    Register,
    Scope,
    Value,
    barrier,
    build,
    f32,
    i32,
    let,
    loop,
    quotient,
    select,
    store,
    to_float,
    to_int,
    when,
)  # fmt: skip
from edge.model.cores import Attention

_BLOCKS = 16  # workgroups for a KV head, which take blocks of rows in turn


def observe(name: str, core: Attention, tables: Tables, tuning: Tuning, dtype: str) -> Built:
    """paid[row] += softmax(q Kᵀ), averaged over the query heads of a KV head and summed over the last State.OBSERVED
    tokens. With State.VOTES: += the share of query heads that pay the row more than the average.

    Reads `softmax` of `attention.attend`, and has its scalars.
    """
    form, threads, split = RowForm.of(core, dtype), tuning.attend, HeadSplit.of(core, tuning.attend)

    def body(scope: Scope) -> None:
        queries = scope.shared(split.at_once * form.stored)
        factors = scope.shared(split.at_once) if form.transformed else queries
        head = let(scope.layer * tables.kv_heads + scope.group)
        start, before = let(first_row(scope, tables, head, i32(0))), let(rows_before(scope, tables, head, i32(0)))
        count = let(to_int(scope.tables[State.COUNT]))
        blocks = let(quotient(before + count + (threads - 1), threads))
        with loop(0, quotient(blocks + (_BLOCKS - 1), _BLOCKS)) as turn:
            place = let((turn * _BLOCKS + scope.row) * threads + scope.thread)
            row, paid = let(start + T.min(place, before + count - 1)), Register(f32(0.0))
            with loop(count - to_int(scope.tables[State.OBSERVED]), count) as token, loop(0, split.turns) as part:
                first = let(scope.group * core.group + part * split.at_once)
                barrier()  # the queries before have been read
                load_queries(scope, core, tables, form, queries, split.at_once, token, first, head, factors)
                barrier()
                visible = let(rows_seen(scope, core, tables, before, token))
                scores = row_scores(scope, core, tables, form, queries, split.at_once, row, place < visible, token)
                for number, score in enumerate(scores):
                    paid.value = paid.value + _share(scope, score, token, first + number, visible)
            with when(place < before + count):
                store(scope.paid, row, scope.paid[row] + paid.value * f32(1 / core.group))

    def _share(scope: Scope, score: Value, token: Value, query: Value, visible: Value) -> Value:
        at = let((token * core.heads + query) * 2)
        power = let(select(score > f32(NEVER / 2), T.exp(score - scope.softmax[at]), f32(0.0)))
        total = let(scope.softmax[at + 1])
        vote = select(power * to_float(visible) > total, f32(1.0), f32(0.0))
        return select(to_int(scope.tables[State.VOTES]) != 0, vote, power / total)

    reads = {"qkv": "float32", "keys4": "uint32x4", "tables": "uint32", "softmax": "float32"}
    reads |= {"row_scales": form.scale_type} if form.scaled else {}
    scalars = ("layer", "window") if core.window else ("layer",)
    return build(name, threads, reads, {"paid": "float32"}, scalars, body, (core.kv_heads, _BLOCKS))

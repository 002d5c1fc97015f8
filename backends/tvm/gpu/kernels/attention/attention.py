"""Attention over the KV cache, with the online softmax of FlashAttention (arXiv:2205.14135), block by block of rows.

A workgroup attends for one token and the query heads that share a KV head (or some of them, if they are many). In a
block, each thread computes the scores of a few rows, and then accumulates one word of all rows' values.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce as fold

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import LANES, RowForm, State, Tables, Tuning
from edge.backends.tvm.gpu.kernels.attention.flash_decoding import place_of, share_of
from edge.backends.tvm.gpu.kernels.attention.results import give, restore
from edge.backends.tvm.gpu.kernels.attention.rows import (
    Heads,
    buffers_of,
    first_row,
    key_unit,
    make_ready,
    position_of,
    row_scale,
    rows_across,
    rows_before,
    rows_seen,
    slots_of,
    text_seen,
    unpack,
    write_row,
)
from edge.backends.tvm.gpu.kernels.attention.transform import hadamard, reflect
from edge.backends.tvm.gpu.kernels.functions import soft_cap
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
    lane,
    let,
    loop,
    quotient,
    remainder,
    select,
    store,
    strided,
    to_int,
    when,
)  # fmt: skip
from edge.backends.tvm.gpu.weights import Vector
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Attention

NEVER = -1e30  # the score of a row that the query must not see
_SCORES = 1536  # float32 of shared memory for the scores of a block
_QUERIES = 1024  # float32 of shared memory for queries
# Rows whose values a thread reads before it mixes them, if activations are staged as well: by default on GPUs with
# tensor cores, the only ones on which this was measured.
_READ = 8


@dataclass(frozen=True)
class HeadSplit:
    """The distribution of a KV head's query heads over workgroups."""

    at_once: int  # query heads per workgroup
    turns: int  # workgroups per KV head
    rows: int  # rows per block

    @classmethod
    def of(cls, core: Attention, threads: int, most: int = 0) -> HeadSplit:
        """most: query heads per workgroup; 0: as many as fit."""
        most = max(1, min(most or core.group, _QUERIES // round_up(core.head_dim, LANES), _SCORES // threads))
        at_once = next(count for count in range(min(most, core.group), 0, -1) if core.group % count == 0)
        return cls(at_once, core.group // at_once, max(1, _SCORES // (at_once * threads)) * threads)


def attend(
    name: str, core: Attention, tables: Tables, tuning: Tuning, dtype: str, *, tokens: int, observes: bool = False,
    heads: Heads | None = None, sinks: Vector | None = None, splits: int = 1,
) -> Built:  # fmt: skip
    """Compute `mixed`, float32 [tokens, padded heads · head], from the queries in `qkv`.

    Scalars: layer; window, the positions that a token sees, 0 for all (only where the model has windows). observes:
    `softmax` float32 [tokens, heads, 2] receives each query's largest score and sum of exponentials (observe.py).
    heads: for tokens that run as if alone: this kernel makes queries ready as `store_rows` does, and has its scalar
    `angles`. It attends to a token's own row without reading it back. Of a single token it also stores that row; those
    of several, which may see each other's, are stored by a kernel before. sinks: of the model, in the buffer w1.
    splits: workgroups that share the rows of a single token's heads, and leave `partials` instead of `mixed` and
    `softmax` (flash_decoding.py).
    """
    form, threads = RowForm.of(core, dtype), tuning.attend
    stores = heads is not None and not tables.alone
    split = HeadSplit.of(core, threads, tuning.heads if heads else 0)
    lanes = max(1, threads // form.words)  # rows that are mixed at once
    at_once = -(-form.words // threads)  # words of a row that a thread mixes
    read = _READ if tuning.stage else 1
    slots = split.at_once + 2 * (heads is not None)  # heads in shared memory: queries, the new key and value

    def body(scope: Scope) -> None:
        ready, memory = scope.shared(slots * form.stored), scope.shared(split.at_once * threads)
        scores = scope.shared(max(split.at_once * split.rows, slots * form.stored if heads else 0))
        token = let(T.min(scope.row, to_int(scope.tables[State.COUNT]) - 1))  # rows beyond the end repeat the last one
        group, part = scope.group, None
        if splits > 1:
            group, part = let(quotient(group, splits)), let(remainder(group, splits))
        kv_head, turn = let(quotient(group, split.turns)), let(remainder(group, split.turns))
        first_query = let(kv_head * core.group + turn * split.at_once)
        head = let(scope.layer * tables.kv_heads + kv_head)
        start, before = let(first_row(scope, tables, head, token)), let(rows_before(scope, tables, head, token))
        if heads:
            factors, own = scope.shared(2 * slots), token if tables.alone else i32(0)
            _add_row(scope, heads, own, scores, ready, factors, kv_head, turn, part, first_query, head, start + before)
        else:
            factors = scope.shared(split.at_once) if form.transformed else ready
            load_queries(scope, core, tables, form, ready, split.at_once, token, first_query, head, factors)
        if core.across:
            visible = let(rows_across(scope, tables, head))
        elif core.causal:
            visible = before if heads else let(rows_seen(scope, core, tables, before, token))
        else:
            begin, seen = text_seen(scope, tables, token)
            start, visible = let(start + begin), let(seen)
        if splits > 1:
            skipped, visible = share_of(part, splits, visible)
            start = let(start + skipped)
        maxima = [Register(_sink(scope, first_query + number, part)) for number in range(split.at_once)]
        adds = _is_first(part, scope.thread == 0)  # all threads' sums are added
        first_sum = select(adds, f32(1.0), f32(0.0)) if sinks else f32(0.0)
        sums = [Register(first_sum) for _ in range(split.at_once)]
        out = [
            [[Register(f32(0.0)) for _ in range(form.per_word)] for _ in range(at_once)] for _ in range(split.at_once)
        ]
        with loop(0, quotient(visible + (split.rows - 1), split.rows)) as block:
            first = let(block * split.rows)
            barrier()  # queries are there; the scores of the block before are read
            turns = hold(quotient(T.min(i32(split.rows), visible - first) + (threads - 1), threads), "int32")
            most = _score(scope, ready, scores, start, first, visible, token, turns)
            _soften(scope, scores, memory, most, maxima, sums, out, turns)
            _mix(scope, scores, start, first, visible, out)
        if heads:
            with when(part == 0) if splits > 1 else nullcontext():
                _mix_own(scope, ready, maxima, sums, out)
        _write(scope, memory, ready, factors, maxima, sums, out, token, first_query, head, part)

    def _sink(scope: Scope, query: Value, part: Value) -> Value:
        if not sinks:
            return f32(NEVER)
        sink = as_float(scope.w1[query + sinks.at])
        return select(part == 0, sink, f32(NEVER)) if splits > 1 else sink

    def _is_first(part: Value, condition: Value) -> Value:
        """Whether the condition holds, in the workgroup that has the first share."""
        return T.And(part == 0, condition) if splits > 1 else condition

    def _add_row(
        scope: Scope, heads: Heads, token: Value, raw: Buffer, ready: Buffer, factors: Buffer, kv_head: Value,
        turn: Value, part: Value, first_query: Value, head: Value, row: Value,
    ) -> None:  # fmt: skip
        def slot_of(own: Value) -> Value:
            behind = own - split.at_once  # 0: the key, 1: the value
            return select(own < split.at_once, first_query + own, core.heads + behind * core.kv_heads + kv_head)

        make_ready(scope, heads, slots, slot_of, token, raw, ready, factors)
        if form.transformed:
            reflect(scope, tables, form, ready, slots, factors, head, lambda own: own <= split.at_once)
            hadamard(scope, form, ready, slots)
        for own in range(2):
            writes = _is_first(part, turn == 0) if stores else None
            write_row(scope, form, ready, split.at_once + own, row, writes, i32(own) == i32(1), factors)

    def _mix_own(
        scope: Scope, ready: Buffer, maxima: list[Register], sums: list[Register], out: list[list[list[Register]]]
    ) -> None:
        """Attend to the token's own row; every thread computes its scores."""
        barrier()
        key, value = split.at_once * form.stored, (split.at_once + 1) * form.stored
        dots = [Register(f32(0.0)) for _ in range(split.at_once)]
        with loop(0, form.head) as at:
            each = let(ready[key + at])
            for number, dot in enumerate(dots):
                dot.value = dot.value + ready[number * form.stored + at] * each
        word = remainder(scope.thread, form.words) if lanes > 1 else scope.thread
        for number, dot in enumerate(dots):
            score = hold(soft_cap(dot.value, core.score_cap))
            maximum = hold(T.max(maxima[number].value, score))
            correction, power = hold(T.exp(maxima[number].value - maximum)), hold(T.exp(score - maximum))
            maxima[number].value = maximum
            sums[number].value = sums[number].value * correction + select(scope.thread == 0, power, f32(0.0))
            for index, words in enumerate(out[number]):
                at = word + index * threads
                mixes = T.And(scope.thread < form.words, at < form.words) if lanes > 1 else at < form.words
                for part, register in enumerate(words):
                    own = ready[value + T.min(at, i32(form.words - 1)) * form.per_word + part]
                    register.value = register.value * correction + select(mixes, power * own, f32(0.0))

    def _score(
        scope: Scope, queries: Buffer, scores: Buffer, start: Value, before: Value, visible: Value, token: Value,
        turns: Value,
    ) -> list[Register]:  # fmt: skip
        """Compute the scores of the block; returns the maxima over this thread's rows."""
        most = [Register(f32(NEVER)) for _ in range(split.at_once)]
        with loop(0, turns) as turn:
            place = let(turn * threads + scope.thread)
            row = let(start + T.min(before + place, visible - 1))
            found = row_scores(scope, core, tables, form, queries, split.at_once, row, before + place < visible, token)
            for number, score in enumerate(found):
                store(scores, place + number * split.rows, score)
                most[number].value = T.max(most[number].value, score)
        return most

    def _soften(
        scope: Scope, scores: Buffer, memory: Buffer, most: list[Register], maxima: list[Register],
        sums: list[Register], out: list[list[list[Register]]], turns: Value,
    ) -> None:  # fmt: skip
        """Replace scores by exponentials, and rescale earlier results to the new maximum."""
        for number, each in enumerate(most):
            store(memory, scope.thread + number * threads, each.value)
        barrier()
        distance = threads // 2
        while distance:
            with when(scope.thread < distance):
                for number in range(split.at_once):
                    at = scope.thread + number * threads
                    store(memory, at, T.max(memory[at], memory[at + distance]))
            barrier()
            distance //= 2
        for number in range(split.at_once):
            maximum = let(T.max(maxima[number].value, memory[number * threads]))
            correction = let(T.exp(maxima[number].value - maximum))
            maxima[number].value = maximum
            sums[number].value = sums[number].value * correction
            for words in out[number]:
                for each in words:
                    each.value = each.value * correction
            with loop(0, turns) as turn:
                at = let(turn * threads + scope.thread + number * split.rows)
                score = let(scores[at])
                power = let(select(score > f32(NEVER / 2), T.exp(score - maximum), f32(0.0)))
                sums[number].value = sums[number].value + power
                store(scores, at, power)
        barrier()

    def _mix(
        scope: Scope, scores: Buffer, start: Value, before: Value, visible: Value, out: list[list[list[Register]]]
    ) -> None:
        """out += exponentials · values."""
        rows = let(T.min(i32(split.rows), visible - before))
        own = let(quotient(scope.thread, form.words)) if lanes > 1 else i32(0)
        word = let(remainder(scope.thread, form.words)) if lanes > 1 else scope.thread
        with when(own < lanes), loop(0, quotient(rows + (lanes * read - 1), lanes * read)) as turn:
            places = [let((turn * read + number) * lanes + own) for number in range(read)]
            at_rows = [let(start + before + T.min(place, rows - 1)) for place in places]
            scales = [row_scale(scope, form, row * 2 + (not form.shared)) for row in at_rows]
            for index in range(at_once):
                at = word + index * threads
                with when(at < form.words):
                    codes = [_value_word(scope, row, at) for row in at_rows]
                    for place, code, scale in zip(places, codes, scales, strict=True):
                        values = [let(value) for value in unpack(form, code, scale)]
                        for number, words in enumerate(out):
                            # After the last row, there is no score, or one of an earlier block.
                            score = scores[T.min(place, rows - 1) + number * split.rows]
                            power = hold(select(place < rows, score, f32(0.0)))
                            power = let(power * scale[0]) if form.dtype == "int8" else power
                            for value, each in zip(values, words[index], strict=True):
                                each.value = each.value + power * value

    def _value_word(scope: Scope, row: Value, at: Value) -> Value:
        """A word of a row's value."""
        if not form.shared:
            return let(scope.values[row * form.words + at])
        unit, word = let(scope.keys4[key_unit(form, row, quotient(at, 4))]), let(remainder(at, 4))
        return let(fold(lambda found, each: select(word == each, lane(unit, each), found), range(1, 4), lane(unit, 0)))

    def _write(
        scope: Scope, memory: Buffer, ready: Buffer, factors: Buffer, maxima: list[Register], sums: list[Register],
        out: list[list[list[Register]]], token: Value, first_query: Value, head: Value, part: Value,
    ) -> None:  # fmt: skip
        """Combine the lanes' results, and divide them by the sum of exponentials, unless they are of a share. ready:
        scratch for [at_once, form.stored]."""
        for number in range(split.at_once):
            barrier()
            store(memory, scope.thread, sums[number].value)
            barrier()
            distance = threads // 2
            while distance:
                with when(scope.thread < distance):
                    store(memory, scope.thread, memory[scope.thread] + memory[scope.thread + distance])
                barrier()
                distance //= 2
            query = first_query + number
            at = let(place_of(form, splits, query, part)) if splits > 1 else (token * core.heads + query) * 2
            if splits > 1 or observes:
                with when(scope.thread == 0):
                    softmax = scope.partials if splits > 1 else scope.softmax
                    store(softmax, at, maxima[number].value)
                    store(softmax, at + 1, memory[0])
            inverse = let(f32(1.0) / memory[0]) if splits == 1 else None
            used = form.head if form.transformed else core.row.value
            for index in range(at_once):
                for place in range(form.per_word):
                    barrier()
                    store(memory, scope.thread, out[number][index][place].value)
                    barrier()
                    word = scope.thread + index * threads
                    value = let(word * form.per_word + place)
                    with when(T.And(scope.thread < form.words, value < used)):
                        parts = [memory[scope.thread + own * form.words] for own in range(lanes)]
                        total = fold(lambda one, other: one + other, parts)
                        if splits > 1:
                            store(scope.partials, at + 2 + value, total)
                        elif form.transformed:
                            store(ready, number * form.stored + value, total * inverse)
                        else:
                            give(scope, core, token, query, value, total * inverse)
        if form.transformed and splits == 1:
            restore(scope, core, tables, form, ready, split.at_once, token, first_query, head, factors)

    cache = buffers_of(form)
    results = ["partials"] if splits > 1 else ["mixed", "softmax"] if observes else ["mixed"]
    writes = dict.fromkeys(results, "float32") | (heads.rows if heads and stores else {})
    reads = {"qkv": "float32"} | (heads.reads if heads else {"tables": "uint32"}) | ({} if stores else cache)
    reads |= {"w1": "uint32"} if sinks else {}
    scalars = ("layer", *(["angles"] if heads else []), *(["window"] if core.window else []))
    groups = core.kv_heads * split.turns * splits, tokens
    return build(name, threads, reads, writes, scalars, body, groups, per=int(splits == 1))


def load_queries(
    scope: Scope, core: Attention, tables: Tables, form: RowForm, queries: Buffer, count: int, token: Value,
    first: Value, head: Value, factors: Buffer,
) -> None:  # fmt: skip
    """Load `count` query heads of a token from `first` on into shared memory, [count, form.stored], zero-padded, and
    transform them like the KV head's rows. head: its number among those of all layers. factors: shared [count]."""
    slots = slots_of(core)
    with strided(scope, count * form.stored) as index:
        own, value = let(quotient(index, form.stored)), let(remainder(index, form.stored))
        store(queries, index, f32(0.0))
        with when(value < core.head_dim):
            store(queries, index, scope.qkv[(token * slots + first + own) * core.head_dim + value])
    if form.transformed:
        reflect(scope, tables, form, queries, count, factors, head)
        hadamard(scope, form, queries, count)


def row_scores(
    scope: Scope, core: Attention, tables: Tables, form: RowForm, queries: Buffer, count: int, row: Value,
    exists: Value, token: Value,
) -> list[Value]:  # fmt: skip
    """The scores of an arena row for `count` queries of a token; `NEVER` if the row does not exist or is not
    visible."""
    dots = [Register(f32(0.0)) for _ in range(count)]
    scale = row_scale(scope, form, row * 2)
    with when(exists), loop(0, form.units) as unit:
        codes = let(scope.keys4[key_unit(form, row, unit)])
        values = [let(value) for word in range(4) for value in unpack(form, lane(codes, word), scale)]
        for index, value in enumerate(values):
            at = unit * len(values) + index
            for number, dot in enumerate(dots):
                dot.value = dot.value + queries[at + number * form.stored] * value
    seen = exists
    if core.window:
        position = to_int(scope.tables[row + tables.positions])
        oldest = position_of(scope, tables, token) - scope.window
        seen = T.And(seen, T.Or(scope.window == 0, position > oldest))
    scores = [dot.value * scale[0] if form.dtype == "int8" else dot.value for dot in dots]
    return [let(select(seen, soft_cap(score, core.score_cap), f32(NEVER))) for score in scores]

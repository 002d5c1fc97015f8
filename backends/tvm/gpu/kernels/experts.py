"""Mixtures of experts (`edge.model.cores.Experts`): the choice, and the products of chosen experts, token by token.

A token's experts are in ascending order, and their outputs are summed in this order by the threads that have the rows.
Experts of a layer lie in one or more buffers; a kernel reads one, and skips experts in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import Tuning
from edge.backends.tvm.gpu.kernels.functions import ACTIVATIONS, sigmoid
from edge.backends.tvm.gpu.kernels.products.quants import QUADS, Sum, Weights, Words, needs_sums, sum_halves
from edge.backends.tvm.gpu.kernels.products.steps import split_of
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    added,
    as_float,
    barrier,
    build,
    f32,
    hold,
    i32,
    let,
    loop,
    quotient,
    reduce,
    remainder,
    select,
    store,
    strided,
    when,
)
from edge.backends.tvm.gpu.weights import ExpertPiece, Matrix, Vector
from edge.backends.tvm.packing.blocks import PART
from edge.model.cores import SLOPE, Experts

_THREADS = 64  # that choose a token's experts
_NEVER = -1e30  # the score of an expert that is not chosen


def route(name: str, core: Experts, bias: Vector | None, factors: Vector | None, tokens: int) -> Built:
    """Choose each token's experts, `chosen` int32 [tokens, used], by `routes`, and their shares, `shares` float32
    [tokens, used], followed by the shared expert's. bias: of the choice, in the buffer w1. factors: of the experts'
    shares, likewise.

    An expert is chosen if fewer than `used` others come before it: those of larger scores, and of equal ones the first.
    """
    stride, columns = core.number + core.shared_has_share, core.used + core.shared_has_share

    def body(scope: Scope) -> None:
        memory, scores = scope.shared(_THREADS), scope.shared(core.number)
        ranks, found = scope.shared(core.number, "int32"), scope.shared(core.used)
        experts = scope.shared(core.used, "int32") if factors else None
        first, largest = let(scope.row * stride), Register(scope.routes[scope.row * stride])
        with strided(scope, core.number) as expert:
            logit = let(scope.routes[first + expert])
            largest.value = T.max(largest.value, logit)
            score = sigmoid(logit) if core.router == "sigmoid" else logit
            store(scores, expert, score + as_float(scope.w1[expert + bias.at]) if bias else score)
        most = hold(reduce(scope, memory, largest.value, _THREADS, T.max))
        if core.groups > 1:
            _drop_groups(scope, core, scores)
        with strided(scope, core.number) as expert:
            own, better = let(scores[expert]), Register(i32(0), "int32")
            with loop(0, core.number) as other:
                score = let(scores[other])
                before = T.Or(score > own, T.And(score == own, other < expert))
                better.value = better.value + select(before, i32(1), i32(0))
            store(ranks, expert, better.value)
        barrier()
        with strided(scope, core.number) as expert:
            slot = Register(i32(0), "int32")
            with loop(0, expert) as other:
                slot.value = slot.value + select(ranks[other] < core.used, i32(1), i32(0))
            with when(T.And(ranks[expert] < core.used, slot.value < core.used)):
                logit = let(scope.routes[first + expert])
                store(scope.chosen, scope.row * core.used + slot.value, expert)
                if experts is not None:
                    store(experts, slot.value, expert)
                store(found, slot.value, sigmoid(logit) if core.router == "sigmoid" else T.exp(logit - most))
        barrier()
        total = Register(f32(0.0 if core.normed or core.router == "softmax" else 1.0))
        if core.normed:
            with loop(0, core.used) as slot:
                total.value = total.value + found[slot]
        elif core.router == "softmax":
            with loop(0, core.number) as each:
                total.value = total.value + T.exp(scope.routes[first + each] - most)
        with strided(scope, core.used) as slot:
            share = found[slot] * (f32(core.scale) / total.value)
            if experts is not None and factors:
                share = share * as_float(scope.w1[experts[slot] + factors.at])
            store(scope.shares, scope.row * columns + slot, share)
        if core.shared_has_share:
            with when(scope.thread == 0):
                store(scope.shares, scope.row * columns + core.used, sigmoid(scope.routes[first + core.number]))

    reads = {"routes": "float32"} | ({"w1": "uint32"} if bias or factors else {})
    return build(name, _THREADS, reads, {"chosen": "int32", "shares": "float32"}, (), body, (1, tokens), 1)


def _drop_groups(scope: Scope, core: Experts, scores: Buffer) -> None:
    """Scores of experts in groups that the token does not use become the least number."""
    size, sums = core.number // core.groups, scope.shared(core.groups)
    with strided(scope, core.groups) as group:
        first, second = Register(f32(_NEVER)), Register(f32(_NEVER))
        with loop(0, size) as each:
            score = let(scores[group * size + each])
            second.value = T.max(second.value, T.min(first.value, score))
            first.value = T.max(first.value, score)
        store(sums, group, first.value + second.value)
    barrier()
    with strided(scope, core.groups) as group:
        own, better = let(sums[group]), Register(i32(0), "int32")
        with loop(0, core.groups) as other:
            before = T.Or(sums[other] > own, T.And(sums[other] == own, other < group))
            better.value = better.value + select(before, i32(1), i32(0))
        with when(better.value >= core.groups_used), loop(0, size) as each:
            store(scores, group * size + each, f32(_NEVER))
    barrier()


@dataclass(frozen=True)
class Mixture:
    """Experts of a buffer: `count` from number `first` on, each of `stride` words. Each matrix has a bias or none."""

    core: Experts
    first: int
    count: int
    stride: int
    inputs: tuple[tuple[Matrix, Vector | None], ...]
    output: tuple[Matrix, Vector | None]

    @classmethod
    def of(cls, core: Experts, piece: ExpertPiece) -> Mixture:
        layout = piece.layout
        gate, up, down = (
            (layout.matrix(name), layout.vector(f"{name}.bias")) for name in (*core.inputs[:2], core.output)
        )
        return cls(core, piece.first, piece.count, piece.stride, (gate, up), down)


def widen(name: str, of: Mixture, tuning: Tuning, tokens: int) -> Built:
    """Compute `inner`, float32 [tokens, used, padded ffn]: activation(gate · x) · up · x, of normalized rows `x`."""
    core, columns = of.core, of.inputs[0][0].columns
    split = split_of(columns, tuning)
    teams, rows, padded = tuning.workgroup // split, tuning.rows, of.output[0].columns
    tiles = -(-core.ffn // (teams * rows))

    def body(scope: Scope) -> None:
        memory = scope.shared(2 * rows * scope.threads)
        slot, tile = let(quotient(scope.group, tiles)), let(remainder(scope.group, tiles) * (teams * rows))
        chosen = _Chosen(scope, of, slot)
        team, place = let(quotient(scope.thread, split)), let(remainder(scope.thread, split))
        own = [let(T.min(tile + team * rows + index, i32(core.ffn - 1))) for index in range(rows)]
        sums = [Sum() for _ in range(2 * rows)]
        with when(chosen.is_here):
            matrices = [matrix for matrix, _ in of.inputs]
            _multiply(scope, chosen.words, matrices, own, scope.row * (columns // 4), split, place, sums)
        for index, each in enumerate(sums):
            store(memory, scope.thread + index * scope.threads, each.value)
        barrier()
        with strided(scope, teams * rows) as local:
            row = let(tile + local)
            with when(T.And(chosen.is_here, row < core.ffn)):
                at = let(quotient(local, rows) * split + remainder(local, rows) * scope.threads)
                gate, up = (added(memory, at + number * rows * scope.threads, split) for number in range(2))
                gate, up = (
                    value + chosen.words.value(bias, row) if bias else value
                    for value, (_, bias) in zip((gate, up), of.inputs, strict=True)
                )
                store(scope.inner, (scope.row * core.used + slot) * padded + row, _activated(core, gate, up))

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32", "chosen": "int32"}
    return build(name, tuning.workgroup, reads, {"inner": "float32"}, (), body, (core.used * tiles, tokens), 1)


def narrow(name: str, of: Mixture, tuning: Tuning, tokens: int, scale: float, *, begins: bool) -> Built:
    """`out` += scale · Σ share · down · `x`, rows of float32 [tokens, padded hidden] and [tokens, used, padded ffn].
    begins: the sum takes the place of what is in `out`."""
    core, (matrix, bias) = of.core, of.output
    split = split_of(matrix.columns, tuning)
    teams, rows, padded = tuning.workgroup // split, tuning.rows, -(-matrix.rows // PART) * PART
    columns = core.used + core.shared_has_share

    def body(scope: Scope) -> None:
        memory, first = scope.shared(rows * scope.threads), let(scope.group * (teams * rows))
        team, place = let(quotient(scope.thread, split)), let(remainder(scope.thread, split))
        own = [let(T.min(first + team * rows + index, i32(matrix.rows - 1))) for index in range(rows)]
        totals = [Register(f32(0.0)) for _ in range(rows)]
        with loop(0, core.used) as slot:
            chosen = _Chosen(scope, of, slot)
            with when(chosen.is_here):
                share, sums = let(scope.shares[scope.row * columns + slot]), [Sum() for _ in range(rows)]
                start = let((scope.row * core.used + slot) * (matrix.columns // 4))
                _multiply(scope, chosen.words, [matrix], own, start, split, place, sums)
                for index, (total, each) in enumerate(zip(totals, sums, strict=True)):
                    total.value = total.value + share * each.value
                    if bias:
                        with when(place == 0):
                            total.value = total.value + share * chosen.words.value(bias, own[index])
        for index, total in enumerate(totals):
            store(memory, scope.thread + index * scope.threads, total.value)
        barrier()
        with strided(scope, teams * rows) as local:
            row = let(first + local)
            with when(row < matrix.rows):
                at = let(quotient(local, rows) * split + remainder(local, rows) * scope.threads)
                value, place_of = added(memory, at, split), let(scope.row * padded + row)
                value = value * f32(scale) if scale != 1 else value
                store(scope.out, place_of, value if begins else scope.out[place_of] + value)

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32", "chosen": "int32", "shares": "float32"}
    groups = (-(-matrix.rows // (teams * rows)), tokens)
    return build(name, tuning.workgroup, reads, {"out": "float32"}, (), body, groups, 1)


class _Chosen:
    """A token's expert. is_here: whether the kernel's buffer has it. words: its weights, or those of another if not."""

    def __init__(self, scope: Scope, of: Mixture, slot: Value) -> None:
        expert = hold(scope.chosen[scope.row * of.core.used + slot] - i32(of.first), "int32")
        self.is_here = T.And(expert >= 0, expert < of.count)
        at = hold(T.max(T.min(expert, i32(of.count - 1)), i32(0)) * of.stride, "int32")
        self.words = Words(_Behind(scope.w4, quotient(at, 4)), _Behind(scope.w1, at))


@dataclass(frozen=True)
class _Behind:
    """A buffer's elements from `first` on."""

    buffer: Buffer
    first: Value

    def __getitem__(self, at: Value) -> Value:
        return self.buffer[self.first + at]


def _multiply(
    scope: Scope, words: Words, matrices: Sequence[Matrix], rows: Sequence[Value], start: Value, split: int,
    place: Value, sums: Sequence[Sum],
) -> None:  # fmt: skip
    """Add the thread's share of the products of rows, of one matrix after the other, with activations from
    `x[start]` on."""
    parts, summed = matrices[0].parts, any(needs_sums(matrix.block) for matrix in matrices)
    with loop(0, -(-parts // split)) as turn:
        part = let(turn * split + place)
        with when(part < parts):
            x = [let(scope.x[start + part * QUADS + index]) for index in range(QUADS)]
            x_sums = sum_halves(x) if summed else []
            for number, matrix in enumerate(matrices):
                for index, row in enumerate(rows):
                    weights = Weights.read(words, matrix, row, part)
                    sums[number * len(rows) + index].add(matrix.block, weights, x, x_sums)


def _activated(core: Experts, gate: Value, up: Value) -> Value:
    if not core.clamp:
        return ACTIVATIONS[core.activation](gate) * up
    gate = hold(T.min(gate, f32(core.clamp)))
    up = T.max(T.min(up, f32(core.clamp)), f32(-core.clamp))
    return gate * sigmoid(f32(SLOPE) * gate) * (up + f32(1.0))

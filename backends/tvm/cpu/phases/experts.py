"""A mixture of experts (`edge.model.cores.Experts`): router; in a chunk, choice and order; fetch; gate and up; down.

Threads divide the rows of every expert, so that all have the same work whichever experts are chosen. A chunk sorts its
tokens by expert and reads each expert once, for all tokens that have chosen it. A token's outputs are summed in the
order of its experts, by the thread that has the rows, so the sum depends neither on the number of threads nor on the
other tokens.

Where not all experts are in memory (`cpu/slots.py`), the last phases of a chunk run in *waves* of as many experts as
fit, in their order: sums stay the same to the last bit. Before each wave, and in each step, thread 0 calls a function
that assigns every expert a place in memory, and the threads read those that are new.

Between gate, up and down, a token has a row of activations for each expert that it has chosen, whose number is called
its *place*: in a step, 0 … used − 1; in a chunk, sorted by expert. Places of the shared expert follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.activations import Quantized, quantize
from edge.backends.tvm.cpu.kernels.attention import NEVER
from edge.backends.tvm.cpu.kernels.functions import ACTIVATIONS, sigmoid
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import (
    Register,
    Value,
    exp,
    floats,
    i64,
    ints,
    let,
    load,
    loop,
    quotient,
    remainder,
    scaled,
    spread,
    store,
    when,
)
from edge.backends.tvm.cpu.phases.adapt import adapt
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import finish
from edge.backends.tvm.packing.cores import RoutedRows, round_up
from edge.model.cores import SLOPE, Experts

_READ = 1 << 16  # bytes; threads divide what is read in multiples of these
FUNCTIONS = r"""
declare i64 @pread(i32, ptr, i64, i64)

define i32 @edge_call(i64 %address, i64 %layer, i64 %wave, i64 %single) {
  %function = inttoptr i64 %address to ptr
  %result = call i32 %function(i64 %layer, i64 %wave, i64 %single)
  ret i32 %result
}

define i64 @edge_read(i32 %file, ptr %target, i64 %size, i64 %source) {
entry:
  br label %look
look:
  %done = phi i64 [ 0, %entry ], [ %next, %more ]
  %rest = sub i64 %size, %done
  %left = icmp sgt i64 %rest, 0
  br i1 %left, label %read, label %end
read:
  %into = getelementptr i8, ptr %target, i64 %done
  %from = add i64 %source, %done
  %found = call i64 @pread(i32 %file, ptr %into, i64 %rest, i64 %from)
  %some = icmp sgt i64 %found, 0
  br i1 %some, label %more, label %end
more:
  %next = add i64 %done, %found
  br label %look
end:
  ret i64 %done
}
"""


def route(b: PassBuilder, layer: Value) -> None:
    """The router's logits, and in a chunk the choice of each token. (In a step, each thread chooses for itself.)"""
    core, norm, groups = _core(b), b.block.norm, ["router", "experts_in"]
    if core.own_norms:
        norm, groups = core.norms[1], ["router"]
    b.normalise_chunk(norm, layer, *groups)
    with b.phase("router", layer):
        inputs = b.normalised_inputs(norm, layer, *groups)
        adapt(b, "router", layer, inputs)
        rows, scale = RoutedRows.of(core), b.shape.hidden**-0.5 if core.own_norms else 1.0
        for name, first, count in zip(core.routers, (0, rows.experts), (rows.experts, 16), strict=False):
            with b.tiles(count // 16) as tile, b.batches() as tokens:
                logits = b.product(name, layer, tile, inputs, b.rows(tokens))
                for token, each in zip(tokens, logits, strict=True):
                    at = b.at("routes") + token * rows.logits + first + tile * 16
                    store(b.floats, at, scaled(each.value, scale))
        if core.own_norms and b.single:
            b.normalised_inputs(core.norms[0], layer, "experts_in")
    if core.own_norms:
        b.normalise_chunk(core.norms[0], layer, "experts_in")
    if not b.single:
        with b.phase("route", layer), b.shared_out(b.count) as token:
            _choose(b, layer, token, token)
        with b.phase("route", layer), when(b.thread == 0):
            _sort(b)


def fetch(b: PassBuilder, layer: Value) -> None:
    """Bring the next experts into memory. Later waves quantize their inputs again, since `narrow` has overwritten
    them."""
    if not b.design.streams:
        return
    function, width = let(b.at("fetch")), b.shape.padded_hidden
    with when(function > 0), b.phase("fetch", layer):
        if not b.single:
            with when(b.wave > 0), b.shared_out(b.count) as token:
                b.quantize_row("normed", width, token, token, b.blocks("router", "experts_in"))
        with when(b.thread == 0):
            if b.single:
                _choose(b, layer, i64(0), i64(0))
            T.evaluate(T.call_extern("int32", "edge_call", function, layer, b.wave, i64(b.single)))


def read(b: PassBuilder, layer: Value) -> None:
    """Read the experts that `fetch` has listed: every thread reads its part of each."""
    if not b.design.streams:
        return
    reads = let(b.at("reads"))
    with when(reads > 0), b.phase("fetch", layer):
        listed = [b.table[reads + index] for index in range(3)]
        count, file, failures = listed[0], T.cast(listed[1], "int32"), reads + 2
        with loop(i64(0), count) as index:
            source, target, size = (let(b.table[reads + 3 + index * 3 + more]) for more in range(3))
            pages = let(quotient(size + (_READ - 1), _READ))
            start, stop = (let(T.min(part * _READ, size)) for part in b.range(pages))
            with when(stop > start):
                address = T.address_of(b.weights.bytes[let(target + start)])
                arguments = (file, address, stop - start, source + start)
                found = T.call_extern("int64", "edge_read", *arguments)
                with when(found < stop - start):
                    T.buffer_store(b.table, i64(1), [failures])


def widen(b: PassBuilder, layer: Value) -> None:
    """activation(gate) · up."""
    core, tiles = _core(b), -(-_core(b).ffn // 16)
    with b.phase("experts_in", layer):
        if b.single:
            _choose(b, layer, i64(0), b.thread)
        start, stop = _wave(b)
        items = let((stop - start) * tiles)
        with b.shared_out(items) if b.single else b.dealt_out(items) as item:
            which, tile = let(start + quotient(item, tiles)), let(remainder(item, tiles))
            with _served(b, which) as (expert, batch):
                tokens = [b.thread if b.single else _member(b, place)[0] for place in batch.places]
                _widen(b, layer, core.inputs[:2], tile, tokens, batch.places, expert)
        if core.shared:
            with _last_wave(b):
                adapt(b, "experts_in", layer, b.inputs("normed", b.shape.padded_hidden), core.inputs[2:])
                with b.tiles(-(-core.shared // 16)) as tile, b.batches() as tokens:
                    _widen(b, layer, core.inputs[2:], tile, b.rows(tokens), [_shared(b, token) for token in tokens])


def narrow(b: PassBuilder, layer: Value) -> None:
    """x += share · down · inputs, for each expert and its tokens; a sum that is normalised first goes to `terms`."""
    core, tiles, normed = _core(b), -(-b.shape.hidden // 16), b.block.post_norm is not None
    first, inputs = _quantize(b, layer)
    with b.phase("experts_out", layer):
        if normed:
            with nullcontext() if b.single else when(b.wave == 0), b.tiles(tiles) as tile, b.each_token() as token:
                store(b.floats, b.at("terms") + token * b.shape.padded_hidden + tile * 16, floats(0))
        with loop(*_wave(b)) as which, b.tiles(tiles) as tile, _served(b, which) as (expert, batch):
            rows = [let(first + place) for place in batch.places]
            sums = b.product(core.output, layer, tile, inputs, rows, expert)
            for index, (place, each) in enumerate(zip(batch.places, sums, strict=True)):
                with when(batch.first + index < batch.stop):
                    token, slot = (i64(0), place) if b.single else _member(b, place)
                    _add(b, token, tile, slot, each.value)
        if core.shared:
            with _last_wave(b):
                adapt(b, "experts_out", layer, inputs, core.outputs[1:], lambda token: first + _shared(b, token))
                with b.tiles(tiles) as tile, b.batches() as tokens:
                    rows = [let(first + _shared(b, token)) for token in tokens]
                    sums = b.product(core.outputs[1], layer, tile, inputs, rows, low_rows=b.rows(tokens))
                    for token, each in zip(tokens, sums, strict=True):
                        _add(b, token, tile, i64(core.used), each.value)
    if normed:
        with _last_wave(b):
            finish(b, layer, "terms")


UNITS: dict[str, Unit] = {"router": route, "fetch": fetch, "read": read, "experts_in": widen, "experts_out": narrow}


def _core(b: PassBuilder) -> Experts:
    assert isinstance(b.block.core, Experts)
    return b.block.core


def _wave(b: PassBuilder) -> tuple[Value, Value]:
    """The experts of a wave, as start and stop; in a step, those that the token has chosen."""
    if b.single:
        return i64(0), i64(_core(b).used)
    first = let(b.at("waves") + 1 + b.wave)
    start, stop = (let(T.cast(b.integers[first + more], "int64")) for more in (0, 1))
    return start, stop


@contextmanager
def _last_wave(b: PassBuilder) -> Iterator[None]:
    """Guard what runs with the last experts of a chunk: the shared one, and norms of their sum."""
    if b.single:
        yield
        return
    with when(b.wave + 1 == T.cast(b.integers[b.at("waves")], "int64")):
        yield


def _width(b: PassBuilder) -> int:
    return round_up(_core(b).width, 32)


def _choose(b: PassBuilder, layer: Value, token: Value, row: Value) -> None:
    """The experts of a token, in ascending order, and their shares, as row `row` of `chosen` and `shares`.

    An expert is chosen if fewer than `used` others come before it: those of larger scores, and of equal ones the first.
    So exactly `used` are written, even where logits are not finite.
    """
    core, rows = _core(b), RoutedRows.of(_core(b))
    logits, scores = let(b.at("routes") + token * rows.logits), let(b.at("scores") + b.thread * rows.scores)
    ranks, shares = let(b.at("ranks") + b.thread * rows.experts), let(b.at("shares") + row * rows.shares)
    with loop(i64(0), i64(rows.experts // 16)) as part:
        score = load(b.floats, logits + part * 16)
        if core.router == "sigmoid":
            score = let(sigmoid(score))
        if core.choice_bias:
            score = score + load(b.weights.floats, b.layer_at(layer, "exp_probs_b.bias") + part * 16)
        store(b.floats, scores + part * 16, score)
    if core.groups > 1:
        _drop_groups(b, scores)
    largest, better = Register(lanes=1), Register("int32")
    largest.value = b.floats[scores]
    with loop(i64(0), i64(rows.experts // 16)) as part:
        mine, numbers = let(load(b.floats, scores + part * 16)), let(T.ramp(T.cast(part * 16, "int32"), T.int32(1), 16))
        better.value = ints(0)
        with loop(i64(0), i64(core.number)) as other:
            score, number = let(b.floats[scores + other]), let(spread(T.cast(other, "int32")))
            largest.value = T.max(largest.value, score)
            earlier = T.Select(number < numbers, ints(1), ints(0))
            equal = T.Select(spread(score) == mine, earlier, ints(0))
            better.value = better.value + T.Select(spread(score) > mine, ints(1), equal)
        store(b.integers, ranks + part * 16, better.value)
    found, total = Register("int32", lanes=1), Register(lanes=1)
    found.value, total.value = T.int32(0), T.float32(0)
    with loop(i64(0), i64(core.number)) as expert:
        chosen = T.And(b.integers[ranks + expert] < core.used, found.value < core.used)
        value = let(b.floats[logits + expert])
        if not core.normed and core.router == "softmax":
            total.value = total.value + exp(value - largest.value, 1)
        with when(chosen):
            slot = let(T.cast(found.value, "int64"))
            share = let(sigmoid(value, 1) if core.router == "sigmoid" else exp(value - largest.value, 1))
            T.buffer_store(b.integers, T.cast(expert, "int32"), [b.at("chosen") + row * core.used + slot])
            T.buffer_store(b.floats, share, [shares + slot])
            if core.normed:
                total.value = total.value + share
            found.value = found.value + 1
    sums = core.normed or core.router == "softmax"
    factor = let(T.float32(core.scale) / total.value if sums else T.float32(core.scale))
    with loop(i64(0), i64(core.used)) as slot:
        share = b.floats[shares + slot] * factor
        if core.own_norms:
            expert = T.cast(b.integers[b.at("chosen") + row * core.used + slot], "int64")
            share = share * b.weights.floats[b.layer_at(layer, "ffn_down_exps.scale") + expert]
        T.buffer_store(b.floats, share, [shares + slot])
    if core.shared:
        share = sigmoid(b.floats[logits + rows.experts], 1) if core.shared_gated else T.float32(1)
        T.buffer_store(b.floats, share, [shares + core.used])


def _drop_groups(b: PassBuilder, scores: Value) -> None:
    """Scores of experts in groups that the token does not use become the least number."""
    core, size = _core(b), _core(b).number // _core(b).groups
    sums = let(scores + RoutedRows.of(core).experts)
    with loop(i64(0), i64(core.groups)) as group:
        first, second = Register(lanes=1), Register(lanes=1)
        first.value = second.value = T.float32(NEVER)
        with loop(i64(0), i64(size)) as each:
            score = let(b.floats[scores + group * size + each])
            second.value = T.max(second.value, T.min(first.value, score))
            first.value = T.max(first.value, score)
        T.buffer_store(b.floats, first.value + second.value, [sums + group])
    with loop(i64(0), i64(core.groups)) as group:
        mine, better = let(b.floats[sums + group]), Register("int32", lanes=1)
        better.value = T.int32(0)
        with loop(i64(0), i64(core.groups)) as other:
            score = let(b.floats[sums + other])
            before = T.Or(score > mine, T.And(score == mine, other < group))
            better.value = better.value + T.Select(before, T.int32(1), T.int32(0))
        with when(better.value >= core.groups_used), loop(i64(0), i64(size)) as each:
            T.buffer_store(b.floats, T.float32(NEVER), [scores + group * size + each])


def _sort(b: PassBuilder) -> None:
    """Sort the choices of all tokens by expert: `members` are numbers of choices, token · used + slot, those of an
    expert from `starts[expert]` on."""
    core = _core(b)
    numbers, starts, members, nexts = b.integers, let(b.at("starts")), let(b.at("members")), let(b.at("ranks"))
    choices = let(b.count * core.used)
    with loop(i64(0), i64(core.number + 1)) as expert:
        T.buffer_store(numbers, T.int32(0), [starts + expert])
    with loop(i64(0), choices) as choice:
        at = let(starts + T.cast(numbers[b.at("chosen") + choice], "int64") + 1)
        T.buffer_store(numbers, numbers[at] + 1, [at])
    with loop(i64(0), i64(core.number)) as expert:
        T.buffer_store(numbers, numbers[starts + expert], [nexts + expert])
        T.buffer_store(numbers, numbers[starts + expert + 1] + numbers[starts + expert], [starts + expert + 1])
    with loop(i64(0), choices) as choice:
        at = let(nexts + T.cast(numbers[b.at("chosen") + choice], "int64"))
        place = let(T.cast(numbers[at], "int64"))
        T.buffer_store(numbers, T.cast(choice, "int32"), [members + place])
        T.buffer_store(numbers, numbers[at] + 1, [at])
    _divide(b, starts)


def _divide(b: PassBuilder, starts: Value) -> None:
    """Divide a chunk's experts into waves, each with at most `experts_at_once` experts that have tokens. Write to
    `waves` the number of waves, the first expert of each, and the number of experts."""
    waves, most = let(b.at("waves")), let(T.cast(b.at("experts_at_once"), "int32"))
    count, found = Register("int32", lanes=1), Register("int32", lanes=1)
    count.value, found.value = T.int32(1), T.int32(0)
    T.buffer_store(b.integers, T.int32(0), [waves + 1])
    with loop(i64(0), i64(_core(b).number)) as expert:
        tokens = b.integers[starts + expert + 1] - b.integers[starts + expert]
        with when(tokens > 0):
            with when(found.value == most):
                T.buffer_store(b.integers, T.cast(expert, "int32"), [waves + 1 + T.cast(count.value, "int64")])
                count.value, found.value = count.value + 1, T.int32(0)
            found.value = found.value + 1
    T.buffer_store(b.integers, T.int32(_core(b).number), [waves + 1 + T.cast(count.value, "int64")])
    T.buffer_store(b.integers, count.value, [waves])


@dataclass(frozen=True)
class _Batch:
    """Tokens that an expert serves at once: their places, from `first` on. Those from `stop` on repeat the last."""

    places: list[Value]
    first: Value
    stop: Value


@contextmanager
def _served(b: PassBuilder, which: Value) -> Iterator[tuple[Value, _Batch]]:
    """Yield an expert and its tokens: in a step the token's `which`-th choice, in a chunk expert number `which`."""
    if b.single:
        expert = let(T.cast(b.integers[b.at("chosen") + b.thread * _core(b).used + which], "int64"))
        yield expert, _Batch([which], which, which + 1)
        return
    start, stop = (let(T.cast(b.integers[b.at("starts") + which + more], "int64")) for more in (0, 1))
    with loop(i64(0), quotient(stop - start + (b.batch - 1), b.batch)) as part:
        first = let(start + part * b.batch)
        yield which, _Batch([let(T.min(first + index, stop - 1)) for index in range(b.batch)], first, stop)


def _member(b: PassBuilder, place: Value) -> tuple[Value, Value]:
    """The token of a place of a chunk, and the index of the expert among the token's."""
    choice, used = let(T.cast(b.integers[b.at("members") + place], "int64")), _core(b).used
    return let(quotient(choice, used)), let(remainder(choice, used))


def _shared(b: PassBuilder, token: Value) -> Value:
    """The place of a token of the shared expert."""
    return let(b.count * _core(b).used + token)


def _widen(
    b: PassBuilder, layer: Value, names: Sequence[str], tile: Value, rows: Sequence[Value], places: Sequence[Value],
    expert: Value = None,
) -> None:  # fmt: skip
    inputs = b.inputs("normed", b.shape.padded_hidden)
    gate, up = (b.product(name, layer, tile, inputs, rows, expert) for name in names)
    for place, one, other in zip(places, gate, up, strict=True):
        value = _activated(_core(b), one.value, other.value)
        store(b.floats, b.at("ffn") + place * _width(b) + tile * 16, value)


def _activated(core: Experts, gate: Value, up: Value) -> Value:
    if not core.clamp:
        return ACTIVATIONS[core.activation](gate) * up
    gate = let(T.min(gate, floats(core.clamp)))
    up = T.max(T.min(up, floats(core.clamp)), floats(-core.clamp))
    return gate * sigmoid(floats(SLOPE) * gate) * (up + floats(1))


def _quantize(b: PassBuilder, layer: Value) -> tuple[Value, Inputs]:
    """Quantize the rows of all places; in a step, into this thread's copy. Returns the first row, and the inputs."""
    core, width, sizes = _core(b), _width(b), b.group_sizes(b.blocks("experts_out"))
    rows, out = RoutedRows.of(core).places, replace(b.quantized(), stride=width)
    first = let(b.thread * rows) if b.single else i64(0)

    def quantize_row(place: Value, columns: int, out: Quantized) -> None:
        quantize(b.floats, let(b.at("ffn") + place * width), round_up(columns, 32), out, let(first + place), sizes)

    if sizes and b.single:
        for columns, start, count in ((core.ffn, 0, core.used), (core.shared, core.used, int(core.shared > 0))):
            with loop(i64(0), i64(count)) as index:
                quantize_row(let(start + index), columns, out)
        b.mark("quantize_ffn", layer)
    elif sizes:
        start, stop = (let(T.cast(b.integers[b.at("starts") + expert], "int64")) for expert in _wave(b))
        with b.phase("quantize_ffn", layer):
            with b.shared_out(let(stop - start)) as index:
                quantize_row(let(start + index), core.ffn, out)
            if core.shared:
                with _last_wave(b), b.shared_out(b.count) as index:
                    quantize_row(let(_shared(b, index)), core.shared, out)
    return first, Inputs(b.floats, let(b.at("ffn") - first * width), width, None if b.design.exact else out)


def _add(b: PassBuilder, token: Value, tile: Value, slot: Value, value: Value) -> None:
    """x += share · value, or `terms`."""
    normed, row = b.block.post_norm is not None, b.thread if b.single else token
    share = b.floats[b.at("shares") + row * RoutedRows.of(_core(b)).shares + slot]
    at = let(b.at("terms" if normed else "x") + token * b.shape.padded_hidden + tile * 16)
    added = scaled(value * spread(share), 1.0 if normed else b.block.scale)
    store(b.floats, at, load(b.floats, at) + added)

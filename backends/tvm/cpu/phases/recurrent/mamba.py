"""Mamba-2 (`edge.model.cores.Mamba`): a product; convolution and recurrence, head by head; gate, norm and output.

The recurrence runs token by token, as in `delta_net.py`. Norms span heads, so they wait for all of them: in a step,
each thread then computes the whole row for itself, since one row costs less than a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.backends.tvm.cpu.kernels.functions import rms_scale, silu, softplus
from edge.backends.tvm.cpu.kernels.vectors import (
    Register,
    Value,
    exp,
    floats,
    i64,
    let,
    load,
    loop,
    quotient,
    spread,
    store,
)
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import multiply_rows, of_normalised, project
from edge.backends.tvm.cpu.phases.recurrent.convolution import Convolution
from edge.backends.tvm.cpu.phases.recurrent.states import for_drafts, inputs_at, sequences, state_at
from edge.backends.tvm.packing.cores import mamba_row, round_up, state_values
from edge.model.cores import Mamba

_AT_ONCE = 4  # vectors of a head's values that stay in registers while its state is read


def products(b: PassBuilder, layer: Value) -> None:
    """A token's row of `channels` has z, the inputs of the convolution, and dt."""
    stride = mamba_row(_core(b))
    with of_normalised(b, layer, "mamba_in") as inputs:
        multiply_rows(b, layer, "ssm_in", inputs, stride, inputs_at(b, "channels", layer), stride)


def scan(b: PassBuilder, layer: Value) -> None:
    core = _core(b)
    with b.phase("mamba_scan", layer), b.dealt_out(i64(core.heads)) as head:
        _Head(b, core, layer, head).run()
    _convolution(b, layer).apply("mamba_scan")


def output(b: PassBuilder, layer: Value) -> None:
    def prepare(b: PassBuilder, layer: Value) -> None:
        _convolution(b, layer).keep_inputs()
        if b.single:
            _finish(b, layer, i64(0), b.thread)
            b.mark("mamba_gate", layer)

    if not b.single:
        with b.phase("mamba_gate", layer), b.shared_out(b.count) as token:
            _finish(b, layer, token, token)
    project(b, layer, "mixed", round_up(_core(b).width, 32), "mamba_out", private=True, first=prepare)


UNITS: dict[str, Unit] = {"mamba_in": products, "mamba_scan": scan, "mamba_out": output}


def _core(b: PassBuilder) -> Mamba:
    assert isinstance(b.block.core, Mamba)
    return b.block.core


def _convolution(b: PassBuilder, layer: Value) -> Convolution:
    core = _core(b)
    channels = inputs_at(b, "channels", layer)
    return Convolution(b, layer, core.mixed, core.kernel, let(channels + core.width), mamba_row(core))


def _finish(b: PassBuilder, layer: Value, token: Value, row: Value) -> None:
    """Row `row` of `mixed`: a token's outputs times SiLU(z), and their norm if there is one."""
    core, width = _core(b), round_up(_core(b).width, 32)
    source, gate = let(b.at("scanned") + token * width), let(inputs_at(b, "channels", layer) + token * mamba_row(core))
    out = let(b.at("mixed") + row * width)
    with loop(i64(0), i64(core.width // 16)) as part:
        at = part * 16
        store(b.floats, out + at, load(b.floats, source + at) * silu(load(b.floats, gate + at)))
    if not core.normed:
        return
    span, weight = core.width // core.groups, let(b.layer_at(layer, "ssm_norm"))
    with loop(i64(0), i64(core.groups)) as group:
        start = let(out + group * span)
        scale = spread(rms_scale(b.floats, start, span, span, b.shape.norm_eps))
        with loop(i64(0), i64(span // 16)) as part:
            factor = load(b.weights.floats, weight + group * span + part * 16)
            store(b.floats, start + part * 16, load(b.floats, start + part * 16) * scale * factor)


class _Head:
    """One head of values, for all tokens of the pass."""

    def __init__(self, b: PassBuilder, core: Mamba, layer: Value, head: Value) -> None:
        self.b, self.core, self.layer, self.head = b, core, layer, head
        work = let(b.at("work") + b.thread * b.at("part_stride"))
        self.reads, self.writes, self.values = work, let(work + core.size), let(work + 2 * core.size)  # C, B, x

    def run(self) -> None:
        b, core, convolution = self.b, self.core, _convolution(self.b, self.layer)
        group = let(quotient(self.head, core.heads // core.groups))
        writes = let(core.width + group * core.size)
        with sequences(b) as (begin, stop):
            memory = let(state_at(b, self.layer, begin) + (core.kernel - 1) * core.mixed)
            memory = for_drafts(b, let(memory + self.head * state_values(core)), state_values(core))
            with loop(begin, stop) as token:
                convolution.run(begin, token, let(self.head * core.head_dim), core.head_dim, self.values)
                convolution.run(begin, token, writes, core.size, self.writes)
                convolution.run(begin, token, let(writes + core.groups * core.size), core.size, self.reads)
                rate, bias, skip = (
                    b.weights.floats[b.layer_at(self.layer, name) + self.head]
                    for name in ("ssm_a", "ssm_dt.bias", "ssm_d")
                )
                row = let(inputs_at(b, "channels", self.layer) + token * mamba_row(core) + core.width + core.mixed)
                step = let(softplus(b.floats[row + self.head] + bias, 1))
                decay = let(exp(rate * step, 1))
                out = let(b.at("scanned") + token * round_up(core.width, 32) + self.head * core.head_dim)
                for first in range(0, core.head_dim // 16, _AT_ONCE):
                    parts = range(first, min(first + _AT_ONCE, core.head_dim // 16))
                    self._step(memory, parts, step, decay, let(spread(skip)), out)

    def _step(
        self, memory: Value, parts: Sequence[int], step: Value, decay: Value, skip: Value, out: Value
    ) -> None:  # fmt: skip
        """Update the state with the new values, and read it by C, for some vectors of the values."""
        b, core, states = self.b, self.core, self.b.states
        values = [let(load(b.floats, self.values + part * 16)) for part in parts]
        changes, sums = [let(value * spread(step)) for value in values], [Register() for _ in parts]
        for each in sums:
            each.value = floats(0)
        with loop(i64(0), i64(core.size)) as row:
            write, read = let(spread(b.floats[self.writes + row])), let(spread(b.floats[self.reads + row]))
            for each, change, part in zip(sums, changes, parts, strict=True):
                at = let(memory + row * core.head_dim + part * 16)
                new = let(load(states, at) * spread(decay) + write * change)
                store(states, at, new)
                each.value = each.value + read * new
        for each, value, part in zip(sums, values, parts, strict=True):
            store(b.floats, out + part * 16, each.value + skip * value)

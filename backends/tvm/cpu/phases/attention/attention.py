"""Softmax attention: three units, of which qkv.py (or latent.py) and attend.py have the work."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.functions import sigmoid
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, load, loop, store, when
from edge.backends.tvm.cpu.phases.adapt import adapt
from edge.backends.tvm.cpu.phases.attention.attend import attend_chunk, attend_step, merge_parts, observe_last
from edge.backends.tvm.cpu.phases.attention.latent import attend_latent, expand, make_latent_rows
from edge.backends.tvm.cpu.phases.attention.pages import score_pages
from edge.backends.tvm.cpu.phases.attention.qkv import cross, qkv
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import project
from edge.backends.tvm.packing.cores import round_up


def qkv_unit(b: PassBuilder, layer: Value) -> None:
    if b.attention.latent:
        make_latent_rows(b, layer)
        return
    norm, joined = b.block.norm, 2 * b.shape.hidden if b.attention.joined else 0
    if joined:
        b.quantize_chunk("joined", joined, layer, "qkv")
    else:
        b.normalise_chunk(norm, layer, "qkv")
    with b.phase("qkv", layer):
        if joined:
            inputs = b.quantized_inputs("joined", joined, layer, "qkv", private=False)
        else:
            inputs = b.normalised_inputs(norm, layer, "qkv")
        adapt(b, "qkv", layer, inputs)
        qkv(b, layer, inputs)


def attend_unit(b: PassBuilder, layer: Value) -> None:
    if b.bounds is not None:
        score_pages(b, layer)
    with b.phase("attend", layer):
        attend_latent(b, layer, attend_step if b.stepwise else attend_chunk)
    with when(T.And(b.observed > 0, b.layer_at(layer, "observed") > 0)):
        observe_last(b, layer)  # the next phase reads nothing that this changes
    if b.stepwise and not b.single and not b.apart:  # the code of steps, too, which merge on their way to the output
        with when(b.count > 1), b.phase("merge", layer), b.shared_out(b.count) as token:
            merge_parts(b, layer, token, token)


def output_unit(b: PassBuilder, layer: Value) -> None:
    width, latent = round_up(b.attention.mixed, 32), b.attention.latent is not None
    if b.apart:
        with b.phase("merge", layer), b.shared_out(b.count) as token:
            _merge(b, layer, token, token)
            b.quantize_row("mixed", width, token, token, b.blocks("expand" if latent else "output"))
    elif "attn_q_gate" in b.names and not b.single:
        with b.phase("gate", layer), b.shared_out(b.count) as token:
            _apply_gate(b, token, token)
    elif b.attention.clipped:
        with b.phase("gate", layer), b.shared_out(b.count) as token:
            b.clip_row(layer, "attn_output", let(b.at("mixed") + token * width), width)

    def merge_step(b: PassBuilder, layer: Value) -> None:
        _merge(b, layer, i64(0), b.thread)
        b.mark("merge", layer)

    first = merge_step if b.single else None
    if latent:
        expand(b, layer, width, first)
        project(b, layer, "expanded", b.attention.width, "output")
        return
    project(b, layer, "mixed", width, "output", private=True, first=first, quantized=b.apart)


def crossing_unit(b: PassBuilder, layer: Value) -> None:
    """Rows that tokens read across, of an encoder's states."""
    width = b.shape.padded_hidden
    b.quantize_chunk("x", width, layer, "crossing")
    with b.phase("crossing", layer):
        cross(b, layer, b.quantized_inputs("x", width, layer, "crossing", private=False))


UNITS: dict[str, Unit] = {"qkv": qkv_unit, "attend": attend_unit, "output": output_unit}


def _merge(b: PassBuilder, layer: Value, token: Value, row: Value) -> None:
    merge_parts(b, layer, token, row)
    if "attn_q_gate" in b.names:
        _apply_gate(b, token, row)


def _apply_gate(b: PassBuilder, token: Value, row: Value) -> None:
    """Row `row` of the heads' outputs times the sigmoid of a token's gate."""
    width = round_up(b.attention.width, 32)
    gate, out = let(b.at("gates") + token * width), let(b.at("mixed") + row * width)
    with loop(i64(0), i64(width // 16)) as part:
        at = out + part * 16
        store(b.floats, at, load(b.floats, at) * sigmoid(load(b.floats, gate + part * 16)))

"""The products of the feed-forward network and of attention's output."""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.functions import ACTIVATIONS, rms_scale
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, load, loop, scaled, spread, store
from edge.backends.tvm.cpu.phases.builder import PassBuilder
from edge.backends.tvm.packing.layout import GROUPS


def add(b: PassBuilder, group: str, layer: Value, inputs: Inputs, post_norm: str) -> None:
    """x += matrix · inputs; if the model normalises the product first, it goes to `normed` for `add_normed`."""
    has_norm = post_norm in b.design.vectors
    target = "normed" if has_norm else "x"  # the normalised rows are no longer needed

    (name,) = GROUPS[group]
    with b.tiles(-(-b.shape.hidden // 16)) as tile, b.batches() as tokens:
        sums = b.product(name, layer, tile, inputs, b.rows(tokens))
        for token, each in zip(tokens, sums, strict=True):
            at = let(b.at(target) + token * b.shape.padded_hidden + tile * 16)
            product = scaled(each.value, b.shape.residual_scale)
            store(b.floats, at, each.value if has_norm else load(b.floats, at) + product)


def add_normed(b: PassBuilder, layer: Value, post_norm: str) -> None:
    """x += the RMSNorm of `normed`, in a phase of its own; nothing if the model has no such norm."""
    if post_norm not in b.design.vectors:
        return
    with b.phase(post_norm, layer):
        _add_normed(b, let(b.layer_at(layer, post_norm)))


def _add_normed(b: PassBuilder, weight: Value) -> None:
    """In a step the threads divide the row, in a chunk the tokens."""
    shape, parts = b.shape, b.shape.padded_hidden // 16
    tokens = (i64(0), i64(1)) if b.single else b.range(b.count)
    first, last = b.range(parts) if b.single else (i64(0), i64(parts))
    with loop(*tokens) as token:
        row, x = (let(b.at(name) + token * shape.padded_hidden) for name in ("normed", "x"))
        scale = rms_scale(b.floats, row, shape.hidden, shape.padded_hidden, shape.norm_eps)
        with loop(first, last) as part:
            at = part * 16
            normed = load(b.floats, row + at) * spread(scale) * load(b.weights.floats, weight + at)
            store(b.floats, x + at, load(b.floats, x + at) + scaled(normed, shape.residual_scale))


def widen(b: PassBuilder, layer: Value, inputs: Inputs) -> None:
    """activation(gate) · up, or activation(up) without a gate."""
    shape, names = b.shape, b.shape.groups["gate_up"]
    activation = ACTIVATIONS[shape.activation]
    with b.tiles(-(-shape.ffn // 16)) as tile, b.batches() as tokens:
        rows = b.rows(tokens)
        first, *second = (b.product(name, layer, tile, inputs, rows) for name in names)
        for index, token in enumerate(tokens):
            value = activation(first[index].value)
            for each in second:
                value = value * each[index].value
            store(b.floats, b.at("ffn") + token * shape.padded_ffn + tile * 16, value)

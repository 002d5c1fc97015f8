"""The products that widen a row and that bring a result back to it."""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.functions import ACTIVATIONS
from edge.backends.tvm.cpu.kernels.lanes import Value, i64, let, load, loop, spread, store
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.norms import rms_scale
from edge.backends.tvm.cpu.phases.frame import Frame
from edge.backends.tvm.packing.layout import GROUPS


def add(f: Frame, group: str, layer: Value, inputs: Inputs, post_norm: str) -> None:
    """x += matrix · inputs; where the model normalises the product first, that goes to `normed` for `add_normed`."""
    has_norm = post_norm in f.design.vectors
    target = "normed" if has_norm else "x"  # nobody reads the normalised rows any more

    (name,) = GROUPS[group]
    with f.tiles(-(-f.shape.hidden // 16)) as tile, f.batches() as tokens:
        sums = f.product(name, layer, tile, inputs, f.rows(tokens))
        for token, each in zip(tokens, sums, strict=True):
            at = let(f.at(target) + token * f.shape.padded_hidden + tile * 16)
            store(f.floats, at, each.value if has_norm else load(f.floats, at) + each.value)


def add_normed(f: Frame, layer: Value, post_norm: str) -> None:
    """x += the RMSNorm of `normed`, in a phase of its own; nothing where the model has no such norm."""
    if post_norm not in f.design.vectors:
        return
    with f.phase(post_norm, layer):
        _add_normed(f, let(f.layer_at(layer, post_norm)))


def _add_normed(f: Frame, weight: Value) -> None:
    """In a step each thread its share of the row."""
    shape, parts = f.shape, f.shape.padded_hidden // 16
    tokens = (i64(0), i64(1)) if f.single else f.range(f.count)
    first, last = f.range(parts) if f.single else (i64(0), i64(parts))
    with loop(*tokens) as token:
        row, x = (let(f.at(name) + token * shape.padded_hidden) for name in ("normed", "x"))
        scale = rms_scale(f.floats, row, shape.hidden, shape.padded_hidden, shape.norm_eps)
        with loop(first, last) as part:
            at = part * 16
            normed = load(f.floats, row + at) * spread(scale) * load(f.weights.floats, weight + at)
            store(f.floats, x + at, load(f.floats, x + at) + normed)


def widen(f: Frame, layer: Value, inputs: Inputs) -> None:
    """activation(gate) · up, or activation(up) where there is no gate."""
    shape, names = f.shape, f.shape.groups["gate_up"]
    activation = ACTIVATIONS[shape.activation]
    with f.tiles(-(-shape.ffn // 16)) as tile, f.batches() as tokens:
        rows = f.rows(tokens)
        first, *second = (f.product(name, layer, tile, inputs, rows) for name in names)
        for index, token in enumerate(tokens):
            value = activation(first[index].value)
            for each in second:
                value = value * each[index].value
            store(f.floats, f.at("ffn") + token * shape.padded_ffn + tile * 16, value)

"""Products of matrices: to rows of an array, or the output projection of a core and the norms after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.backends.tvm.cpu.kernels.functions import rms_scale
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, load, loop, scaled, spread, store
from edge.backends.tvm.cpu.phases.adapt import adapt
from edge.backends.tvm.cpu.phases.builder import PassBuilder

Part = Callable[[PassBuilder, Value], None]


@contextmanager
def of_normalised(b: PassBuilder, layer: Value, *groups: str) -> Iterator[Inputs]:
    """A phase that multiplies the block's normalised rows by matrices of `groups`. The first group is the phase's name,
    and the one with adapters."""
    b.normalise_chunk(b.block.norm, layer, *groups)
    with b.phase(groups[0], layer):
        inputs = b.normalised_inputs(b.block.norm, layer, *groups)
        adapt(b, groups[0], layer, inputs)
        yield inputs


def project(
    b: PassBuilder, layer: Value, name: str, width: int, group: str, *, private: bool = False,
    first: Part | None = None, quantized: bool = False,
) -> None:  # fmt: skip
    """The unit that ends a block: x += output projection · rows `name`, each `width` long, with the norms after it.

    group: of the output's matrix, and the name of the phase. private: in a step, each thread has its own copy of the
    row. first: work of the phase before it reads the rows. quantized: the rows are quantized already.
    """
    if not quantized:
        b.quantize_chunk(name, width, layer, group)
    with b.phase(group, layer):
        if first:
            first(b, layer)
        inputs = b.quantized_inputs(name, width, layer, group, private=private)
        adapt(b, group, layer, inputs)
        _add(b, layer, inputs)
    finish(b, layer, "normed")


def multiply_rows(b: PassBuilder, layer: Value, name: str, inputs: Inputs, rows: int, out: Value, stride: int) -> None:
    """Row `token` of an array, which begins at `out` and has rows of `stride` floats, = matrix · inputs."""
    with b.tiles(rows // 16) as tile, b.batches() as tokens:
        for token, each in zip(tokens, b.product(name, layer, tile, inputs, b.rows(tokens)), strict=True):
            store(b.floats, out + token * stride + tile * 16, each.value)


def finish(b: PassBuilder, layer: Value, term: str) -> None:
    """The norms after a block's product, rows `term` if they are normalised before they are added."""
    if post_norm := b.block.post_norm:
        with b.phase(post_norm, layer):
            _add_normed(b, layer, post_norm, term, "held" if b.block.held or b.block.joint_norm else "x")
    if joint_norm := b.block.joint_norm:
        with b.phase(joint_norm, layer):
            _add_normed(b, layer, joint_norm, "held", "x")
    if sum_norm := b.block.sum_norm:
        with b.phase(sum_norm, layer), b.shared_out(b.count) as token:
            b.norm_row(token, token, sum_norm, layer, "x")


def _add(b: PassBuilder, layer: Value, inputs: Inputs) -> None:
    """x += matrix · inputs; if the model normalises the product first, it goes to `normed`."""
    has_norm, name = b.block.post_norm is not None, b.block.core.output
    target = "normed" if has_norm else "x"  # the normalised rows are no longer needed

    with b.tiles(-(-b.shape.hidden // 16)) as tile, b.batches() as tokens:
        sums = b.product(name, layer, tile, inputs, b.rows(tokens))
        for token, each in zip(tokens, sums, strict=True):
            at = let(b.at(target) + token * b.shape.padded_hidden + tile * 16)
            product = scaled(each.value, b.block.scale)
            if has_norm or b.block.replaces:
                store(b.floats, at, each.value)
            else:
                store(b.floats, at, _rescaled(b, layer, load(b.floats, at) + product))


def _rescaled(b: PassBuilder, layer: Value, total: Value) -> Value:
    """Hidden states after the block, times the block's scale in the file if it has one."""
    if b.block.rescale is None:
        return total
    return total * spread(b.weights.floats[b.layer_at(layer, b.block.rescale)])


def _add_normed(b: PassBuilder, layer: Value, norm: str, source: str, target: str) -> None:
    """Add the RMSNorm of rows to others, or store it if the block is held. In a step the threads divide the row, in a
    chunk the tokens."""
    shape, parts, weight = b.shape, b.shape.padded_hidden // 16, let(b.layer_at(layer, norm))
    tokens = (i64(0), i64(1)) if b.single else b.range(b.count)
    first, last = b.range(parts) if b.single else (i64(0), i64(parts))
    with loop(*tokens) as token:
        row, out = (let(b.at(name) + token * shape.padded_hidden) for name in (source, target))
        scale = rms_scale(b.floats, row, shape.hidden, shape.padded_hidden, shape.norm_eps)
        with loop(first, last) as part:
            at = part * 16
            normed = load(b.floats, row + at) * spread(scale) * load(b.weights.floats, weight + at)
            if target == "x":
                normed = _rescaled(b, layer, load(b.floats, out + at) + scaled(normed, b.block.scale))
            elif not b.block.held:
                normed = load(b.floats, out + at) + normed
            store(b.floats, out + at, normed)

"""The whole pass of a model, tokens to logits, as dispatches of kernels.

A step runs one token (decode), a chunk several (prefill).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from edge.backends.tvm.cpu.arguments import cross_dtype
from edge.backends.tvm.gpu import picking
from edge.backends.tvm.gpu.design import CROSS_MOVE, RING_MOVE, Design, RowForm
from edge.backends.tvm.gpu.kernels import pick
from edge.backends.tvm.gpu.kernels.attention.rows import move
from edge.backends.tvm.gpu.kernels.embed import add_given, embed
from edge.backends.tvm.gpu.kernels.norms import Norm, normalise
from edge.backends.tvm.gpu.kernels.products.products import head_products
from edge.backends.tvm.gpu.kernels.products.steps import step
from edge.backends.tvm.gpu.kernels.products.tiles import chunk
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.phases.attention import attention, make_cross_rows
from edge.backends.tvm.gpu.phases.builder import Kernels, PassBuilder, weights_in
from edge.backends.tvm.gpu.phases.delta_net import delta_net
from edge.backends.tvm.gpu.phases.dense import dense
from edge.backends.tvm.gpu.phases.experts import experts
from edge.backends.tvm.gpu.phases.kimi_delta import kimi_delta
from edge.backends.tvm.gpu.phases.mamba import mamba
from edge.backends.tvm.gpu.phases.per_layer_input import make_inputs, per_layer_input
from edge.backends.tvm.gpu.phases.selective_scan import selective_scan
from edge.backends.tvm.gpu.phases.short_convolution import short_convolution
from edge.backends.tvm.gpu.program import Program, Slice
from edge.model.cores import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    KimiDelta,
    Mamba,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)

CORES: dict[type, Callable[..., None]] = {
    Attention: attention,
    DeltaNet: delta_net,
    Dense: dense,
    Experts: experts,
    KimiDelta: kimi_delta,
    Mamba: mamba,
    PerLayerInput: per_layer_input,
    SelectiveScan: selective_scan,
    ShortConvolution: short_convolution,
}


def generate(design: Design) -> Program:
    """Generate a model's program. Passes: step; chunk; `last` and `rows`, the logits of a chunk's last token or of
    State.WANTED; then `picked` or `top` (picking.py). With `Design.long_layers` also `long step`, a step behind many
    rows. With `Design.together` also `batch`, several tokens that run as if each alone, and their logits; then `tops`.
    With `Design.observes` also `observed step` and so on; of models with cross attention `cross`, which makes rows of
    states in `x`. An encoder has a chunk alone, which ends with the states: in `normed`, or in `x` without a last
    norm."""
    kernels = Kernels(design.language)
    if design.shape.encoder:
        _layers(made := PassBuilder(design, kernels))
        if norm := Norm.of(design.weights.rest, "output_norm", design.shape):
            buffers, key = {"x": "x", "w1": "rest", "out": "normed"}, ("edge_norm_last", norm)
            made.add("norm", None, key, lambda name: normalise(name, norm, design.chunk), buffers)
        return Program(design.language, kernels.by_name, design.buffers(0), {"chunk": tuple(made.dispatches)})
    crosses = design.shape.crosses
    makers = {"step": _step, "chunk": _layers, "last": _last, "rows": _rows} | ({"cross": _cross} if crosses else {})
    makers |= {"long step": _step} if design.long_layers else {}
    makers |= {"batch": _step} if design.together > 1 else {}
    if design.observes:
        makers |= {f"observed {name}": makers[name] for name in ("step", "long step", "chunk") if name in makers}
    passes = {}
    for name, make in makers.items():
        step, long, observed, batch = (word in name for word in ("step", "long", "observed", "batch"))
        tokens = design.together if batch else 1
        make(made := PassBuilder(design, kernels, single=step or batch, long=long, observed=observed, tokens=tokens))
        passes[name] = tuple(made.dispatches)
    moved = {"edge_move": RowForm.of(design.shape.attention, design.kv_dtype)}
    moved |= {RING_MOVE: RowForm.of(design.shape.ringed, design.kv_dtype)} if design.shape.apart else {}
    moved |= {CROSS_MOVE: RowForm.of(design.shape.attention, cross_dtype(design.kv_dtype))} if crosses else {}
    moves = (move(name, form) for name, form in moved.items())
    for built in (*moves, *pick.kernels()):
        kernels.find((built.name,), lambda _, built=built: built)  # type: ignore[misc]
    logits = Slice("logits")
    passes["picked"] = picking.argmax(design.shape.vocab, design.chunk, logits)
    passes["top"] = picking.top(design.shape.vocab, logits)
    if design.together > 1:
        passes["tops"] = picking.top(design.shape.vocab, logits, design.together)
    return Program(design.language, kernels.by_name, design.buffers(0), passes)


def _step(made: PassBuilder) -> None:
    _layers(made)
    _last(made)


def _layers(made: PassBuilder) -> None:
    layers = len(made.design.weights.layers)
    _embed(made)
    if made.design.shape.layer_inputs:
        make_inputs(made)
    for layer in range(layers):
        blocks = made.design.blocks(layer)
        for block, after in zip_longest(blocks, blocks[1:]):
            made.is_normed = block.beside or bool(after and after.beside)
            if made.is_normed and not block.beside:
                made.normalise_hidden(layer, block)
            CORES[type(block.core)](made, block.core, block, layer)
        if layer < made.design.shape.deepstack and not made.single:
            _add_given(made, layer)
    made.add_residual(layers - 1)


def _cross(made: PassBuilder) -> None:
    for layer in range(len(made.design.weights.layers)):
        for block in made.design.blocks(layer):
            if isinstance(block.core, Attention) and block.core.across:
                make_cross_rows(made, block.core, layer)


def _add_given(made: PassBuilder, layer: int) -> None:
    made.add_residual(layer)
    chunk, padded = made.design.chunk, made.design.shape.padded_hidden
    buffers, scalars = {"out": made.hidden}, {"layer": layer}
    made.add("other", layer, ("edge_add_given",), lambda name: add_given(name, chunk, padded), buffers, scalars)


def _last(made: PassBuilder) -> None:
    """Add the logits of a pass's last token, if wanted, or of all that run as if alone."""
    design = made.design
    for piece, product in head_products(design.weights, design.shape):

        def make(name: str, product: Any = product) -> Built:
            return step(replace(product, name=name), design.tuning, last=made.tokens == 1, tokens=made.tokens)

        buffers = weights_in(piece.buffer) | {"x": made.hidden, "out": "logits"}
        made.add("head", None, ("edge_head_batch" if made.tokens > 1 else "edge_head", product), make, buffers)


def _rows(made: PassBuilder) -> None:
    """Add the logits of the last State.WANTED tokens of a pass."""
    design, count = made.design, made.design.logits_rows
    heads = head_products(design.weights, design.shape)
    if norm := heads[0][1].norm:
        buffers, key = {"w1": "rest", "out": "normed"}, ("edge_norm_wanted", norm)
        made.add("head", None, key, lambda name: normalise(name, norm, count, wanted=True), buffers)
    for piece, product in heads:

        def make(name: str, product: Any = product) -> Built:
            return chunk(replace(product, name=name), design.tuning, count, wanted=True)

        buffers = weights_in(piece.buffer) | {"x": "normed" if norm else "x", "out": "logits"}
        made.add("head", None, ("edge_head_chunk", product), make, buffers)


def _embed(made: PassBuilder) -> None:
    design = made.design
    positions = design.weights.rest.matrix("position_embd") if design.learned else None
    for piece in design.weights.embedding:

        def make(name: str, piece: Any = piece) -> Built:
            return embed(name, piece, made.tables, design.chunk, design.shape.embedding_scale, positions)

        buffers = weights_in(piece.buffer) | {"out": "x", "r4": "rest", "r1": "rest"}
        key = ("edge_embed", piece, made.tables.alone and design.learned)
        made.add("embed", None, key, make, buffers)

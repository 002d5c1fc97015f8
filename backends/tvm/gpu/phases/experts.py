"""Mixtures of experts: router, choice, the chosen experts, and a shared one."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.tvm.gpu.design import Design
from edge.backends.tvm.gpu.kernels.experts import Mixture, narrow, route, widen
from edge.backends.tvm.gpu.kernels.products import Epilogue, Factor, Product
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Experts
from edge.model.layers import Block


def experts(made: PassBuilder, core: Experts, block: Block, layer: int) -> None:
    assert block.post_norm is None  # experts add to the hidden states directly
    design, layout = made.design, made.layout(layer)
    made.normalise_hidden(layer, block)
    epilogue = Epilogue("store", core.number + core.shared_has_share)
    router = Product("edge_router", made.factors(core.routers, layer), epilogue)
    made.multiply("gate-up", layer, router, {"x": "normed", "out": "routes"})
    bias = layout.vector("exp_probs_b.bias")
    made.add(
        "gate-up", layer, ("edge_route", core, bias), lambda name: route(name, core, bias, design.chunk),
        weights_in(f"layer.{layer}"),
    )  # fmt: skip
    pieces = [(Mixture.of(core, piece), weights_in(piece.buffer)) for piece in design.weights.experts[layer]]
    for of, weights in pieces:
        made.add("gate-up", layer, ("edge_experts_in", of), _widen(design, of), weights | {"x": "normed"})
    for of, weights in pieces:
        buffers = weights | {"x": "inner", "out": made.hidden}
        made.add("down", layer, ("edge_experts_out", of, block.scale), _narrow(design, of, block.scale), buffers)
    if core.shared:
        _add_shared(made, core, block, layer)


def _widen(design: Design, of: Mixture) -> Callable[[str], Built]:
    return lambda name: widen(name, of, design.tuning, design.chunk)


def _narrow(design: Design, of: Mixture, scale: float) -> Callable[[str], Built]:
    return lambda name: narrow(name, of, design.tuning, design.chunk, scale)


def _add_shared(made: PassBuilder, core: Experts, block: Block, layer: int) -> None:
    layout = made.layout(layer)
    inside = Epilogue("activate", round_up(core.shared, 32), activation=core.activation)
    factors = tuple(Factor.of(layout, name) for name in core.inputs[2:])
    made.multiply("gate-up", layer, Product("edge_shared_in", factors, inside), {"x": "normed", "out": "ffn"})
    share = (core.used + 1, core.used) if core.shared_has_share else None
    outside = Epilogue("add", made.design.shape.padded_hidden, block.scale, share=share)
    product = Product("edge_shared_out", (Factor.of(layout, core.outputs[1]),), outside)
    made.multiply("down", layer, product, {"x": "ffn", "out": made.hidden})

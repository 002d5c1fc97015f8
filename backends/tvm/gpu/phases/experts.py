"""Mixtures of experts: router, choice, the chosen experts, and a shared one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edge.backends.tvm.gpu.design import Design
from edge.backends.tvm.gpu.kernels.experts import Mixture, narrow, route, widen
from edge.backends.tvm.gpu.kernels.norms import Norm
from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Factor, Product, Residual
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.backends.tvm.gpu.weights import Vector
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Experts
from edge.model.structure.layers import Block


def experts(made: PassBuilder, core: Experts, block: Block, layer: int) -> None:
    """Experts add to the hidden states directly, or to what the block before has held."""
    joint = _Joint.of(made, block, layer)
    design, layout = made.design, made.layout(layer)
    made.normalise_hidden(layer, replace(block, norm=core.norms[1]) if core.own_norms else block)
    scale = design.shape.hidden**-0.5 if core.own_norms else 1.0
    epilogue = Epilogue("store", core.number + core.shared_has_share, scale)
    router = Product("edge_router", made.factors(core.routers, layer), epilogue)
    made.multiply("gate-up", layer, router, {"x": "normed", "out": "routes"})
    bias = layout.vector("exp_probs_b.bias")
    factors = layout.vector("ffn_down_exps.scale") if core.own_norms else None
    made.add(
        "gate-up", layer, ("edge_route", core, bias, factors),
        lambda name: route(name, core, bias, factors, design.chunk), weights_in(f"layer.{layer}"),
    )  # fmt: skip
    if core.own_norms:
        made.normalise_hidden(layer, replace(block, norm=core.norms[0]))
    pieces = [(Mixture.of(core, piece), weights_in(piece.buffer)) for piece in design.weights.experts[layer]]
    for of, weights in pieces:
        made.add("gate-up", layer, ("edge_experts_in", of), _widen(design, of), weights | {"x": "normed"})
    for number, (of, weights) in enumerate(pieces):
        buffers = weights | {"x": "inner", "out": "normed" if joint else made.hidden}
        begins = joint is not None and number == 0
        key = ("edge_experts_out", of, block.scale, begins)
        made.add("down", layer, key, _narrow(design, of, block.scale, begins=begins), buffers)
    if core.shared:
        _add_shared(made, core, block, layer)
    if joint:
        weights_of = f"layer.{layer}"
        made.add_normed(joint.own, layer, weights_of, "normed", "held")
        made.add_normed(joint.sum, layer, weights_of, "held", made.hidden, joint.rescale)


@dataclass(frozen=True)
class _Joint:
    """Norms of a block whose sum with the one before is normalised: of its own term, and of the sum."""

    own: Residual
    sum: Residual
    rescale: Vector | None

    @classmethod
    def of(cls, made: PassBuilder, block: Block, layer: int) -> _Joint | None:
        layout, shape = made.layout(layer), made.design.shape
        assert bool(block.post_norm) == bool(block.joint_norm)
        if not block.post_norm or not block.joint_norm:
            return None
        own, of_sum = (Norm.of(layout, name, shape) for name in (block.post_norm, block.joint_norm))
        assert own
        assert of_sum
        rescale = layout.vector(block.rescale) if block.rescale else None
        return cls(Residual(own, 1.0), Residual(of_sum, block.scale), rescale)


def _widen(design: Design, of: Mixture) -> Callable[[str], Built]:
    return lambda name: widen(name, of, design.tuning, design.chunk)


def _narrow(design: Design, of: Mixture, scale: float, *, begins: bool) -> Callable[[str], Built]:
    return lambda name: narrow(name, of, design.tuning, design.chunk, scale, begins=begins)


def _add_shared(made: PassBuilder, core: Experts, block: Block, layer: int) -> None:
    layout = made.layout(layer)
    inside = Epilogue("activate", round_up(core.shared, 32), activation=core.activation)
    factors = tuple(Factor.of(layout, name) for name in core.inputs[2:])
    made.multiply("gate-up", layer, Product("edge_shared_in", factors, inside), {"x": "normed", "out": "ffn"})
    share = (core.used + 1, core.used) if core.shared_has_share else None
    outside = Epilogue("add", made.design.shape.padded_hidden, block.scale, share=share)
    product = Product("edge_shared_out", (Factor.of(layout, core.outputs[1]),), outside)
    made.multiply("down", layer, product, {"x": "ffn", "out": made.hidden})

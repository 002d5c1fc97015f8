"""The core of a mixture of experts: ONNX Runtime's QMoE, or MoE for floats.

Their CPU kernels take gates and ups that alternate row by row, and mix by the softmax of the chosen logits. Other
shares are passed as logarithms, so that this softmax returns them; `scale`, and the sum of shares that are not
normalised, are applied afterwards.
"""

from __future__ import annotations

from typing import Any

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.forms import Blocks
from edge.backends.onnx.graph.nodes import INT8_ACTIVATIONS, MS
from edge.backends.onnx.graph.state import reshape
from edge.formats.blocks import BLOCK
from edge.model.cores import SLOPE, Experts

_NEVER = -1e30  # the logit of an expert that is not chosen


def experts(graph: Context, core: Experts, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the term added to the hidden states, [1, n, hidden]."""
    at = f"blk.{layer}."
    graph.begin("gate-up", layer)
    logits = reshape(graph, _logits(graph, core, at, graph.multiply(f"{at}ffn_gate_inp", x)), -1, core.number)
    inputs, attributes = [x, logits], dict[str, Any]()
    gates, downs = f"{at}{core.inputs[0]}", f"{at}{core.output}"
    for name, rows in ((gates, 2 * core.ffn), (downs, graph.spec.hidden)):
        matrix = graph.layout.matrices[name]
        bias = graph.weight(f"{name}.bias", (core.number, rows), "experts") if core.biases else ""
        if isinstance(matrix.form, Blocks):
            blocks = matrix.columns // BLOCK
            packed = (core.number, rows, matrix.columns * matrix.form.bits // 8)
            quants = graph.weight(f"{name}.quants", packed, "experts")
            inputs += [quants, graph.weight(f"{name}.scales", (core.number, rows, blocks), "experts"), bias]
            attributes["expert_weight_bits" if name == gates else "fc2_expert_weight_bits"] = matrix.form.bits
        else:
            inputs += [reshape(graph, graph.floats(name), core.number, rows, matrix.columns), bias]
    if attributes:
        attributes |= {"block_size": BLOCK, "weights_prepacked": 0, "accuracy_level": INT8_ACTIVATIONS}
    if core.clamp:
        attributes["swiglu_limit"] = core.clamp
    alpha, beta = (SLOPE, 1.0) if core.clamp else (1.0, 0.0)
    mixed = graph.node(
        "QMoE" if "block_size" in attributes else "MoE", *inputs, domain=MS, k=core.used, activation_type="swiglu",
        swiglu_fusion=1, activation_alpha=alpha, activation_beta=beta, normalize_routing_weights=1, **attributes,
    )  # fmt: skip
    if not core.normed:
        sums = graph.node("ReduceSum", graph.node("Exp", logits), graph.constant("last_axis", [-1]), keepdims=1)
        mixed = graph.node("Mul", mixed, reshape(graph, sums, 1, -1, 1))
    mixed = graph.scaled(mixed, core.scale)
    return graph.node("Add", mixed, _shared(graph, core, at, x)) if core.shared else mixed


def _logits(graph: Context, core: Experts, at: str, logits: str) -> str:
    """Logits whose largest values select the experts, and whose softmax over these gives their shares. If shares are
    not normalised, their logarithms, of the chosen alone."""
    if core.router == "softmax" and not core.choice_bias and core.normed:
        return logits
    sigmoid = core.router == "sigmoid"
    scores = graph.node("Sigmoid", logits) if sigmoid else logits
    if core.choice_bias:
        scores = graph.node("Add", scores, graph.weight(f"{at}exp_probs_b.bias"))
    if core.groups > 1:
        scores = _of_groups(graph, core, at, scores)
    best = f"{at}best"
    graph.emit("TopK", [scores, graph.constant(f"top {core.used}", [core.used])], [best, f"{at}chosen"], axis=-1)
    least = graph.node("ReduceMin", best, graph.constant("last_axis", [-1]), keepdims=1)
    shares = graph.node("Neg", graph.node("Softplus", graph.node("Neg", logits))) if sigmoid else logits
    if not sigmoid and not core.normed:
        shares = graph.node("LogSoftmax", logits, axis=-1)
    return graph.node("Where", graph.node("GreaterOrEqual", scores, least), shares, graph.number(_NEVER))


def _of_groups(graph: Context, core: Experts, at: str, scores: str) -> str:
    """The scores of a token's groups; the least number in the others."""
    last, apart = graph.constant("last_axis", [-1]), reshape(graph, scores, -1, core.groups, core.number // core.groups)
    two, used = f"{at}two", f"{at}groups"
    graph.emit("TopK", [apart, graph.constant("top 2", [2])], [two, f"{at}which two"], axis=-1)
    sums = graph.node("ReduceSum", two, last, keepdims=0)
    graph.emit(
        "TopK", [sums, graph.constant(f"top {core.groups_used}", [core.groups_used])], [used, f"{at}which groups"],
        axis=-1,
    )  # fmt: skip
    least = graph.node("ReduceMin", used, last, keepdims=1)
    seen = reshape(graph, graph.node("GreaterOrEqual", sums, least), -1, core.groups, 1)
    return reshape(graph, graph.node("Where", seen, apart, graph.number(_NEVER)), -1, core.number)


def _shared(graph: Context, core: Experts, at: str, x: str) -> str:
    """The output of the shared expert."""
    gate, up = (graph.multiply(f"{at}{name}", x) for name in ("ffn_gate_shexp", "ffn_up_shexp"))
    inner = graph.node("Mul", graph.node("QuickGelu", gate, domain=MS, alpha=1.0), up)
    added = graph.multiply(f"{at}ffn_down_shexp", inner)
    if not core.shared_gated:
        return added
    return graph.node("Mul", added, graph.node("Sigmoid", graph.multiply(f"{at}ffn_gate_inp_shexp", x)))

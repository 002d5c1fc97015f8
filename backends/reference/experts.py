"""A mixture of experts, token by token; the formula stands at `Experts`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import ACTIVATIONS, sigmoid
from edge.model.layers import SLOPE, Experts
from edge.types import FloatArray, IntArray


def experts(engine: Context, core: Experts, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to what is added to the hidden states, [n, hidden]: experts have matrices of
    their own behind their activations."""
    out = np.zeros_like(x)
    matrices = [
        engine.weights[at.name(name)].reshape(core.number, -1, columns)
        for name, columns in (("ffn_gate_exps", x.shape[1]), ("ffn_up_exps", x.shape[1]), ("ffn_down_exps", core.ffn))
    ]
    none = np.zeros((core.number, 1), np.float32)
    biases = [
        engine.weights[at.name(f"{name}.bias")].reshape(core.number, -1) if core.biases else none
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    ]
    chosen, shares = choose(engine, core, at, x)
    for token, row in enumerate(x):
        for expert, share in zip(chosen[token], shares[token], strict=True):
            (gate, up, down), (of_gate, of_up, of_down) = (
                [each[expert] for each in some] for some in (matrices, biases)
            )
            inner = _inner(core, gate @ row + of_gate, up @ row + of_up)
            out[token] += share * (down @ inner + of_down)
    if core.shared:
        inner = _inner(core, *(engine.project(x, at, name) for name in ("ffn_gate_shexp", "ffn_up_shexp")))
        added = engine.project(inner, at, "ffn_down_shexp")
        out += sigmoid(engine.project(x, at, "ffn_gate_inp_shexp")) * added if core.shared_gated else added
    return out


def _inner(core: Experts, gate: FloatArray, up: FloatArray) -> FloatArray:
    if not core.clamp:
        return np.asarray(ACTIVATIONS[core.activation](gate) * up)
    gate, up = np.minimum(gate, np.float32(core.clamp)), np.clip(up, -core.clamp, core.clamp)
    return np.asarray(gate * sigmoid(np.float32(SLOPE) * gate) * (up + 1))


def choose(engine: Context, core: Experts, at: At, x: FloatArray) -> tuple[IntArray, FloatArray]:
    """The experts of each token, in ascending order, and their shares: both [n, used]."""
    logits = engine.project(x, at, "ffn_gate_inp")
    values = sigmoid(logits) if core.router == "sigmoid" else np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = values if core.router == "sigmoid" else logits
    if core.choice_bias:
        scores = scores + engine.weights[at.name("exp_probs_b.bias")]
    chosen = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, : core.used], axis=1).astype(np.int32)
    shares = np.take_along_axis(values, chosen, axis=1)
    return chosen, shares * (np.float32(core.scale) / shares.sum(axis=1, keepdims=True))

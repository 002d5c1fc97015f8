"""A mixture of experts, token by token; the formula stands at `Experts`."""

from __future__ import annotations

import math

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import ACTIVATIONS, sigmoid
from edge.model.cores import SLOPE, Experts
from edge.types import FloatArray, IntArray

NAMES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def experts(engine: Context, core: Experts, at: At, x: FloatArray) -> FloatArray:
    """From the block's rows, [n, hidden], to the term added to the hidden states, [n, hidden]: each expert has an
    output projection of its own."""
    out = np.zeros_like(x)
    matrices, biases = (list(each) for each in zip(*(of_all(engine, core, at, name) for name in NAMES), strict=True))
    chosen, shares = choose(engine, core, at, x)
    x = expert_inputs(engine, core, at, x)
    for token, row in enumerate(x):
        for expert, share in zip(chosen[token], shares[token], strict=True):
            (gate, up, down), (of_gate, of_up, of_down) = (
                [each[expert] for each in some] for some in (matrices, biases)
            )
            inner = activated(core, gate @ row + of_gate, up @ row + of_up)
            out[token] += share * (down @ inner + of_down)
    if core.shared:
        out += of_shared(engine, core, at, x, shared_inner(engine, core, at, x))
    return out


def of_all(engine: Context, core: Experts, at: At, name: str) -> tuple[FloatArray, FloatArray]:
    """A matrix of every expert, [experts, rows, columns], and its bias, [experts, rows], or zeros."""
    columns = core.ffn if name == core.output else engine.spec.hidden
    matrices = engine.weights[at.name(name)].reshape(core.number, -1, columns)
    if not core.biases:
        return matrices, np.zeros((core.number, 1), np.float32)
    return matrices, engine.weights[at.name(f"{name}.bias")].reshape(core.number, -1)


def shared_inner(engine: Context, core: Experts, at: At, x: FloatArray) -> FloatArray:
    """The inner values of the shared expert, [n, shared]."""
    return activated(core, *(engine.project(x, at, name) for name in ("ffn_gate_shexp", "ffn_up_shexp")))


def of_shared(engine: Context, core: Experts, at: At, x: FloatArray, inner: FloatArray) -> FloatArray:
    """The output of the shared expert, [n, hidden]."""
    added = engine.project(inner, at, "ffn_down_shexp")
    return sigmoid(engine.project(x, at, "ffn_gate_inp_shexp")) * added if core.shared_gated else added


def activated(core: Experts, gate: FloatArray, up: FloatArray) -> FloatArray:
    if not core.clamp:
        return np.asarray(ACTIVATIONS[core.activation](gate) * up)
    gate, up = np.minimum(gate, np.float32(core.clamp)), np.clip(up, -core.clamp, core.clamp)
    return np.asarray(gate * sigmoid(np.float32(SLOPE) * gate) * (up + 1))


def expert_inputs(engine: Context, core: Experts, at: At, x: FloatArray) -> FloatArray:
    """The normalised rows that experts read, from the block's, [n, hidden]."""
    return engine.norm(x, at.name(core.norms[0])) if core.own_norms else x


def choose(engine: Context, core: Experts, at: At, x: FloatArray) -> tuple[IntArray, FloatArray]:
    """The experts of each token, in ascending order, and their shares: both [n, used]. x: the block's rows."""
    if core.own_norms:
        x = engine.norm(x, at.name(core.norms[1])) / np.float32(math.sqrt(x.shape[1]))
    logits = engine.project(x, at, "ffn_gate_inp")
    values = sigmoid(logits) if core.router == "sigmoid" else np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = values if core.router == "sigmoid" else logits
    if core.choice_bias:
        scores = scores + engine.weights[at.name("exp_probs_b.bias")]
    if core.groups > 1:
        scores = _of_groups(core, scores)
    chosen = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, : core.used], axis=1).astype(np.int32)
    shares = np.take_along_axis(values, chosen, axis=1)
    total = shares if core.normed else values
    of_one = core.normed or core.router == "softmax"
    shares = shares * (np.float32(core.scale) / (total.sum(axis=1, keepdims=True) if of_one else np.float32(1)))
    return chosen, shares * engine.weights[at.name("ffn_down_exps.scale")][chosen] if core.own_norms else shares


def _of_groups(core: Experts, scores: FloatArray) -> FloatArray:
    """The scores of a token's groups; -inf in the others."""
    apart = scores.reshape(len(scores), core.groups, -1)
    best = np.sort(apart, axis=-1)[..., -2:].sum(axis=-1)
    order = np.argsort(-best, axis=1, kind="stable")[:, : core.groups_used, None]
    used = (order == np.arange(core.groups)).any(axis=1)
    return np.where(used[..., None], apart, np.float32(-np.inf)).reshape(scores.shape)

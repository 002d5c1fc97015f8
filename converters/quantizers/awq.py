"""AWQ (arXiv:2306.00978): channels with large inputs get finer steps.

A matrix's columns are multiplied by s = mean|x|^α and its inputs divided by it, which changes nothing before rounding.
α is searched on a grid for the least output error on the calibration data. The division is folded into the producer of
the inputs: the preceding norm, the rows of attn_v for attn_output (query heads that share a KV head share its factors),
those of ffn_up for ffn_down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edge.backends.reference import read_weights
from edge.converters.quantizers.rtn import nearest
from edge.formats.blocks import BLOCK, Grid
from edge.formats.gguf import GGUFFile
from edge.model.cores import Attention, Dense, Experts
from edge.model.structure.layers import Block, Layer
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source
from edge.types import FloatArray

_STEPS = 10  # of α, from 0 to 1
_ROWS = 256  # rows, at least, of matrices that share inputs, on which factors are searched
_LEAST = 1e-4  # of mean |x|; a channel with a smaller mean counts as having this one


@dataclass
class Folds:
    """AWQ's factors by the names of `find_tensors`, float32."""

    columns: dict[str, FloatArray] = field(default_factory=dict)  # multiply the columns of matrices
    rows: dict[str, FloatArray] = field(default_factory=dict)  # divide the rows of matrices, and vectors

    def read(self, file: GGUFFile, sources: Mapping[str, Source]) -> dict[str, FloatArray]:
        """Read weights like `read_weights`, with the factors applied."""
        weights = read_weights(file, sources)
        for name in weights:
            if name in self.columns:
                factors = self.columns[name]  # of experts [experts, columns]
                each = np.repeat(factors, len(weights[name]) // len(factors), axis=0) if factors.ndim > 1 else factors
                weights[name] = weights[name] * each
            if name in self.rows:
                factors = self.rows[name]
                weights[name] = weights[name] / (factors[:, None] if weights[name].ndim == 2 else factors)
        return weights

    def add(self, names: Sequence[str], maker: str, spec: ModelSpec, factors: FloatArray) -> None:
        """Add the factors of matrices that multiply the output of the tensor `maker`."""
        self.columns |= dict.fromkeys(names, factors)
        if names[0].endswith("attn_output"):  # query heads of a group carry the same factors
            factors = factors.reshape(spec.kv_heads, -1, spec.head_dim)[:, 0].reshape(-1)
        self.rows |= {maker: factors.reshape(-1), f"{maker}.bias": factors.reshape(-1)}


def makers(layer: Layer) -> dict[str, tuple[str, ...]]:
    """Tensors of a layer whose rows can be divided, with the matrices that multiply their output.

    The output of an activation without a gate, or with a clamp, cannot be scaled, nor a norm that several blocks share,
    nor values that are normalised, or rows of another layer. Inputs of experts cannot, either: the router chooses by
    them.
    """
    shared = {block.norm for block in layer if block.beside}
    return {maker: names for block in layer for maker, names in _makers_of(block).items() if maker not in shared}


def _makers_of(block: Block) -> dict[str, tuple[str, ...]]:
    core, before = block.core, None
    if isinstance(core, Experts):
        pairs = zip(("ffn_up_exps", "ffn_up_shexp"), core.outputs, strict=False)
        return {} if core.clamp else {maker: (output,) for maker, output in pairs}
    if isinstance(core, Attention):
        before = None if core.unit_values or core.rows_of is not None else "attn_v"
    elif isinstance(core, Dense) and core.gated:
        before = "ffn_up"
    return ({block.norm: core.inputs} if block.norm else {}) | ({before: (core.output,)} if before else {})


def find_factors(
    names: Sequence[str], weights: Sequence[FloatArray], mean: FloatArray, hessian: FloatArray, spec: ModelSpec,
    grids: Sequence[Grid], group_size: int = BLOCK,
) -> FloatArray:  # fmt: skip
    """Find s, float32 [columns], for matrices that share inputs with this mean |x| and XᵀX. grids: one a matrix."""
    size = np.maximum(mean, _LEAST).astype(np.float64)
    if names[0].endswith("attn_output"):
        groups = size.reshape(spec.kv_heads, -1, spec.head_dim)
        size = np.broadcast_to(groups.mean(axis=1, keepdims=True), groups.shape).reshape(-1)
    ones = np.ones(len(size), np.float32)
    stride = max(1, sum(map(len, weights)) // _ROWS)
    weights = [weight[::stride] for weight in weights]
    best, chosen = np.inf, ones
    for step in range(_STEPS):
        factors = size ** (step / _STEPS)
        factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
        loss = 0.0
        for weight, grid in zip(weights, grids, strict=True):
            rounded = nearest(weight * factors, grid, ones, group_size, shrinks=(1.0,)).values / factors
            loss += output_error(weight, rounded, hessian)
        if loss < best:
            best, chosen = loss, factors
    return chosen


def output_error(weight: FloatArray, rounded: FloatArray, hessian: FloatArray) -> float:
    """The squared error of all outputs, averaged over tokens: tr(ΔHΔᵀ)."""
    error = rounded - weight
    return float(np.einsum("rc,rc->", error @ hessian, error))

"""The context in which a core adds its operations: the function's inputs, and operations that all blocks share."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813
from coremltools.converters.mil.mil import types

from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.graph.static import residual_factor
from edge.converters.coreml.weights import Constant, Constants
from edge.model.structure.layers import Network

_LEAST_DIVISOR = 1e-2  # of a norm: the squares of smaller values are far below epsilon · 10^4
_DATA_TYPES = {(4, False): types.int4, (4, True): types.uint4, (8, False): types.int8, (8, True): types.uint8}

Value = Any  # a `Var` of coremltools, which has no types


class ConstantValues:
    """Constants as values of the function under construction; both functions share the arrays."""

    def __init__(self, constants: Constants, layout: Layout) -> None:
        self._constants, self._layout = constants, layout
        self._read: dict[str, Constant] = {}

    def matrix(self, name: str) -> Value:
        constant = self._constant(name)
        if constant.scales is None:
            return shared(name, constant.data)
        kind = _DATA_TYPES[constant.bits, constant.offsets is not None]
        parts = {
            "data": shared(f"{name}.data", constant.data.view(types.nptype_from_builtin(kind))),
            "scale": shared(f"{name}.scale", constant.scales),
        }
        if constant.offsets is not None:
            parts["offset"] = shared(f"{name}.offset", constant.offsets)
        return mb.constexpr_blockwise_shift_scale(**parts, name=plain(name))

    def vector(self, name: str) -> Value:
        return shared(name, self._constant(name).data)

    def _constant(self, name: str) -> Constant:
        if name not in self._read:
            is_matrix = name in self._layout.matrices
            self._read[name] = self._constants.matrix(name) if is_matrix else self._constants.vector(name)
        return self._read[name]


class Context:
    """A function under construction.

    rows: of the cache. inputs, masks, angles: by name, ready for attention. kept: new keys and values of the layers so
    far.
    """

    def __init__(self, weights: ConstantValues, layout: Layout, network: Network, rows: int, tokens: int) -> None:
        self.weights, self.layout, self.network = weights, layout, network
        self.rows, self.tokens = rows, tokens
        self.factor = residual_factor(network)
        self.inputs: dict[str, Value] = {}
        self.masks: dict[str, Value] = {}
        self.angles: dict[str, Value] = {}
        self.kept: list[Value] = []

    def multiply(self, name: str, x: Value) -> Value:
        bias, rows = f"{name}.bias", self.layout.matrices[name].rows
        has_bias = bias in self.layout.vectors
        # Without one, coremltools would make zeros of its own in each function.
        shift = self.weights.vector(bias) if has_bias else shared(f"zeros.{rows}", np.zeros(rows, np.float16))
        return mb.linear(x=x, weight=self.weights.matrix(name), bias=shift)

    def norm(self, x: Value, name: str, factor: float = 1.0, *, of_residual: bool = False) -> Value:
        """RMS norm or layer norm over the last axis: x / m over √(mean((x / m)²) + ε / m²), with m the largest |x|.

        factor: of the result. of_residual: x is the residual stream, which has a factor of its own.
        """
        if self.network.norm == "layer":
            x = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
        largest = mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True)
        largest = mb.maximum(x=largest, y=half(_LEAST_DIVISOR))
        small = mb.real_div(x=x, y=largest)
        root_epsilon = self.network.norm_eps**0.5 * (self.factor if of_residual else 1.0)
        epsilon = mb.square(x=mb.real_div(x=half(root_epsilon), y=largest))
        mean = mb.reduce_mean(x=mb.square(x=small), axes=[-1], keep_dims=True)
        root = scaled(mb.sqrt(x=mb.add(x=mean, y=epsilon)), 1 / factor)
        normed = mb.mul(x=mb.real_div(x=small, y=root), y=self.weights.vector(name))
        shift = f"{name}.bias"
        return mb.add(x=normed, y=self.weights.vector(shift)) if shift in self.layout.vectors else normed


def table_names(kind: int) -> tuple[str, str]:
    return (f"cos_{kind}", f"sin_{kind}") if kind else ("cos", "sin")


def mask_name(window: int) -> str:
    return f"mask_{window}" if window else "mask"


def plain(name: str) -> str:
    """A valid name of a value: letters, digits and underscores."""
    return name.replace(".", "_")


def shared(name: str, values: Any) -> Value:
    """A constant that both functions store once."""
    constant = mb.const(val=values, name=plain(name))
    constant.op.weight_id = name
    return constant


def half(value: float) -> Any:
    return np.float16(value)


def scaled(x: Value, by: float) -> Value:
    return x if by == 1 else mb.mul(x=x, y=half(by))


def soft_cap(x: Value, cap: float) -> Value:
    """cap · tanh(x / cap); x itself without a cap."""
    return mb.mul(x=mb.tanh(x=mb.real_div(x=x, y=half(cap))), y=half(cap)) if cap else x

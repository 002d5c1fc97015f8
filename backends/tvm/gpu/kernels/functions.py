"""Scalar functions between a model's matrices: activations and soft caps."""

from __future__ import annotations

import math
from functools import reduce as fold

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.kernels.threads import Value, f32, hold, select

_LARGEST = 80.0  # |exponents| beyond which e^z would not be finite


def silu(x: Value) -> Value:
    """x / (1 + e^−x)."""
    x = hold(x)
    return x / (f32(1.0) + _exp(f32(0.0) - x))


def gelu(x: Value) -> Value:
    """The tanh form: x / 2 · (1 + tanh z) = x / (1 + e^−2z), z = √(2/π) · (x + 0.044715 x³)."""
    x = hold(x)
    return x / (f32(1.0) + _exp(f32(-2 * math.sqrt(2 / math.pi)) * (x + f32(0.044715) * x * x * x)))


def gelu_erf(x: Value) -> Value:
    """x / 2 · (1 + erf(x / √2)), as the CPU's `functions.gelu_erf` computes it, to 1.5e-7."""
    x = hold(x)
    z = hold(T.abs(x) * f32(math.sqrt(0.5)))
    t = hold(f32(1.0) / (f32(1.0) + f32(_ERFC_P) * z))
    series = fold(lambda sum_, factor: (sum_ + f32(factor)) * t, reversed(_ERFC), f32(0.0))
    part = hold(x * f32(0.5) * series * _exp(f32(0.0) - z * z))
    return select(x < f32(0.0), part, x - part)


_ERFC_P, _ERFC = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def sigmoid(x: Value) -> Value:
    """1 / (1 + e^−x)."""
    return f32(1.0) / (f32(1.0) + _exp(f32(0.0) - x))


def softplus(x: Value) -> Value:
    """log(1 + e^x) = max(x, 0) + log(1 + e^−|x|)."""
    x = hold(x)
    return T.max(x, f32(0.0)) + T.log(f32(1.0) + _exp(f32(0.0) - T.abs(x)))


def relu2(x: Value) -> Value:
    """max(x, 0)²."""
    x = hold(T.max(x, f32(0.0)))
    return x * x


def soft_cap(x: Value, cap: float) -> Value:
    """cap · tanh(x / cap), tanh z = 1 − 2 / (1 + e^2z); x itself where cap is 0."""
    return f32(cap) - f32(2 * cap) / (f32(1.0) + _exp(x * f32(2 / cap))) if cap else x


def _exp(x: Value) -> Value:
    """exp, clamped to finite values: languages promise nothing for infinities, and float32 results do not change."""
    return T.exp(T.max(T.min(x, f32(_LARGEST)), f32(-_LARGEST)))


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_erf": gelu_erf, "relu2": relu2}

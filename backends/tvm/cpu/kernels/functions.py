"""Functions of vectors that models apply between their matrices."""

from __future__ import annotations

import math

from edge.backends.tvm.cpu.kernels.lanes import Value, exp, floats, let


def silu(x: Value) -> Value:
    """x / (1 + e^−x)."""
    return x / (floats(1) + exp(floats(0) - x))


def gelu(x: Value) -> Value:
    """Its tanh form, x / 2 · (1 + tanh z) = x / (1 + e^−2z), z = √(2/π) · (x + 0.044715 x³)."""
    x = let(x)
    return x / (floats(1) + exp(floats(-2 * math.sqrt(2 / math.pi)) * (x + floats(0.044715) * x * x * x)))


def soft_cap(x: Value, cap: float) -> Value:
    """cap · tanh(x / cap), tanh z = 1 − 2 / (1 + e^2z); x itself where cap is 0."""
    return floats(cap) - floats(2 * cap) / (floats(1) + exp(x * floats(2 / cap))) if cap else x


ACTIVATIONS = {"silu": silu, "gelu": gelu}

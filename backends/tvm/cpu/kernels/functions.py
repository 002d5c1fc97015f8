"""The functions between a model's matrices: norms of rows, activation functions and soft caps."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.vectors import (
    LANES,
    Buffer,
    Register,
    Value,
    exp,
    floats,
    i64,
    let,
    load,
    loop,
    spread,
    store,
    total,
)

# Norms: RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450). Rows are padded to whole vectors; the padding of
# values, weights and biases is zero.


def rms_norm(
    source: Buffer, start: Value, weights: Buffer, weight: Value, _bias: Value | None, width: int, padded: int,
    epsilon: float, out: Buffer, out_at: Value,
) -> None:  # fmt: skip
    """x / sqrt(mean(x²) + ε) · weight."""
    scale = rms_scale(source, start, width, padded, epsilon)
    with loop(i64(0), i64(padded // 16)) as part:
        x = load(source, start + part * 16) * spread(scale)
        store(out, out_at + part * 16, x * load(weights, weight + part * 16))


def rms_scale(source: Buffer, start: Value, width: int, padded: int, epsilon: float) -> Value:
    """1 / sqrt(mean(x²) + ε) of a row."""
    mean = _sum(padded, lambda at: _squared(load(source, start + at))) * T.float32(1 / width)
    return let(T.float32(1) / T.sqrt(mean + T.float32(epsilon)))


def layer_norm(
    source: Buffer, start: Value, weights: Buffer, weight: Value, bias: Value | None, width: int, padded: int,
    epsilon: float, out: Buffer, out_at: Value,
) -> None:  # fmt: skip
    """(x − mean) / sqrt(mean((x − mean)²) + ε) · weight + bias."""
    mean = let(_sum(padded, lambda at: load(source, start + at)) * T.float32(1 / width))
    squares = _sum(padded, lambda at: _squared(load(source, start + at) - spread(mean)))
    squares = squares - mean * mean * T.float32(padded - width)  # the padding's part
    scale = let(T.float32(1) / T.sqrt(squares * T.float32(1 / width) + T.float32(epsilon)))
    with loop(i64(0), i64(padded // 16)) as part:
        x = (load(source, start + part * 16) - spread(mean)) * spread(scale) * load(weights, weight + part * 16)
        store(out, out_at + part * 16, x if bias is None else x + load(weights, bias + part * 16))


NORMS = {"rms": rms_norm, "layer": layer_norm}


def _sum(padded: int, term: Callable[[Value], Value]) -> Value:
    sums = Register()
    sums.value = floats(0)
    with loop(i64(0), i64(padded // 16)) as part:
        sums.value = sums.value + term(part * 16)
    return total(sums.value)


def _squared(x: Value) -> Value:
    x = let(x)
    return x * x


# Activation functions and soft caps, of vectors.


def sigmoid(x: Value, lanes: int = LANES) -> Value:
    """1 / (1 + e^−x)."""
    return floats(1, lanes) / (floats(1, lanes) + exp(floats(0, lanes) - x, lanes))


def softplus(x: Value, lanes: int = LANES) -> Value:
    """log(1 + e^x) = max(x, 0) + log(1 + e^−|x|); the logarithm by the series of 2 artanh(z), z = t / (2 + t) ≤ 1/3."""
    x = let(x)
    power = Register(lanes=lanes)  # TVM would write an expression that reads no memory wherever its name stands
    power.value = exp(floats(0, lanes) - T.max(x, floats(0, lanes) - x), lanes)
    z = let(power.value / (floats(2, lanes) + power.value))
    square, series = let(z * z), floats(1 / 15, lanes)
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + floats(1 / odd, lanes)
    return T.max(x, floats(0, lanes)) + floats(2, lanes) * z * series


def silu(x: Value) -> Value:
    """x / (1 + e^−x)."""
    return x / (floats(1) + exp(floats(0) - x))


def gelu(x: Value) -> Value:
    """Its tanh form, x / 2 · (1 + tanh z) = x / (1 + e^−2z), z = √(2/π) · (x + 0.044715 x³)."""
    x = let(x)
    return x / (floats(1) + exp(floats(-2 * math.sqrt(2 / math.pi)) * (x + floats(0.044715) * x * x * x)))


def gelu_erf(x: Value) -> Value:
    """x / 2 · (1 + erf(x / √2)): with z = |x| / √2, x / 2 · erfc(z) below 0 and x less that above. erfc(z) is a
    polynomial of 1 / (1 + p z) times e^(−z²) (Abramowitz and Stegun, 7.1.26), to 1.5e-7."""
    x = let(x)
    z = let(T.max(x, floats(0) - x) * floats(math.sqrt(0.5)))
    t, series = let(floats(1) / (floats(1) + floats(_ERFC_P) * z)), floats(0)
    for factor in reversed(_ERFC):
        series = (series + floats(factor)) * t
    part = let(x * floats(0.5) * series * exp(floats(0) - z * z))
    return T.Select(x < floats(0), part, x - part)


_ERFC_P, _ERFC = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def relu2(x: Value) -> Value:
    """max(x, 0)²."""
    return _squared(T.max(x, floats(0)))


def soft_cap(x: Value, cap: float) -> Value:
    """cap · tanh(x / cap), tanh z = 1 − 2 / (1 + e^2z); x itself where cap is 0."""
    return floats(cap) - floats(2 * cap) / (floats(1) + exp(x * floats(2 / cap))) if cap else x


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_erf": gelu_erf, "relu2": relu2}

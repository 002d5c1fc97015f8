"""Norms of a row: RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450).

Values beyond a row's width, up to a whole vector, are zero, and so are weights and biases there.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.lanes import (
    Buffer,
    Register,
    Value,
    floats,
    i64,
    let,
    load,
    loop,
    spread,
    store,
    total,
)


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
    squares = squares - mean * mean * T.float32(padded - width)  # what the zeros behind the row have added
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

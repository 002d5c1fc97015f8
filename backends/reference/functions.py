"""Formulas that several cores use; all arrays are float32."""

from __future__ import annotations

import math

import numpy as np

from edge.types import FloatArray


def silu(x: FloatArray) -> FloatArray:
    return np.asarray(x / (1 + np.exp(-x)))


def sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-x)))


def softplus(x: FloatArray) -> FloatArray:
    return np.asarray(np.logaddexp(x, np.float32(0)))


def gelu(x: FloatArray) -> FloatArray:
    """In its tanh form."""
    return np.asarray(x * np.float32(0.5) * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3))))


def gelu_erf(x: FloatArray) -> FloatArray:
    """x / 2 · (1 + erf(x / √2))."""
    return np.asarray(x * np.float32(0.5) * (1 + _erf(x * np.float32(math.sqrt(0.5)))))


_erf = np.vectorize(math.erf, otypes=[np.float32])


def relu2(x: FloatArray) -> FloatArray:
    return np.asarray(np.square(np.maximum(x, np.float32(0))))


def soft_cap(x: FloatArray, cap: float) -> FloatArray:
    return np.asarray(cap * np.tanh(x / np.float32(cap))) if cap else x


def softmax(x: FloatArray) -> FloatArray:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def convolve(before: FloatArray, x: FloatArray, taps: FloatArray) -> FloatArray:
    """A causal convolution of each channel of x, [n, channels], with taps [channels, kernel].

    before: the last inputs before x, [kernel − 1, channels], which become those of x.
    """
    inputs = np.concatenate([before, x])
    before[:] = inputs[len(x) :]
    return np.asarray(sum((inputs[j : j + len(x)] * taps[:, j] for j in range(taps.shape[1])), np.float32(0)))


def rms(x: FloatArray, eps: float) -> FloatArray:
    """Over the last axis, without weights."""
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)))


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_erf": gelu_erf, "relu2": relu2}

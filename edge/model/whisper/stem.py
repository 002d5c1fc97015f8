"""What Whisper's encoders have before their layers: two convolutions of three taps, the second of every other frame."""

from __future__ import annotations

import numpy as np

from edge.records import dataclass
from edge.types import FloatArray

_ROWS = 64  # whose values stay in the processor's cache
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


@dataclass(frozen=True)
class Stem:
    """Two convolutions, each with GELU, and positions. taps: [3 · inputs, outputs] of each, with the inputs of one tap
    side by side. biases: [outputs]. positions: [n, outputs]."""

    taps: tuple[FloatArray, ...]
    biases: tuple[FloatArray, ...]
    positions: FloatArray

    def rows(self, mel: FloatArray) -> FloatArray:
        """From a spectrogram, [mels, frames], to the encoder's rows, [frames / 2, hidden]."""
        x = mel.T
        for stride, taps, bias in zip((1, 2), self.taps, self.biases, strict=True):
            x = _convolve(x, taps, bias, stride)
            gelu(x)
        return np.asarray(x + self.positions[: len(x)])


def _convolve(x: FloatArray, taps: FloatArray, bias: FloatArray, stride: int) -> FloatArray:
    """[n, inputs] to [n / stride, outputs], with zeros around x."""
    width = x.shape[1]
    around = np.zeros((len(x) + 2, width), np.float32)
    around[1:-1] = x
    count = (len(x) - 1) // stride + 1
    windows = np.lib.stride_tricks.as_strided(
        around, (count, 3 * width), (stride * width * 4, 4), writeable=False
    )  # rows of `around` overlap
    return np.asarray(windows @ taps + bias)


def gelu(x: FloatArray) -> None:
    """x · Φ(x) in place, a few rows at a time; erf by Abramowitz and Stegun, 7.1.26, to 1.5e-7."""
    for at in range(0, len(x), _ROWS):
        part = x[at : at + _ROWS]
        size = np.abs(part) * np.float32(0.5**0.5)
        t = 1 / (1 + np.float32(0.3275911) * size)
        series = np.zeros_like(t)
        for term in _ERF:
            series = (series + np.float32(term)) * t
        tail = series * np.exp(-size * size)  # 1 − erf
        part *= np.where(part < 0, tail, 2 - tail) * np.float32(0.5)

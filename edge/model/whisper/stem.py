"""What Whisper's encoders have before their layers: two convolutions of three taps, the second of every other frame."""

from __future__ import annotations

import numpy as np

from edge.records import dataclass
from edge.types import FloatArray

_ROWS = 256  # of the result that are made at a time
_VALUES = 1 << 14  # which stay in the processor's cache
_ERF = tuple(map(np.float32, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)))


@dataclass(frozen=True)
class Stem:
    """Two convolutions, each with GELU, and positions. taps: [3 · inputs, outputs] of each, with the inputs of one tap
    side by side. biases: [outputs]. positions: [n, outputs]."""

    taps: tuple[FloatArray, ...]
    biases: tuple[FloatArray, ...]
    positions: FloatArray

    def rows(self, mel: FloatArray) -> FloatArray:
        """From a spectrogram, [mels, frames], to the encoder's rows, [frames / 2, hidden]."""
        frames, width = mel.shape[1], self.positions.shape[1]
        around = np.zeros((frames + 2, len(mel)), np.float32)
        around[1:-1] = mel.T
        found = np.empty((-(-frames // 2), width), np.float32)
        for start in range(0, len(found), _ROWS):
            stop = min(start + _ROWS, len(found))
            first, last = max(0, 2 * start - 1), min(frames, 2 * stop)  # rows between the convolutions
            held = np.zeros((2 * (stop - start) + 1, width), np.float32)
            inner = held[first - (2 * start - 1) :][: last - first]
            _convolve(around[first : last + 2], self.taps[0], self.biases[0], 1, inner)
            _convolve(held, self.taps[1], self.biases[1], 2, found[start:stop])
        found += self.positions[: len(found)]
        return found


def _convolve(x: FloatArray, taps: FloatArray, bias: FloatArray, stride: int, out: FloatArray) -> None:
    """From [stride · (n - 1) + 3, inputs] to [n, outputs], with GELU."""
    width = x.shape[1]
    windows = np.lib.stride_tricks.as_strided(
        x, (len(out), 3 * width), (stride * width * 4, 4), writeable=False
    )  # rows of x overlap
    np.matmul(windows, taps, out=out)
    out += bias
    gelu(out)


def gelu(x: FloatArray) -> None:
    """x · Φ(x) in place, some values at a time: max(x, 0) less |x| / 2 · erfc(|x| / √2), the latter by Abramowitz and
    Stegun, 7.1.26, to 1.5e-7."""
    flat = x.reshape(-1)
    arrays = [np.empty(min(_VALUES, flat.size), np.float32) for _ in range(3)]
    for at in range(0, flat.size, _VALUES):
        part = flat[at : at + _VALUES]
        size, t, series = (each[: part.size] for each in arrays)
        np.abs(part, out=size)
        np.multiply(size, np.float32(0.3275911 * 0.5**0.5), out=t)
        t += 1
        np.reciprocal(t, out=t)
        np.multiply(t, _ERF[0], out=series)
        for term in _ERF[1:]:
            series += term
            series *= t
        series *= size
        np.square(size, out=t)
        t *= np.float32(-0.5)
        np.exp(t, out=t)
        series *= t
        series *= np.float32(0.5)
        np.maximum(part, 0, out=part)
        part -= series

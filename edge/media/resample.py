"""Resampling of sound in pieces, by a sinc under a Kaiser window (J. O. Smith, "Digital Audio Resampling")."""

from __future__ import annotations

from math import ceil, gcd

import numpy as np

from edge.types import AnyArray, FloatArray

ZEROS = 32  # zero crossings of the sinc on each side
BETA = 9.0  # of the Kaiser window: 90 dB
CUTOFF = 0.93  # of the lower Nyquist frequency
PHASES = 512  # filters at most: of a ratio of larger numbers the nearest is taken, an error of -70 dB
_AT_ONCE = 2000  # outputs whose windows exist at the same time: 2 MB of those from 44.1 kHz


class Resampler:
    """From one rate to another. `push` returns what can be computed so far; `end` the rest."""

    def __init__(self, rate: int, to: int) -> None:
        """rate, to: samples per second."""
        self._up, self._down = to // gcd(rate, to), rate // gcd(rate, to)
        scale = min(1.0, to / rate)
        reach = ceil(ZEROS / scale)
        self._phases = min(self._up, PHASES)
        shifts = np.arange(self._phases + 1)[:, None] / self._phases  # the last: one sample on
        self._filters = _filters(np.arange(1 - reach, reach + 1) - shifts, reach, scale)
        self._reach = reach
        self._held: FloatArray = np.zeros(reach - 1, np.float32)  # of the source
        self._first = 1 - reach  # the place of the first of them
        self._read = self._made = 0

    def push(self, samples: FloatArray) -> FloatArray:
        """samples: the next of the source, float32 [n]."""
        self._read += samples.size
        return self._make(samples, (self._read - self._reach) * self._up // self._down)

    def end(self) -> FloatArray:
        """The samples that the end of the source allows."""
        return self._make(np.zeros(self._reach + 1, np.float32), -(-self._read * self._up // self._down))

    def _make(self, samples: FloatArray, until: int) -> FloatArray:
        """Outputs up to number `until`. Output n is at source sample n·down / up."""
        self._held = np.concatenate([self._held, samples])
        made = np.empty(max(0, until - self._made), np.float32)
        if made.size:
            windows = np.lib.stride_tricks.sliding_window_view(self._held, 2 * self._reach)
        for start in range(0, made.size, _AT_ONCE):
            numbers = np.arange(self._made + start, self._made + min(start + _AT_ONCE, made.size), dtype=np.int64)
            places, parts = np.divmod(numbers * self._down, self._up)
            weights = self._filters[(parts * self._phases + self._up // 2) // self._up]
            places -= self._first + self._reach - 1
            np.einsum("nt,nt->n", windows[places], weights, out=made[start : start + numbers.size])
        self._made += made.size
        done = self._made * self._down // self._up - (self._first + self._reach - 1)
        self._held, self._first = self._held[max(0, done) :], self._first + max(0, done)
        return made


def _filters(distances: AnyArray, reach: int, scale: float) -> FloatArray:
    """Weights of the samples around an output, by their distances from it, [filters, taps]. Those of a filter add up to
    1, so that a constant stays."""
    window = np.i0(BETA * np.sqrt(np.maximum(0.0, 1 - (distances / reach) ** 2)))
    weights = np.sinc(distances * scale * CUTOFF) * window
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)

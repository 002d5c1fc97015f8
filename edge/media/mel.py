"""Whisper's spectrogram: the logarithm of 80 or 128 mel bands every 10 ms, as `audio.py` of openai-whisper has it."""

from __future__ import annotations

from functools import cache

import numpy as np

from edge.types import FloatArray

RATE = 16000  # samples per second
HOP = 160  # samples between two frames: 10 ms
WINDOW = 400  # samples of a frame: 25 ms
FRAMES = 3000  # of a window of the model: 30 s
_AT_ONCE = 64  # frames whose spectra exist at the same time, in the processor's cache


def mel_power(samples: FloatArray, mels: int) -> FloatArray:
    """The power in mel bands, float32 [mels, frames].

    samples: float32 [WINDOW - HOP + HOP·frames]; the middle of the first frame is at sample WINDOW / 2.
    """
    frames = (samples.size - WINDOW + HOP) // HOP
    rows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)  # periodic
    filters, found = mel_filters(mels), np.empty((mels, frames), np.float32)
    for start in range(0, frames, _AT_ONCE):
        spectra = np.fft.rfft(rows[start : start + _AT_ONCE] * hann)
        power = np.square(spectra.real)
        power += np.square(spectra.imag)
        found[:, start : start + _AT_ONCE] = filters @ power.astype(np.float32, copy=False).T
    return found


def log_mel(power: FloatArray) -> FloatArray:
    """The model's input of a window: at most 80 dB below its loudest, scaled to about -1 … 1. power is overwritten."""
    np.maximum(power, 1e-10, out=power)
    np.log10(power, out=power)
    if power.size:
        np.maximum(power, power.max() - 8.0, out=power)
    power += 4.0
    power /= 4.0
    return power


@cache
def mel_filters(mels: int) -> FloatArray:
    """Triangles over the 201 frequencies of a spectrum, float32 [mels, 201], equally spaced on Slaney's mel scale
    (linear to 1 kHz, logarithmic above: 27 mels for a factor of 6.4), each of area 1."""
    top = 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4)
    points = np.linspace(0.0, top, mels + 2)
    hertz = np.where(points < 15, points * 200 / 3, 1000 * np.exp((points - 15) * np.log(6.4) / 27))
    lower, middle, upper = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    frequencies = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)
    triangles = np.minimum((frequencies - lower) / (middle - lower), (upper - frequencies) / (upper - middle))
    return np.asarray(np.maximum(0.0, triangles) * 2 / (upper - lower), np.float32)

"""The spectrogram of a whole sound, as transformers' feature extractors make it for encoders such as Whisper's."""

from __future__ import annotations

import numpy as np

from edge.media.mel import HOP, WINDOW, log_mel, mel_power
from edge.media.recording import Sound
from edge.types import FloatArray

_AROUND = WINDOW // 2  # samples that the first and the last frame see beside theirs; reflected


def spectrogram(sound: Sound, mels: int, samples: int) -> FloatArray:
    """Float32 [mels, samples / HOP] of a sound with silence behind it. samples: of both, at least 2 · HOP."""
    padded = np.zeros(samples + 2 * _AROUND, np.float32)
    sound.read(padded[_AROUND : _AROUND + samples])
    padded[:_AROUND] = padded[2 * _AROUND : _AROUND : -1]
    padded[_AROUND + samples :] = padded[samples + _AROUND - 2 : samples - 2 : -1]
    return log_mel(mel_power(padded[: WINDOW - HOP + samples // HOP * HOP], mels))


def sinusoids(count: int, width: int) -> FloatArray:
    """Positions as Whisper's, float32 [count, width]: sines, then cosines."""
    pace = np.exp(-np.log(10000) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(count)[:, None] * pace
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)

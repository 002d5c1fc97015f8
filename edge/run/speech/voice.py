"""Where a sound may hold speech: frames that rise above the noise around them. Silence is not asked for words, since
Whisper answers it with some."""

from __future__ import annotations

import numpy as np

from edge.media.mel import HOP
from edge.types import AnyArray, FloatArray

FLOOR = -60.0  # dB of full scale: what is below is silence
ABOVE = 6.0  # dB above the noise; noise of constant loudness stays within 2 dB in frames of 10 ms
NOISE = 10  # per cent of the frames: those are taken for noise
LOUD_NOISE = -30.0  # dB: what is louder counts as speech, also if nothing is quieter
SHORTEST = 8  # frames: 80 ms; clicks are shorter
JOINED = 30  # frames between two voices that belong together
CLICK = 3  # frames: what joins a short voice is longer


def voices(samples: FloatArray) -> list[tuple[int, int]]:
    """The stretches that may hold speech, by their first frame and the one behind the last; a frame has 10 ms."""
    loud = _loud(samples)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loud.astype(np.int8), [0]])))
    found = list[tuple[int, int]]()
    for start, end in edges.reshape(-1, 2).tolist():
        near = found and start - found[-1][1] <= JOINED
        if near and (found[-1][1] - found[-1][0] >= SHORTEST or end - start >= CLICK):
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return [(start, end) for start, end in found if end - start >= SHORTEST]


def _loud(samples: FloatArray) -> AnyArray:
    frames = samples[: samples.size // HOP * HOP].reshape(-1, HOP)
    if not len(frames):
        return np.zeros(0, bool)
    centered = frames - frames.mean(axis=1, keepdims=True)
    level = 10 * np.log10(np.square(centered).mean(axis=1) + 1e-12)
    place, beyond = divmod((level.size - 1) * NOISE, 100)  # np.percentile would import 2 MB
    places = [place, min(place + 1, level.size - 1)]
    lower, upper = np.partition(level, places)[places]
    noise = float(lower + (upper - lower) * beyond / 100)
    return np.asarray(level > max(FLOOR, min(noise + ABOVE, LOUD_NOISE)))

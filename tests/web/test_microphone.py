"""The microphone of the chat page, in a Chromium whose microphone is a file."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from browser import Page, complaints, press, show, until
from chat_server import Script, chat_server
from conftest import chromium

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


def speak(page: Page, seconds: float) -> None:
    """Record so many seconds, with the keyboard alone."""
    page.value(f"{BUTTON}.focus()")
    press(page, "Enter", text="\r")
    until(page, f"{LABEL} === 'End the recording'")
    page.value(f"new Promise((done) => setTimeout(done, {1000 * seconds}))")
    press(page, "Enter", text="\r")


def sound_of(form: bytes) -> tuple[FloatArray, int]:
    """Samples and rate of the WAV in a form."""
    with wave.open(io.BytesIO(form[form.index(b"RIFF") :])) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32)
        return samples / 32768, sound.getframerate()


def test_what_was_said_is_typed(tmp_path: Path) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(48000) / 48000).astype(np.float32)
    busy = {"status": 429, "message": "the queue is full"}
    with listening(tmp_path, tone, 48000, "--host-resolver-rules=MAP phone.test 127.0.0.1") as page, \
            chat_server() as (url, script):  # fmt: skip
        check_where_it_is_shown(page, url, script)
        allow(page, url, "granted")
        script.heard = ["Hello there.", "And you?", "", busy]
        speak(page, 0.5)
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

"""A site whose model sees, in Chromium: pictures that are chosen on the page, or taken by its camera, are answered
about, and offline, too. And one whose model hears sounds in prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Page, show, until
from conftest import GOLDEN, NEEDS_WASM, chromium
from golden.sounds import SHORT, chirp
from test_microphone import allow
from test_web_page import LAST, READY, RECORD
from web_site import served, site_of

pytestmark = [pytest.mark.slow, NEEDS_WASM]

EYES = GOLDEN / "eyes"
ASKED = """(async () => {
  const { Edge } = await import(new URL('edge/index.js', location.href));
  const session = await Edge.open('./');
  const image = new ImageData(new Uint8ClampedArray(PIXELS), WIDTH, HEIGHT);
  await session.image(image);
  const tokens = await session.imageTokens(WIDTH, HEIGHT);
  await session.ask('What is in the picture?', { temperature: 0, maxTokens: 1, ignoreEos: true });
  const found = [session.info.sees, tokens, session.report.promptTokens];
  await session.close();
  return found;
})()"""
PLAYED = """(async () => {
  const { Edge } = await import(new URL('edge/index.js', location.href));
  const session = await Edge.open('./');
  const samples = new Float32Array(SAMPLES);
  await session.sound(samples, { rate: 16000 });
  const tokens = await session.soundTokens(samples.length, { rate: 16000 });
  await session.ask('What is heard?', { temperature: 0, maxTokens: 1, ignoreEos: true });
  const refused = await session.image(new ImageData(8, 8)).catch((error) => error.code);
  const found = [session.info.sounds, session.info.sees, tokens, session.report.promptTokens, refused];
  await session.close();
  return found;
})()"""
CHOOSE = """(async () => {
  const canvas = new OffscreenCanvas(44, 30);
  const context = canvas.getContext('2d');
  context.fillStyle = '#c33';
  context.fillRect(4, 4, 20, 12);
  const files = new DataTransfer();
  files.items.add(new File([await canvas.convertToBlob()], 'photo.png', { type: 'image/png' }));
  const input = document.querySelector('input[type=file]');
  input.files = files.files;
  input.dispatchEvent(new Event('change'));
})()"""
ASK = """(() => {
  const text = document.querySelector('#ask textarea');
  text.value = 'What is it?';
  document.getElementById('ask').requestSubmit();
})()"""


CAMERA = "document.querySelector('#ask .camera')"
TAKE = "document.querySelector('dialog.taking .main')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page with a camera, whose pictures Chromium draws."""
    with chromium(tmp_path_factory.mktemp("browser"), ("--use-fake-device-for-media-stream",)) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder() -> Path:
    chosen = {"mmproj": str(EYES / "mmproj.gguf"), "kv_dtype": "f32", "max_kv_size": 128, "memory": "128MiB"}
    return site_of(str(EYES / "smolvlm.gguf"), "simd", **chosen)


def test_page_answers_about_chosen_and_taken_pictures_offline_too(page: Page, folder: Path) -> None:
    with np.load(EYES / "smolvlm.npz") as golden:
        picture, ids = golden["first"], golden["one.ids"]
    height, width, _ = picture.shape
    rgba = np.dstack([picture, np.full((height, width), 255, np.uint8)])

    def ask(pictures: int) -> None:
        until(page, "document.querySelectorAll('form + .pictures img, .pictures li img').length === 1")
        page.value(ASK)
        answered = f"{LAST}?.ariaBusy === 'false' && document.querySelectorAll('#turns .theirs').length === {pictures}"
        until(page, answered)
        assert page.value("document.querySelectorAll('#turns img').length") == pictures
        assert not page.value("document.querySelector('#turns .bad')?.textContent")

    with served(folder) as (url, _):
        show(page, url, 390)
        until(page, READY)
        program = ASKED.replace("PIXELS", str(rgba.reshape(-1).tolist()))
        found = page.value(program.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
        assert found == [True, int((ids == 290).sum()), ids.size]
        page.value(CHOOSE)
        ask(1)
        until(page, f"(await {RECORD})?.turns?.length === 2")  # a page that is left before has forgotten the answer
    page.visit(url)  # the server is gone
    until(page, READY)
    allow(page, url, "denied", "camera")
    page.value(f"{CAMERA}.click()")
    until(page, "document.querySelector('.pictures [role=alert]')?.textContent.startsWith('The camera is blocked')")
    allow(page, url, "granted", "camera")
    page.value(f"{CAMERA}.click()")
    until(page, f"{TAKE}?.disabled === false")
    page.value("(globalThis.track = document.querySelector('.taking video').srcObject.getTracks()[0]).readyState")
    page.value(f"{TAKE}.click()")
    ask(2)
    assert page.value("[track.readyState, document.querySelector('.taking')]") == ["ended", None]
    assert page.value("[...document.querySelectorAll('#turns img')].at(-1).naturalWidth") >= 640


def test_module_plays_sounds(page: Page) -> None:
    heard = GOLDEN / "heard"
    with np.load(heard / "qwen2.npz") as golden:
        ids = golden["one.ids"]
    chosen = {"mmproj": str(heard / "qwen2audio.gguf"), "kv_dtype": "f32", "max_kv_size": 128, "memory": "128MiB"}
    with served(site_of(str(heard / "qwen2.gguf"), "simd", **chosen)) as (url, _):
        show(page, url, 390)
        until(page, READY)
        found = page.value(PLAYED.replace("SAMPLES", str(chirp(SHORT).tolist())))
    assert found == [True, False, int((ids == 290).sum()), ids.size, "unsupported"]

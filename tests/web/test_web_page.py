"""The page of a site in Chromium: typed before the download ends, cancelled, restored, offline; on a phone and on a
desk; with pictures that are chosen or taken by its camera; and modules that hear sounds in prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import CONTRAST, Page, requests, show, type_in, until
from conftest import GOLDEN, NEEDS_WASM, chromium
from golden.sounds import SHORT, chirp
from test_microphone import allow
from test_web_package import run
from web_site import READY, ROWS, served, site_of

pytestmark = [pytest.mark.slow, NEEDS_WASM]

LAST = "[...document.querySelectorAll('#turns .theirs')].at(-1)"
RECORD = """new Promise((done) => {
  indexedDB.open(`edge ${location.pathname}`).onsuccess = ({ target: { result } }) => {
    const request = result.transaction('chats').objectStore('chats').get('last');
    request.onsuccess = () => (result.close(), done(request.result));
  };
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page with a camera, whose pictures Chromium draws."""
    with chromium(tmp_path_factory.mktemp("browser"), ("--use-fake-device-for-media-stream",)) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder() -> Path:
    return site_of()


def turns(page: Page) -> list[str]:
    """What was said, without the notes between."""
    said: list[str] = page.value(
        "[...document.querySelectorAll('#turns li:not(.note)')].map((each) => each.textContent)"
    )
    return said


# Asks a question as soon as the page changes its turns so that `holds()`.
ASK_WHEN = """((holds, said) => new MutationObserver((_, watch) => {
  if (!holds()) return;
  watch.disconnect();
  document.getElementById('text').value = said;
  document.getElementById('ask').requestSubmit();
}).observe(document.getElementById('turns'), { subtree: true, childList: true, attributes: true }))"""


def test_chat_on_a_phone(page: Page, folder: Path) -> None:
    with served(folder) as (url, sent):
        sent.go.clear()  # the question comes before the model
        show(page, url, 390)
        until(page, "document.getElementById('send')?.disabled === false && document.activeElement.id === 'text'")
        type_in(page, "hello")
        assert turns(page) == ["hello"]
        page.value(f"{ASK_WHEN}(() => {LAST}?.ariaBusy === 'false', 'more')")  # while the page keeps the answer
        sent.go.set()
        until(page, f"{READY} && (await {RECORD})?.turns.length === 4")
        said = turns(page)
        assert said[::2] == ["hello", "more"]
        assert all(said)
        until(page, "/^\\d+ of \\d+$/.test(document.getElementById('memory').textContent)")
        assert page.value("document.querySelector('#bar i').clientWidth") > 5
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert min(page.value(CONTRAST))[0] >= 4.5
        assert [each for each in requests(page) if not each.startswith(("blob:", "data:", url))] == []
        page.value("navigator.serviceWorker.ready.then(() => 1)")
    # The server is gone: the page, the model and the chat are still there.
    meters = page.value("document.getElementById('meters').textContent")
    page.visit(url)
    until(page, READY)
    assert turns(page) == said
    assert page.value("document.getElementById('meters').textContent") == meters
    page.value("document.getElementById('new').click()")
    until(page, "!document.querySelectorAll('#turns li').length")
    until(page, f"!(await {RECORD})?.turns?.length")
    page.visit(url)
    until(page, READY)
    assert turns(page) == []


def test_instructions_come_before_a_new_chat(page: Page, folder: Path) -> None:
    """Instructions survive a reload, and answers are those of a session that was told them."""
    with served(folder) as (url, _):
        show(page, url, 390)
        until(page, f"{READY} && document.activeElement.id === 'text'")
        type_in(page, "hello")
        until(page, f"(await {RECORD})?.turns.length")
        first = page.value(f"{RECORD}.then((found) => found.turns[1].content)")
        page.value("document.getElementById('about').click()")
        facts = page.value("document.getElementById('facts').textContent")
        assert f"the last {ROWS * 3 // 4} words" in facts
        assert "rows" not in page.value("document.body.innerText")
        page.value("document.getElementById('system').value = 'be brief'")
        page.value(f"{ASK_WHEN}(() => !document.querySelector('#turns li'), 'hello')")  # while the new chat begins
        page.value("document.getElementById('save').click()")
        until(page, f"await {RECORD}.then((found) => found?.system === 'be brief' && found.turns.length)")
        page.visit(url)
        until(page, READY)
        page.value("document.getElementById('about').click()")
        assert page.value("document.getElementById('system').value") == "be brief"
        answers = page.value(f"""(async () => {{
          const {{ Edge }} = await import("/edge/index.js");
          const session = await Edge.open("/");
          await session.system("be brief");
          const expected = await session.ask("hello", {{ maxTokens: 1000 }});
          const form = {{ type: "object" }};
          form.properties = {{ same: form }};
          const refused = await session.constrain({{ jsonSchema: form }}).catch((error) => error.message);
          await session.close();
          return [(await {RECORD}).turns[1].content, expected, refused];
        }})()""")
    assert answers[0] == answers[1] != first
    assert "contains itself" in answers[2]


def test_service_worker_isolates_a_page(page: Page, folder: Path) -> None:
    """If the server sends no headers of isolation, the page is isolated after one reload."""
    with served(folder, isolated=False) as (url, _):
        page.visit(url)
        until(page, f"crossOriginIsolated && {READY}")
        assert page.value("sessionStorage.getItem('reloaded')") == "1"


# Pictures and sounds

EYES = GOLDEN / "eyes"
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


def test_page_answers_about_chosen_and_taken_pictures_offline_too(page: Page) -> None:
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

    chosen = {"mmproj": str(EYES / "mmproj.gguf"), "kv_dtype": "f32", "max_kv_size": 128, "memory": "128MiB"}
    with served(site_of(str(EYES / "smolvlm.gguf"), "simd", **chosen)) as (url, _):
        show(page, url, 390)
        until(page, READY)
        found = run(page, f"""
          const session = await Edge.open('./');
          await session.image(new ImageData(new Uint8ClampedArray({rgba.reshape(-1).tolist()}), {width}, {height}));
          const tokens = await session.imageTokens({width}, {height});
          await session.ask('What is in the picture?', {{ temperature: 0, maxTokens: 1, ignoreEos: true }});
          await session.close();
          return [session.info.sees, tokens, session.report.promptTokens];
        """)  # fmt: skip
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
    until(page, "[...document.querySelectorAll('#turns img')].at(-1).naturalWidth >= 640")


def test_module_plays_sounds(page: Page) -> None:
    heard = GOLDEN / "heard"
    with np.load(heard / "qwen2.npz") as golden:
        ids = golden["one.ids"]
    chosen = {"mmproj": str(heard / "qwen2audio.gguf"), "kv_dtype": "f32", "max_kv_size": 128, "memory": "128MiB"}
    with served(site_of(str(heard / "qwen2.gguf"), "simd", **chosen)) as (url, _):
        show(page, url, 390)
        until(page, READY)
        found = run(page, f"""
          const session = await Edge.open('./');
          const samples = new Float32Array({chirp(SHORT).tolist()});
          await session.sound(samples, {{ rate: 16000 }});
          const tokens = await session.soundTokens(samples.length, {{ rate: 16000 }});
          await session.ask('What is heard?', {{ temperature: 0, maxTokens: 1, ignoreEos: true }});
          const refused = await session.image(new ImageData(8, 8)).catch((error) => error.code);
          await session.close();
          return [session.info.sounds, session.info.sees, tokens, session.report.promptTokens, refused];
        """)  # fmt: skip
    assert found == [True, False, int((ids == 290).sum()), ids.size, "unsupported"]

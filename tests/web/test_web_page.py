"""The chat page in Chromium: typed before the download ends, cancelled, restored, offline; on a phone and on a desk."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import CONTRAST, Page, requests, show, type_in, until
from conftest import NEEDS_WASM
from web_site import ROWS, served, site_of

pytestmark = [pytest.mark.slow, NEEDS_WASM]

LAST = "[...document.querySelectorAll('#turns .theirs')].at(-1)"
RECORD = """new Promise((done) => {
  indexedDB.open(`edge ${location.pathname}`).onsuccess = ({ target: { result } }) => {
    const request = result.transaction('chats').objectStore('chats').get('last');
    request.onsuccess = () => (result.close(), done(request.result));
  };
})"""
READY = "document.getElementById('status')?.textContent.startsWith('On this device')"


@pytest.fixture(scope="module")
def folder() -> Path:
    return site_of()


def turns(page: Page) -> list[str]:
    """What was said, without the notes between."""
    said: list[str] = page.value(
        "[...document.querySelectorAll('#turns li:not(.note)')].map((each) => each.textContent)"
    )
    return said


def test_chat_on_a_phone(page: Page, folder: Path) -> None:
    with served(folder) as (url, sent):
        sent.go.clear()  # the question comes before the model
        show(page, url, 390)
        until(page, "document.getElementById('send')?.disabled === false")
        assert page.value("document.activeElement.id") == "text"
        type_in(page, "hello")
        assert turns(page) == ["hello"]
        sent.go.set()
        until(page, f"{LAST}?.ariaBusy === 'false' && {READY}")
        said = turns(page)
        assert (said[0], len(said)) == ("hello", 2)
        assert said[1]
        until(page, "/^\\d+ of \\d+$/.test(document.getElementById('memory').textContent)")
        assert page.value("document.querySelector('#bar i').clientWidth") > 5
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert min(page.value(CONTRAST))[0] >= 4.5
        assert [each for each in requests(page) if not each.startswith(("blob:", "data:", url))] == []
        page.value("navigator.serviceWorker.ready.then(() => 1)")
        until(page, f"await {RECORD} && {READY}")
    # The server is gone: the page, the model and the chat are still there.
    meters = page.value("document.getElementById('meters').textContent")
    page.visit(url)
    until(page, READY)
    assert turns(page) == said
    assert page.value("document.getElementById('meters').textContent") == meters
    type_in(page, "more")
    until(page, f"document.querySelectorAll('#turns li:not(.note)').length === 4 && {LAST}.ariaBusy === 'false'")
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
        until(page, READY)
        type_in(page, "hello")
        until(page, f"{LAST}?.ariaBusy === 'false'")
        until(page, f"(await {RECORD})?.turns.length")
        first = page.value(f"{RECORD}.then((found) => found.turns[1].content)")
        page.value("document.getElementById('about').click()")
        facts = page.value("document.getElementById('facts').textContent")
        assert f"the last {ROWS * 3 // 4} words" in facts
        assert "rows" not in page.value("document.body.innerText")
        page.value("document.getElementById('system').value = 'be brief'")
        page.value("document.getElementById('save').click()")
        until(page, "!document.querySelectorAll('#turns li').length && !document.getElementById('panel').open")
        until(page, f"await {RECORD}.then((found) => found?.system === 'be brief')")
        page.visit(url)
        until(page, READY)
        page.value("document.getElementById('about').click()")
        assert page.value("document.getElementById('system').value") == "be brief"
        page.value("document.getElementById('panel').close()")
        type_in(page, "hello")
        until(page, f"(await {RECORD}).turns.length")
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

"""The chat page in Chromium: typed before the download ends, cancelled, restored, offline; on a phone and on a desk."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import CONTRAST, Page, complaints, show, type_in, until
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
        sent.cut = [100]  # the download pauses, so that the question comes before its end
        show(page, url, 390)
        until(page, "document.getElementById('send')?.disabled === false")
        assert page.value("document.activeElement.id") == "text"
        type_in(page, "hello")
        assert turns(page) == ["hello"]
        until(page, f"{LAST}?.ariaBusy === 'false' && {READY}")
        said = turns(page)
        assert (said[0], len(said)) == ("hello", 2)
        assert said[1]
        until(page, "/^\\d+ of \\d+$/.test(document.getElementById('memory').textContent)")
        assert page.value("document.querySelector('#bar i').clientWidth") > 5
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert min(page.value(CONTRAST))[0] >= 4.5
        outside = [
            each["params"]["request"]["url"] for each in page.events if each["method"] == "Network.requestWillBeSent"
        ]
        assert {each for each in outside if not each.startswith(("blob:", "data:"))} <= {
            each for each in outside if each.startswith(url)
        }
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


def test_answer_is_stopped_on_a_dark_desktop(page: Page, folder: Path) -> None:
    with served(folder) as (url, _):
        show(page, url, 1280, dark=True)
        until(page, READY)
        page.value("""(() => {
          const send = document.getElementById('send');
          globalThis.begun = new Promise((done) => new MutationObserver(() => {
            if (send.ariaLabel === 'Stop') done(1);
          }).observe(send, { attributes: true }));
        })()""")  # the page sees it begin, though this process may be late
        type_in(page, "count")
        page.value("begun")
        page.ask("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
        until(page, "document.getElementById('send').ariaLabel === 'Send'")
        assert min(page.value(CONTRAST))[0] >= 4.5
        assert 600 <= page.value("document.getElementById('ask').getBoundingClientRect().width") <= 800
        assert page.value("document.querySelector('main').getBoundingClientRect().height") == 844
        assert complaints(page) == []


def test_answer_is_copied(page: Page, folder: Path) -> None:
    with served(folder) as (url, _):
        page.ask("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        show(page, url, 390)
        until(page, READY)
        type_in(page, "hello")
        until(page, f"{LAST}?.ariaBusy === 'false'")
        page.value("document.querySelector('.theirs .actions .copy').click()")
        until(page, "document.querySelector('.theirs .actions .copy').ariaLabel === 'Copied'")
        copied = page.value("navigator.clipboard.readText()")
        assert copied.split() == turns(page)[1].split()


def test_question_is_edited_and_its_answer_retried(page: Page, folder: Path) -> None:
    """The session forgets the turns after it: the same question has the same answer."""
    with served(folder) as (url, _):
        show(page, url, 390)
        until(page, READY)
        for question in ("hello", "more"):
            type_in(page, question)
            until(page, f"{LAST}?.ariaBusy === 'false' && document.getElementById('send').ariaLabel === 'Send'")
        said = turns(page)
        page.value("document.querySelector('.theirs .retry').click()")
        until(page, f"document.querySelectorAll('#turns .theirs').length === 1 && {LAST}.ariaBusy === 'false'")
        assert turns(page) == said[:2]
        page.value("document.querySelector('.mine .edit').click()")
        page.value("document.activeElement.select()")
        type_in(page, "count")
        until(page, f"{LAST}?.ariaBusy === 'false' && document.querySelector('.mine').textContent === 'count'")
        assert turns(page)[1] != said[1]
        until(page, f"(await {RECORD}).turns[0].content === 'count'")


def test_instructions_come_before_a_new_chat(page: Page, folder: Path) -> None:
    """And survive a reload. The answers are those of a session that was told."""
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


def test_only_changed_pieces_of_a_state_are_written(page: Page, folder: Path) -> None:
    with served(folder) as (url, _):
        page.visit(f"{url}edge/package.json")
        found = page.value("""(async () => {
          const { keepChat, readChat, forgetChat } = await import("/chats.js");
          const put = IDBObjectStore.prototype.put;
          let written = 0;
          IDBObjectStore.prototype.put = function (value, key) {
            written += value.length ?? 0;
            return put.call(this, value, key);
          };
          const sums = [], same = [];
          const state = new Uint8Array(3e6).map((_, at) => at / 1000);
          const states = [state.slice(0, 2e6), state, state.slice(0, 1e6)];
          states.push(states[2].slice());
          states[3][7] ^= 1;
          for (const each of states) {
            written = 0;
            await keepChat({ turns: [] }, each);
            sums.push(written);
            const { state: kept } = await readChat();
            same.push(kept.length === each.length && kept.every((byte, at) => byte === each[at]));
          }
          await forgetChat();
          return { sums, same, left: await readChat() };
        })()""")
    piece = 1 << 18
    last = 1_000_000 % piece
    assert found["sums"] == [2_000_000, 3_000_000 - 2_000_000 // piece * piece, last, piece]
    assert (found["same"], found["left"]) == ([True] * 4, None)


def test_every_control_has_a_name(page: Page, folder: Path) -> None:
    with served(folder) as (url, _):
        show(page, url, 390)
        until(page, READY)
        tree = page.ask("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "textbox", "log", "heading", "progressbar", "status"}
        named = {each["role"]["value"]: each.get("name", {}).get("value") for each in tree if not each["ignored"]}
        assert {"button", "textbox", "log", "heading"} <= named.keys()
        assert all(named[role] for role in roles & named.keys() - {"status"}), named


def test_service_worker_isolates_a_page(page: Page, folder: Path) -> None:
    """Where the server does not: after one reload."""
    with served(folder, isolated=False) as (url, _):
        page.visit(url)
        until(page, f"crossOriginIsolated && {READY}")
        assert page.value("sessionStorage.getItem('reloaded')") == "1"


@pytest.mark.exhaustive
def test_errors_are_shown_and_tried_again(page: Page, folder: Path) -> None:
    with served(folder) as (url, sent):
        sent.flip = [0] * 5
        show(page, url, 390)
        until(page, "document.getElementById('status')?.className === 'bad'")
        assert "damaged at byte 0: upload the site again" in page.value("document.getElementById('status').textContent")
        assert min(page.value(CONTRAST))[0] >= 4.5
        page.value("document.querySelector('.again').click()")
        until(page, READY)

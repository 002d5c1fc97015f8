"""The chat page of `edge serve` in Chromium, before a server that says what a test wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CONTRAST, Page, complaints, press, requests, show, type_in, until
from chat_server import Script, chat_server
from conftest import GOLDEN
from serving_process import serving

import edge

pytestmark = pytest.mark.slow

READY = "document.getElementById('status').textContent === 'On this machine'"
ANSWERED = (
    "[...document.querySelectorAll('#turns .theirs')].at(-1)?.ariaBusy === 'false'"
    " && document.getElementById('send').ariaLabel === 'Send'"
)
SAID = "[...document.querySelectorAll('#turns > li:not(.note) > .said')].map((each) => each.innerText)"
ANSWER = "[...document.querySelectorAll('#turns .theirs > .said')].at(-1)"
CONTROLS = {"button", "textbox", "spinbutton", "combobox", "dialog"}
LONG = "a" * 300
RICH = f"""Some `code`, **bold** and a [link](https://example.com/a).

| a | {LONG} |
|---|---|
| 1 | {LONG} |

```python
print("{LONG}")
```

{LONG}
"""


@pytest.fixture
def server(page: Page) -> Iterator[tuple[str, Script]]:
    """Each has another port, and so another origin with its own storage."""
    with chat_server() as (url, script):
        yield url, script
        page.visit("about:blank")


def click(page: Page, selector: str) -> None:
    """Click with a mouse in the middle of an element, above which nothing may lie."""
    x, y = page.value(f"""(() => {{
      const element = document.querySelector({json.dumps(selector)});
      element.scrollIntoView({{ block: "nearest" }});
      const box = element.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    }})()""")
    for kind in ("mousePressed", "mouseReleased"):
        page.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def ask(page: Page, text: str) -> None:
    """Ask, and wait for the whole answer."""
    before = page.value("document.querySelectorAll('#turns .theirs').length")
    type_in(page, text)
    until(page, f"document.querySelectorAll('#turns .theirs').length > {before} && {ANSWERED}")


def open_page(page: Page, url: str, width: int = 1280, *, dark: bool = False) -> None:
    show(page, url, width, dark=dark)
    until(page, f"{READY} && document.activeElement.id === 'text'")  # which the first frame focuses


def test_answer_is_shown_as_it_comes(page: Page, server: tuple[str, Script]) -> None:
    url, script = server
    script.answers = [["Hel", "lo **you**"]]
    script.go.clear()
    open_page(page, url)
    until(page, "document.getElementById('memory').textContent === '141 of 256'")
    script.told.clear()
    type_in(page, "hi")
    until(page, f"{ANSWER}?.innerText === 'Hel'")
    assert page.value("document.querySelector('.theirs').ariaBusy") == "true"
    assert page.value("document.getElementById('live').textContent") == ""
    assert page.value("document.getElementById('send').ariaLabel") == "Stop"
    script.go.set()
    until(page, ANSWERED)
    assert page.value(f"{ANSWER}.innerHTML") == "<p>Hello <strong>you</strong></p>"
    assert page.value("document.getElementById('live').textContent") == "Hello you"
    assert page.value("document.querySelector('.figures').textContent") == "2 tokens · 25 tokens/s · 3.3 J, estimated"
    script.told.set()  # memory when the answer began, which comes too late to be shown
    until(page, "performance.getEntriesByType('resource').filter(({ name }) => name.endsWith('/props')).length === 2")
    names = ("speed", "joules", "certainty", "memory")
    meters = [page.value(f"document.getElementById('{each}').textContent") for each in names]
    assert meters == ["25", "3.3 of 40.0", ", estimated", "142 of 256"]
    assert script.asked == [{
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True,
        "stream_options": {"include_usage": True},
    }]  # fmt: skip
    assert [each for each in requests(page) if not each.startswith(url)] == []
    assert complaints(page) == []


def test_answer_is_stopped(page: Page, server: tuple[str, Script]) -> None:
    """The server notices, and what was said stays."""
    url, script = server
    script.answers = [["One", " two"], ["Three"], ["Four", "five"], ["Six"]]
    script.go.clear()
    open_page(page, url)
    type_in(page, "count")
    until(page, f"{ANSWER}?.innerText === 'One'")
    press(page, "Escape")
    until(page, ANSWERED)
    assert script.gone.wait(120)
    assert page.value("document.querySelector('.note').textContent") == "Stopped"
    script.go.set()
    ask(page, "go on")
    assert [each["content"] for each in script.asked[1]["messages"]] == ["count", "One", "go on"]
    script.go.clear()
    type_in(page, "more")
    until(page, f"{ANSWER}?.innerText === 'Four'")
    page.value("document.getElementById('text').value = 'else'")  # is asked while that answer is being stopped
    page.value("(document.getElementById('new').click(), document.getElementById('ask').requestSubmit())")
    until(page, f"{ANSWERED} && {SAID}.join() === 'else,Six'")
    assert [each["content"] for each in script.asked[3]["messages"]] == ["else"]


def test_questions_are_edited_and_answers_retried(page: Page, server: tuple[str, Script]) -> None:
    url, script = server
    script.answers = [["first"], ["second"], ["third"], ["fourth"]]
    open_page(page, url)
    ask(page, "one")
    ask(page, "two")
    click(page, ".theirs:last-child .retry")
    until(page, f"{ANSWERED} && {ANSWER}.innerText === 'third'")
    assert [each["content"] for each in script.asked[2]["messages"]] == ["one", "first", "two"]
    click(page, ".mine .edit")
    assert page.value("document.activeElement.value") == "one"
    press(page, "Escape")
    assert page.value("document.activeElement.ariaLabel") == "Edit the question"
    press(page, "Enter", text="\r")
    page.value("document.activeElement.select()")
    type_in(page, "uno")
    until(page, f"{ANSWERED} && {ANSWER}.innerText === 'fourth'")
    assert page.value(SAID) == ["uno", "fourth"]
    assert [each["content"] for each in script.asked[3]["messages"]] == ["uno"]
    assert page.value("document.activeElement.id") == "text"


def test_markup_of_a_model_stays_text(page: Page, server: tuple[str, Script]) -> None:
    url, script = server
    said = (
        "<img src=x onerror=\"document.title='bad'\"> <script>document.title='bad'</script>\n\n"
        "[click](javascript:alert(1)) [data](data:text/html,x) [file](//example.com) ![image](https://example.com/x.png)\n\n"
        '[fine](https://example.com/?a="onclick=1) <https://example.com/b> `<b>x</b>`\n\n'
        "| <u>a</u> | [b](JavaScript:x) |\n|---|---|\n| <i>c</i> | d |\n\n```html\n<style>*{display:none}</style>\n```"
    )
    script.answers = [[said]]
    open_page(page, url)
    ask(page, "<b>hello</b>")
    tags = page.value(f"[...{ANSWER}.querySelectorAll('*')].map((each) => each.localName)")
    assert not {"img", "script", "u", "i", "b", "style", "iframe", "input"} & set(tags)
    links = page.value(f"[...{ANSWER}.querySelectorAll('a')].map((each) => [each.href, each.rel, each.target])")
    rel = ["noopener noreferrer", "_blank"]
    assert [each[0] for each in links] == [
        "https://example.com/x.png", "https://example.com/?a=%22onclick=1", "https://example.com/b",
    ]  # fmt: skip
    assert all(each[1:] == rel for each in links)
    shown = page.value(f"{ANSWER}.innerText")
    for text in ("<img src=x onerror=", "<script>document", "[click](javascript:alert(1))", "<b>x</b>", "<style>*{"):
        assert text in shown
    assert page.value("document.querySelector('.mine .said').innerHTML") == "&lt;b&gt;hello&lt;/b&gt;"
    assert page.value("document.title") == "<b>hello</b> · edge"
    assert not [each for each in page.events if "example.com" in json.dumps(each.get("params", {}).get("request", {}))]
    assert complaints(page) == []


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_all_is_readable_and_has_a_name(page: Page, server: tuple[str, Script], width: int, dark: bool) -> None:
    url, script = server
    call = {"index": 0, "id": "a", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    script.answers = [[{"reasoning_content": f"Hm. {LONG}"}, RICH], [{"tool_calls": [call]}, {"finish": "tool_calls"}]]
    open_page(page, url, width, dark=dark)
    ask(page, LONG)
    ask(page, "weather")
    page.value("for (const each of document.querySelectorAll('details')) each.open = true")
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.getElementById('turns').scrollWidth") <= width
    for dialog, opener in (("settings", "#open-settings"), ("confirm", "#delete-all"), ("key", "")):
        action = f"querySelector('{opener}').click()" if opener else f"getElementById('{dialog}').showModal()"
        page.value(f"document.{action}")
        assert min(page.value(CONTRAST))[0] >= 4.5
        assert page.value("document.documentElement.scrollWidth") <= width
        tree = page.ask("Accessibility.getFullAXTree")["nodes"]
        named = [(each["role"]["value"], each.get("name", {}).get("value")) for each in tree if not each["ignored"]]
        assert [role for role, name in named if role in CONTROLS and not name] == []
        page.value(f"document.getElementById('{dialog}').close()")
    roles = {each["role"]["value"] for each in page.ask("Accessibility.getFullAXTree")["nodes"] if not each["ignored"]}
    assert {"main", "log", "heading", "table", "status", "combobox"} <= roles
    assert ("navigation" in roles) == (width > 600)  # on a phone it is a drawer


def test_keyboard_alone_reaches_every_control(page: Page, server: tuple[str, Script]) -> None:
    url, script = server
    script.answers = [["a", "b"]]
    script.go.clear()
    open_page(page, url, 390)
    page.ask("Input.insertText", text="one")
    press(page, "Enter", shift=True, text="\r")
    type_in(page, "two")
    until(page, f"{ANSWER}?.innerText === 'a'")
    assert script.asked[0]["messages"][0]["content"] == "one\ntwo"
    reached = list[str]()
    for _ in range(30):
        press(page, "Tab", shift=True)
        reached.append(page.value("document.activeElement.id"))
        if reached[-1] == "open-side":
            break
    assert {"turns", "open-settings", "model", "open-side"} <= set(reached)
    assert "new" not in reached  # the drawer is closed
    press(page, "Enter", text="\r")
    until(page, "document.activeElement.id === 'new'")
    press(page, "Escape")
    assert page.value("document.activeElement.id") == "open-side"
    page.value("document.getElementById('open-settings').focus()")
    press(page, "Enter", text="\r")
    assert page.value("document.activeElement.id") == "system"
    press(page, "Escape")
    until(page, "!document.getElementById('settings').open && document.activeElement.id === 'open-settings'")
    script.go.set()
    until(page, f"{ANSWERED} && {ANSWER}.innerText === 'ab'")  # neither Escape was for the answer


def test_conversations_are_kept_and_deleted(page: Page, server: tuple[str, Script], tmp_path: Path) -> None:
    url, script = server
    script.answers = [["Paris"], ["Rome"], ["again"]]
    open_page(page, url)
    page.value("document.getElementById('model').value = 'other'")
    ask(page, "France?")
    page.value("document.getElementById('new').click()")
    until(page, "!document.querySelector('#turns li')")
    ask(page, "Italy?")
    chats = "[...document.querySelectorAll('#chats .chat')].map((each) => each.textContent)"
    assert page.value(chats) == ["Italy?", "France?"]
    page.value("document.querySelectorAll('#chats .chat')[1].click()")
    until(page, f"{SAID}.join() === 'France?,Paris'")
    page.visit("about:blank")
    open_page(page, f"{url}#{page_id(page, url, 'France?')}")
    assert page.value(SAID) == ["France?", "Paris"]
    open_page(page, url)  # a new tab opens the last conversation
    assert page.value(SAID) == ["France?", "Paris"]
    assert page.value("document.getElementById('model').value") == "other"
    ask(page, "sure?")
    assert [each["content"] for each in script.asked[-1]["messages"]] == ["France?", "Paris", "sure?"]
    page.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), eventsEnabled=True)
    page.events.clear()
    page.value("document.querySelector('#chats [aria-label^=\"Export France\"]').click()")
    page.wait("Browser.downloadProgress")
    while not any(each["params"].get("state") == "completed" for each in page.events):
        page.value("1")
    (exported,) = json.loads(next(tmp_path.glob("France*.json")).read_text())
    assert [each["content"] for each in exported["turns"]] == ["France?", "Paris", "sure?", "again"]
    page.value("document.querySelector('#chats [aria-label^=\"Delete France\"]').click()")
    assert page.value("document.activeElement.value") == "cancel"
    page.value("document.querySelector('#confirm [value=delete]').click()")
    until(page, f"{chats}.join() === 'Italy?' && !document.querySelector('#turns li')")
    page.value("document.getElementById('delete-all').click()")
    page.value("document.querySelector('#confirm [value=delete]').click()")
    until(page, "!document.querySelector('#chats li')")
    assert page.value("Object.keys(localStorage).filter((each) => each.startsWith('edge chat'))") == []


def page_id(page: Page, url: str, question: str) -> str:
    """The id of a conversation, by its first question."""
    page.visit(f"{url}chat/icon.svg")
    kept: dict[str, str] = page.value("({ ...localStorage })")
    chats = [json.loads(text) for key, text in kept.items() if key.startswith("edge chat ")]
    return next(str(each["id"]) for each in chats if each["turns"][0]["content"] == question)


def test_settings_reach_the_server(page: Page, server: tuple[str, Script]) -> None:
    url, script = server
    script.answers = [["ok"]]
    open_page(page, url)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    values = {"system": "Be brief.", "temperature": "0.5", "max_tokens": "20", "energy": "30", "time": "2.5"}
    click(page, "#open-settings")
    for name, value in {**values, "tools": "[1"}.items():
        page.value(f"document.querySelector('#settings [name={name}]').value = {json.dumps(value)}")
    click(page, "#settings [value=save]")
    assert page.value("document.getElementById('tools').validity.customError")
    assert page.value("document.getElementById('settings').open")
    page.value("document.getElementById('tools').focus()")
    page.value("document.getElementById('tools').select()")
    page.ask("Input.insertText", text=json.dumps(tools))
    click(page, "#settings [value=save]")
    until(page, "JSON.stringify(localStorage).includes('Be brief.')")  # the dialog is closed before they are kept
    open_page(page, url)
    ask(page, "hi")
    (body,) = script.asked
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    wished = {name: body[name] for name in ("temperature", "max_tokens", "edge", "tools")}
    assert wished == {"temperature": 0.5, "max_tokens": 20, "edge": {"energy": "30J", "time": "2.5s"}, "tools": tools}
    assert {"top_p", "seed", "system"}.isdisjoint(body)
    assert page.value("document.getElementById('joules').textContent") == "3.3 of 30.0"
    assert page.value("document.getElementById('joules-bar').hidden") is False


def test_tool_calls_are_shown_and_answered(page: Page, server: tuple[str, Script]) -> None:
    url, script = server
    deltas: list[dict[str, Any] | str] = [
        {"reasoning_content": "Look "}, {"reasoning_content": "it up."},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]},
        {"finish": "tool_calls"},
    ]  # fmt: skip
    script.answers = [deltas, ["Sunny at noon."]]
    open_page(page, url)
    ask(page, "weather?")
    thoughts = page.value("(({open, lastChild}) => [open, lastChild.textContent])(document.querySelector('.thoughts'))")
    assert thoughts == [False, "Look it up."]
    assert page.value("[...document.querySelectorAll('.call summary')].map((each) => each.textContent)") == [
        "Calls weather", "Calls clock",
    ]  # fmt: skip
    assert json.loads(page.value("document.querySelector('.call pre').textContent")) == {"city": "Paris"}
    for index, result in enumerate(("sunny", "noon")):
        page.value(f"document.querySelectorAll('.theirs form textarea')[{index}].value = '{result}'")
    click(page, ".theirs form .main")
    until(page, f"{ANSWERED} && {ANSWER}.innerText === 'Sunny at noon.'")
    messages = script.asked[1]["messages"]
    assert messages[1]["reasoning_content"] == "Look it up."
    assert [each["function"]["arguments"] for each in messages[1]["tool_calls"]] == ['{"city":"Paris"}', "{}"]
    results = [(each["role"], each["content"], each["tool_call_id"]) for each in messages[2:]]
    assert results == [("tool", "sunny", "a"), ("tool", "noon", "b")]


def test_errors_are_shown_and_tried_again(page: Page, server: tuple[str, Script]) -> None:
    """A question without an answer is not sent again with the next one; what came of an answer stays."""
    url, script = server
    refusal: dict[str, Any] = {"status": 429, "message": "the queue is full"}
    broken: list[dict[str, Any] | str] = ["Half", {"error": {"message": "the model failed"}}]
    script.answers = [[refusal], ["other"], ["fine"], broken]
    open_page(page, url)
    type_in(page, "one")
    until(page, "document.querySelector('.note.bad')?.textContent.startsWith('The queue is full')")
    ask(page, "two")
    assert [each["content"] for each in script.asked[1]["messages"]] == ["two"]
    click(page, ".note.bad .again")
    until(page, f"{ANSWERED} && {ANSWER}.innerText === 'fine'")
    assert page.value(SAID) == ["one", "fine"]
    ask(page, "three")
    assert page.value(SAID) == ["one", "fine", "three", "Half"]
    assert page.value("document.querySelector('.note').textContent") == "The model failed"
    page.value("Storage.prototype.setItem = (key) => { if (key.startsWith('edge chat ')) throw new Error('full'); }")
    type_in(page, "four")
    until(page, "[...document.querySelectorAll('.note.bad')].some((each) => each.textContent.includes('has no room'))")
    page.value("document.getElementById('new').click()")
    until(page, "!document.querySelector('#turns li')")


MARKDOWN = [
    "plain text\nof two lines", "# Title\n\ntext", "a *b* **c** ***d*** _e_ __f__ snake_case_name 2 * 3 * 4",
    "~~gone~~", "`a` ``b`c`` `open", "- a\n- b\n  - c\n  - d\n- e", "1. a\n2. b\n\n   more\n3. c", "3. three\n4. four",
    "> quote\n> more\n>\n> - list", "---", "***", "```js\nlet a = 1;\n\nlet b;\n```\nafter", "~~~\na\n~~~", "```\nopen",
    "| a | b |\n|---|:-:|\n| 1 | `2` |\n| 3 \\| 4 | |",
    '[a](https://example.com/b_(c)) and [d](mailto:a@example.com "t")', "\\*not\\* \\[a\\](b)", "text\n- list\n- more",
    "a\n\n\n\nb", "**bold with `code`** and *it **both** it*", "* a\n\n  ```sh\n  ls\n  ```\n\n* b",
    "1) a\n2) b\n\nafter", "**open and `code", "- [a](https://example.com)\n- > b",
]  # fmt: skip


# Elements and texts of both, without what differs on purpose: levels of headings, frames of code and tables,
# paragraphs (ours has them in all lists), the name of the element for deleted text.
OUTLINES = """(async (pairs) => {
  const { render } = await import("/chat/markdown.js");
  const policy = trustedTypes.createPolicy("test", { createHTML: (text) => text });
  const outline = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    const inner = [...node.childNodes].map(outline).join("");
    const name = node.localName.replace(/^h[1-6]$/, "h");
    if (node.localName === "p") return ` ${inner} `;
    return ["s", "del", "body", "figure", "div"].includes(name) ? inner : `<${name}>${inner}</>`;
  };
  const tidy = (node) => outline(node).replace(/\\s+/g, " ").replace(/ ?(<[^>]*>) ?/g, "$1").trim();
  return pairs.map(([source, expected]) => {
    const ours = document.createElement("div");
    render(ours, source);
    for (const each of ours.querySelectorAll("figcaption")) each.remove();
    const theirs = new DOMParser().parseFromString(policy.createHTML(expected), "text/html").body;
    return [source, tidy(ours), tidy(theirs)];
  });
})"""


def test_markdown_is_that_of_commonmark(page: Page, server: tuple[str, Script]) -> None:
    """The judge is markdown-it-py."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": False})
    markdown.enable(["table", "strikethrough"])
    url, _ = server
    open_page(page, url)
    made = page.value(f"{OUTLINES}({json.dumps([[each, markdown.render(each)] for each in MARKDOWN])})")
    assert [each for each in made if each[1] != each[2]] == []


def test_edge_serve_speaks_as_the_page_expects(page: Page) -> None:
    """The server has a key, for which the page asks until it is right, and a budget."""
    flags = ["--backend", "reference", "--max-kv-size", "128", "--threads", "1", "--api-key", "a secret"]
    with serving(str(GOLDEN / "llama-gqa-tied.gguf"), "--memory", "1GiB", *flags) as address:
        show(page, f"{address}/", 1280)
        until(page, "document.getElementById('key').open")
        press(page, "Escape")
        until(page, "document.getElementById('status').textContent === 'This server needs its key Try again'")
        page.value("document.querySelector('#status button').click()")
        for said, wrong in (("wrong", ""), ("a secret", "That key is wrong.")):
            until(page, "document.getElementById('key').open && document.getElementById('key-text').value === ''")
            assert page.value("document.getElementById('key-wrong').textContent") == wrong
            page.ask("Input.insertText", text=said)
            press(page, "Enter", text="\r")
        until(page, f"{READY} && document.getElementById('memory').textContent.endsWith(' of 1024')")
        page.value("localStorage['edge settings'] = JSON.stringify({ temperature: '0', max_tokens: '20' })")
        open_page(page, f"{address}/")
        ask(page, "hello")
        assert page.value("document.querySelector('.note.bad')?.textContent ?? ''") == ""
        assert "tokens/s" in page.value("document.querySelector('.figures').textContent")
        for each in ("speed", "joules"):  # a fast machine's joules are rounded to 0.0
            assert float(page.value(f"document.getElementById('{each}').textContent")) >= 0
        assert page.value("document.getElementById('model').value") == "llama-gqa-tied"
        assert "a secret" not in page.value("JSON.stringify(localStorage)")
        page.visit("about:blank")


PUT = """(async (kind) => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 2000, height: 500 });
  const context = canvas.getContext("2d");
  context.fillStyle = "red";
  context.fillRect(0, 0, 1000, 500);
  const data = new DataTransfer();
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  data.items.add(new File([blob], "a.png", { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
  document.getElementById("text").dispatchEvent(event);
})"""
TRAY = "document.querySelectorAll('ul.pictures img').length"


def test_pictures_are_dropped_pasted_and_sent(page: Page, server: tuple[str, Script], tmp_path: Path) -> None:
    url, script = server
    script.seeing, script.answers = ("tiny",), [["Red."]]
    open_page(page, url, 390)
    assert page.value("document.querySelector('#ask input[type=file]').accept") == "image/*"
    for number, kind in enumerate(("drop", "paste", "drop"), start=1):
        page.value(f"{PUT}('{kind}')")
        until(page, f"{TRAY} === {number}")
    click(page, "ul.pictures .small")
    until(page, f"{TRAY} === 2")
    page.value(
        "(() => { const carried = new DataTransfer();"
        "carried.items.add(new File(['no picture'], 'photo.heic', { type: 'image/heic' }));"
        "document.body.dispatchEvent(new DragEvent('drop', { dataTransfer: carried, bubbles: true })); })()"
    )
    until(page, "document.querySelector('ul.pictures [role=alert]')?.textContent.startsWith('photo.heic')")
    page.screenshot(tmp_path / "before.png")
    type_in(page, "What is it?")
    until(page, ANSWERED)
    assert page.value(TRAY) == 0
    *pictures, text = script.asked[-1]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    for part in pictures:
        found = edge.Image.of(part["image_url"]["url"])
        assert (found.width, found.height) == (1568, 392)
        red, green, _ = found.pixels[200, 300].tolist()  # the other half is transparent, and becomes white
        assert red > 200
        assert green < 50
        assert min(found.pixels[200, 1300].tolist()) > 200
    assert page.value("document.querySelectorAll('.mine > .pictures img').length") == 2
    page.screenshot(tmp_path / "after.png")
    open_page(page, url, 390)  # the conversation stays, with its pictures
    until(page, "document.querySelectorAll('.mine > .pictures img').length === 2")
    assert complaints(page) == []
    page.value("(document.getElementById('model').value = 'other', document.getElementById('model').onchange())")
    until(page, "document.querySelector('#ask .picture') === null")

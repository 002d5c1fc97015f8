"""The pages of `edge profile` and `edge eval kv`: as documents, and as a real browser shows them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import CONTRAST, Page, complaints, requests, show
from kv_rows import SETTINGS, make_row, make_table
from profiles import HOSTILE, make_bare_profile, make_profile

from edge.lab.profiling.compare import compare_profiles
from edge.lab.profiling.profile import ModelFacts, Profile
from edge.lab.report.chart import Axis, Chart
from edge.lab.report.comparison import comparison_report
from edge.lab.report.kv import kv_report
from edge.lab.report.page import page as html
from edge.lab.report.page import render
from edge.lab.report.profile import profile_report

PROFILES = {"full": make_profile(), "bare": make_bare_profile()}
PAGES = [*PROFILES, "hostile", "comparison", "kv", "kv-hostile"]
WIDEST = (
    "Math.max(...[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide') && !e.closest('svg'))"
    + (".map(e => e.getBoundingClientRect().right))")
)

LETTERS = """[...document.querySelectorAll('svg text')].map(e => {
    const turned = e.getScreenCTM(), size = parseFloat(getComputedStyle(e).fontSize)
    return size * Math.hypot(turned.a, turned.b)
})"""  # as they are seen, in pixels


MEETING = """[...document.querySelectorAll('figure')].flatMap(figure => {
    const shown = [...figure.querySelectorAll('text, .mark, figcaption, .key span')].map(
        e => [e.textContent, e.getBoundingClientRect(), e.matches('.mark')])
    const meet = (a, b) => a.left + 1 < b.right && b.left + 1 < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom
    return shown.flatMap(([one, a, mark], i) => shown.slice(i + 1)
        .filter(([, b, also]) => !(mark && also) && meet(a, b)).map(([two]) => [one, two]))
})"""  # words of a picture that lie upon each other, or below a mark

OUTSIDE = """[...document.querySelectorAll('figure')].flatMap(figure => {
    const place = figure.getBoundingClientRect()
    return [...figure.querySelectorAll('text, .mark, figcaption, .key span')].filter(e => {
        const at = e.getBoundingClientRect()
        return at.left < place.left || at.right > place.right || at.top < place.top || at.bottom > place.bottom
    }).map(e => e.textContent)
})"""  # what a picture has beyond its frame


def document(profile: Profile, kind: str) -> str:
    return render(kind, profile_report(profile), profile.to_dict())


def hostile() -> Profile:
    model = ModelFacts(HOSTILE, HOSTILE, 1000, 1000, HOSTILE, 64)
    return make_profile(model=model, missing={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE})


class Tags(HTMLParser):
    """All tags of a document, with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_script_and_asks_for_nothing(name: str) -> None:
    assert not re.search(r"@import|url\(|https?://", the_page(name))
    tags = Tags(the_page(name)).found
    assert not {tag for tag, _ in tags} & {"script", "img", "iframe", "object", "embed", "a", "base", "form"}
    for tag, attributes in tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or (tag == "link" and value == "data:,"), (tag, value)


def test_words_of_charts_are_escaped() -> None:
    chart = Chart("a <label>", "a & b", Axis(0, 1), Axis(0, 1))
    chart.mark(0.5, 0.5, "currentColor", said="<here>")
    chart.key("<key>", "currentColor")
    text = "".join(ElementTree.fromstring(chart.figure()).itertext())
    assert all(words in text for words in ("a & b", "<here>", "<key>"))


def test_markdown_keeps_hostile_names_in_place() -> None:
    text = document(hostile(), ".md")
    assert "<script>" not in text.replace("\\<script>", "")
    assert "\n# x" not in text
    block: list[int] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(len(re.split(r"(?<!\\)\|", line)))
            assert block[-1] >= 4
        else:
            assert len(set(block)) <= 1
            block = []


def assert_it_prints(page: Page) -> None:
    """On a sheet of A4: everything that is folded on a screen, nothing wider than the sheet."""
    unfolded = "[...document.querySelectorAll('details > *:not(summary)')].every(e => e.checkVisibility())"
    assert not page.value(unfolded)
    page.ask("Emulation.setEmulatedMedia", media="print")
    page.ask("Emulation.setDeviceMetricsOverride", width=720, height=1000, deviceScaleFactor=1, mobile=False)
    assert page.value("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
    assert page.value(unfolded)
    page.ask("Emulation.setEmulatedMedia", media="")


def the_page(name: str) -> str:
    match name:
        case "comparison":
            return html(comparison_report(compare_profiles(make_profile(), hostile(), "a", HOSTILE)))
        case "kv":
            return html(kv_report(make_table(), SETTINGS, "smollm2-135m", complete=True))
        case "kv-hostile":
            rows = [make_row("full", 1.0, size=None), make_row(HOSTILE, 1.1), make_row("h2o", 1.2, blocks=1)]
            return html(kv_report(rows, {**SETTINGS, "model": HOSTILE}, HOSTILE, complete=False))
    return document(PROFILES.get(name) or hostile(), ".html")


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
@pytest.mark.parametrize("name", PAGES)
def test_browsers_show_it(page: Page, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    path = tmp_path / "report.html"
    path.write_text(the_page(name))
    show(page, path.as_uri(), width, dark=dark)
    assert complaints(page) == []
    assert requests(page) == [path.as_uri()]
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value(WIDEST) <= width
    assert page.value("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
    assert all(size >= 11 for size in page.value(LETTERS))
    assert page.value(MEETING) == []
    assert page.value(OUTSIDE) == []
    assert min(page.value(CONTRAST))[0] >= 4.5
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", ground)[:3])
    assert (red + green + blue < 3 * 128) == dark
    if name in ("full", "kv"):
        assert page.value("document.querySelectorAll('.mark').length") > 0
        assert_it_prints(page)

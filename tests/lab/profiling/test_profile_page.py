"""The pages of `edge profile` and `edge eval kv`: as documents, and as a real browser shows them."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Page
from kv_rows import SETTINGS, make_row, make_table
from profiles import HOSTILE, make_bare_profile, make_engine, make_profile, make_sustained

from edge.lab.profiling.compare import compare_profiles
from edge.lab.profiling.profile import Mark, ModelFacts, Profile, Roofs
from edge.lab.report.comparison import comparison_report
from edge.lab.report.document import terminal
from edge.lab.report.kv import kv_report
from edge.lab.report.page import page as html
from edge.lab.report.page import render
from edge.lab.report.profile import profile_report, profile_summary

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


FAINT = """(() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number)
    const light = colour => numbers(colour).slice(0, 3).map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
    const behind = e => {
        const colour = getComputedStyle(e).backgroundColor
        return numbers(colour)[3] === 0 && e.parentElement ? behind(e.parentElement) : colour
    }
    const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    const said = [...document.querySelectorAll('main *')].filter(e => e.checkVisibility() && !e.closest('title') &&
        [...e.childNodes].some(child => child.nodeType == 3 && child.textContent.trim()))
    const colour = e => getComputedStyle(e)[e.matches('text, .mark') ? 'fill' : 'color']
    return [...said, ...document.querySelectorAll('.mark')].filter(e =>
        contrast(light(colour(e)), light(behind(e))) < (e.matches('.mark') ? 3 : 4.5)).map(e => e.textContent)
})()"""  # words and marks too near to the colour of their ground (WCAG 2, AA)


def document(profile: Profile, kind: str) -> str:
    return render(kind, profile_report(profile), profile.to_dict())


def summary(profile: Profile) -> str:
    return terminal(profile_summary(profile))


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


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_picture_words_do_not_overlap(page: Page, tmp_path: Path, share: float) -> None:
    """However short a part of the run is that memory's picture has a word for, however near engines are to roofs."""
    timeline = make_engine().timeline
    end = timeline.samples[-1].seconds
    marks = [Mark(0.0, "start"), Mark(0.01 * end, "load"), Mark(0.02 * end, "prompt"), Mark(share * end, "context 512")]
    engine = make_engine(timeline=replace(timeline, marks=marks), sustained=make_sustained())
    roofs = Roofs(2e10, 4e11 * (0.7 + share), 4.1e11 * (0.7 + share), 2)  # a prompt is at 4e11
    path = tmp_path / "report.html"
    path.write_text(document(make_profile(engines=[engine], roofs=roofs), ".html"))
    for width in (390, 1280):
        page.open(path, width=width)
        assert page.value(MEETING) == []
        assert page.value(OUTSIDE) == []


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


@pytest.mark.parametrize(("width", "dark"), [
    (390, True), (1280, False), pytest.param(390, False, marks=pytest.mark.exhaustive),
    pytest.param(1280, True, marks=pytest.mark.exhaustive),
], ids=["390-dark", "1280-light", "390-light", "1280-dark"])  # fmt: skip
@pytest.mark.parametrize("name", PAGES)
def test_browsers_show_it(page: Page, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    path = tmp_path / "report.html"
    path.write_text(the_page(name))
    opened = page.open(path, width=width, dark=dark)
    assert opened.complaints == []
    assert opened.requests == [path.as_uri()]
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value(WIDEST) <= width
    assert page.value("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
    assert all(size >= 11 for size in page.value(LETTERS))
    assert page.value(MEETING) == []
    assert page.value(OUTSIDE) == []
    assert page.value(FAINT) == []
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", ground)[:3])
    assert (red + green + blue < 3 * 128) == dark
    if name in ("full", "kv"):
        assert page.value("document.querySelectorAll('.mark').length") > 0
        assert_it_prints(page)

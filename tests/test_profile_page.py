"""The reports of `edge profile`: as documents, and as a real browser shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Page, browser, find_chromium
from profiles import HOSTILE, make_bare_profile, make_engine, make_profile, make_sustained

from edge.profiling.compare import compare_profiles
from edge.profiling.profile import Energy, Mark, ModelFacts, Profile
from edge.report import profile_compare
from edge.report.profile_documents import document
from edge.report.profile_text import summary

PROFILES = {"full": make_profile(), "bare": make_bare_profile()}
WIDEST = (
    "Math.max(...[...document.querySelectorAll('body *')].filter(e => !e.closest('.wide') && !e.closest('svg'))"
    + (".map(e => e.getBoundingClientRect().right))")
)

LETTERS = """[...document.querySelectorAll('svg text')].map(e => {
    const turned = e.getScreenCTM(), size = parseFloat(getComputedStyle(e).fontSize)
    return size * Math.hypot(turned.a, turned.b)
})"""  # as they are seen, in pixels


MEETING = """[...document.querySelectorAll('svg')].flatMap(svg => {
    const shown = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()])
    const meet = (a, b) => a.left + 1 < b.right && b.left + 1 < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom
    return shown.flatMap(([one, a], i) => shown.slice(i + 1).filter(([, b]) => meet(a, b)).map(([two]) => [one, two]))
})"""  # words of a picture that lie upon each other


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


@pytest.mark.parametrize("profile", [*PROFILES.values(), hostile()], ids=[*PROFILES, "hostile"])
def test_the_page_has_no_script_and_asks_for_nothing(profile: Profile) -> None:
    tags = Tags(document(profile, ".html")).found
    assert not {tag for tag, _ in tags} & {"script", "img", "iframe", "object", "embed", "a", "base", "form"}
    for tag, attributes in tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or (tag == "link" and value == "data:,"), (tag, value)


@pytest.mark.parametrize("name", PROFILES)
def test_pictures_take_their_colours_from_the_page(name: str) -> None:
    text = document(PROFILES[name], ".html")
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", pictures)) <= {"#ffffff"}
    assert ("currentColor" in pictures) == (name == "full")


def test_identifiers_that_pictures_refer_to_are_their_own() -> None:
    text = document(make_profile(), ".html")
    used = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text))
    found = re.findall(r'\bid="([^"]+)"', text)
    assert used
    assert used <= set(found)


@pytest.mark.parametrize("kind", [".html", ".md", ".json"])
def test_joules_are_called_what_they_are(kind: str) -> None:
    counter = make_engine(energy=Energy("RAPL", "counter", "package", 0.5))
    measured = document(make_profile(engines=[counter]), kind)
    assert "estimate" not in measured.lower()
    assert "estimate" in document(make_profile(), kind).lower()


def test_long_runs_of_all_engines_are_told() -> None:
    """llamacpp needs 3 ms instead of 2.5 ms for a token at the end."""
    said = summary(make_profile())
    assert re.search(r"\| tvm +\| +400 \| +400 \| +1.00 \|", said)
    assert re.search(r"\| llamacpp \| +400 \| +333 \| +0.83 \|", said)
    for kind in (".md", ".html"):
        text = document(make_profile(), kind)
        assert "tvm: the long run" in text
        assert "llamacpp: the long run" in text
        assert "estimated" in text[text.index("Sustained") :]
    minutes = make_sustained(length=60.0)
    assert "minute 5 tok/s" in summary(make_profile(engines=[make_engine(sustained=minutes)]))


def test_what_is_not_as_asked_for_is_told_everywhere() -> None:
    note = "prompts of 20 instead of 30 tokens, the cache has 24 rows"
    profile = make_profile(engines=[make_engine(notes=[note])])
    for text in (summary(profile), *(document(profile, kind) for kind in (".md", ".html", ".json"))):
        assert note in text


def test_the_kv_dtype_of_every_engine_is_told() -> None:
    config = make_engine().plan.config
    wide = make_engine("onnx", plan=replace(make_engine().plan, config=replace(config, kv_dtype="f32")))
    profile = make_profile(engines=[make_engine(), wide])
    for text in (summary(profile), document(profile, ".md"), document(profile, ".html")):
        assert "KV rows are not alike: f16 in tvm, f32 in onnx" in text
    text = document(profile, ".md")
    assert "1,024 in f16" in text
    assert "1,024 in f32" in text
    assert "plan of onnx: 1,024 KV rows in f32" in text
    assert "not alike" not in document(make_profile(), ".md")


def test_instruments_that_take_more_than_the_budget_are_told() -> None:
    settings = make_profile().settings
    for peak, more in ((190 << 20, False), (300 << 20, True)):
        text = document(make_profile(engines=[make_engine(operators_peak=peak)]), ".html")
        assert f"the process took {peak >> 20} MiB of 256 MiB (measured)" in text
        assert ("more than that" in text) == more
    free = make_profile(settings=replace(settings, memory=None))
    assert "with its instruments" not in document(free, ".md")


def test_the_terminal_says_estimated_too() -> None:
    said = summary(make_profile())
    assert "per token (estimated)" in said
    assert "Memory bandwidth limits" in said
    assert "edge tune m" in said
    assert "onnxruntime is not installed" in said


def test_markdown_keeps_hostile_names_in_their_place() -> None:
    text = document(hostile(), ".md")
    assert "<script>" not in text.replace("\\<script>", "")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for line in tables:
        cells = re.split(r"(?<!\\)\|", line)
        assert len(cells) >= 4
    assert "\n# x" not in text


def test_a_table_of_markdown_has_equal_rows() -> None:
    block: list[int] = []
    for line in [*document(hostile(), ".md").splitlines(), ""]:
        if line.startswith("|"):
            block.append(len(re.split(r"(?<!\\)\|", line)))
        else:
            assert len(set(block)) <= 1
            block = []


def test_comparisons_have_all_three_kinds() -> None:
    found = compare_profiles(make_profile(), hostile(), "a", HOSTILE)
    html = profile_compare.document(found, ".html")
    assert "<script" not in html
    assert "| ratio |" in profile_compare.document(found, ".md")
    assert '"kind": "edge profile comparison"' in profile_compare.document(found, ".json")


# In a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with browser(chromium, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def test_the_browser_would_tell(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<img src=missing.png><div style='width: 5000px'>wide</div><script>nothing()</script>")
    opened = page.open(path, width=390)
    assert any("nothing is not defined" in each for each in opened.complaints)
    assert opened.requests == [path.as_uri(), (tmp_path / "missing.png").as_uri()]
    assert not page.value("document.documentElement.scrollWidth <= innerWidth")


def assert_it_prints(page: Page) -> None:
    """On a sheet of A4: everything that is folded on a screen, nothing wider than the sheet."""
    unfolded = "[...document.querySelectorAll('details > *:not(summary)')].every(e => e.checkVisibility())"
    assert not page.value(unfolded)
    page.ask("Emulation.setEmulatedMedia", media="print")
    page.ask("Emulation.setDeviceMetricsOverride", width=720, height=1000, deviceScaleFactor=1, mobile=False)
    assert page.value("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
    assert page.value(unfolded)
    page.ask("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("share", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
def test_words_of_pictures_do_not_lie_upon_each_other(page: Page, tmp_path: Path, share: float) -> None:
    """However short a part of the run is that the picture of memory has a word for."""
    timeline = make_engine().timeline
    end = timeline.samples[-1].seconds
    marks = [Mark(0.0, "start"), Mark(0.01 * end, "load"), Mark(0.02 * end, "prompt"), Mark(share * end, "context 512")]
    engine = make_engine(timeline=replace(timeline, marks=marks), sustained=make_sustained())
    path = tmp_path / "report.html"
    path.write_text(document(make_profile(engines=[engine]), ".html"))
    page.open(path, width=390)
    assert page.value(MEETING) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", [*PROFILES, "hostile", "comparison"])
def test_browsers_show_it(page: Page, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    if name == "comparison":
        text = profile_compare.document(compare_profiles(make_profile(), hostile(), "a", HOSTILE), ".html")
    else:
        text = document(PROFILES.get(name) or hostile(), ".html")
    path = tmp_path / "report.html"
    path.write_text(text)
    opened = page.open(path, width=width, dark=dark)
    assert opened.complaints == []
    assert opened.requests == [path.as_uri()]
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value(WIDEST) <= width
    if width < 600:
        assert page.value("[...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
        assert all(size >= 11 for size in page.value(LETTERS))
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", ground)[:3])
    assert (red + green + blue < 3 * 128) == dark
    if name == "full":
        colours = page.value(
            "[...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill).join(' ')"
        )  # letters of pictures are as light or dark as those of the page
        assert colours
        ink = page.value("getComputedStyle(document.body).color")
        assert set(re.findall(r"rgb\([^)]*\)", colours)) == {ink}
        assert_it_prints(page)

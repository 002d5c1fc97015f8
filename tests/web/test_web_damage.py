"""Sites whose files were damaged on their way, in Chromium: one line says which, and nothing of them runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from browser import Page, complaints, until
from conftest import NEEDS_WASM, examples, exhaustive
from test_web_page import READY
from web_site import served, site_of

from edge.apps.bundle import MODEL
from edge.apps.manifest import MANIFEST

pytestmark = [pytest.mark.slow, NEEDS_WASM]

START = "start.js"  # checks the others
READY_TEXT = "On this device"
STATUS = "document.getElementById('status')?.textContent"
KINDS = ("truncated", "flipped", "swapped", "empty", "absent")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy, of which files may be replaced."""
    return Path(shutil.copytree(site_of(), tmp_path / "site", copy_function=os.link))


def damage(site: Path, name: str, kind: str) -> None:
    """Others are of the same kind of file, so that a browser would run them."""
    path = site / name
    data = path.read_bytes()
    others = [each for each in sorted(site.rglob(f"*{path.suffix or '.edge'}")) if each.read_bytes() != data]
    path.unlink()
    if kind == "truncated":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif kind == "flipped":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    elif kind == "swapped":
        path.write_bytes(others[0].read_bytes() if others else data[::-1])
    elif kind == "empty":
        path.touch()


def needed(site: Path) -> list[str]:
    """What `start.js` checks, and the modules."""
    manifest = json.loads((site / MANIFEST).read_text())
    scripts = [name for name in manifest["files"] if name.endswith((".js", ".css")) and name != START]
    return [MANIFEST, *scripts, *manifest["web"]["modules"].values()]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_is_named(page: Page, site: Path, kind: str) -> None:
    """In make test, of one file each."""
    every = needed(site)
    for name in every if examples(1) > 1 else [every[6 * KINDS.index(kind)]]:
        damage(site, name, kind)
        with served(site) as (url, _):
            page.visit(url)
            until(page, f"document.getElementById('status').className === 'bad' || {READY}")
            said = page.value(STATUS)
            is_other = name.endswith(".wasm") and READY_TEXT in said  # this browser's module is another one
            assert is_other or ("\n" not in said and name in said)
            if kind == "absent":
                assert is_other or "cannot be fetched: the server says 404" in said
            else:
                assert is_other or "is damaged: upload the site again" in said or "is not a site's: edge export" in said
                assert complaints(page) == []
            if name.endswith((".js", ".css")):  # page.js has not run, which registers a worker
                assert page.value("navigator.serviceWorker.getRegistrations().then((found) => found.length)") == 0
        (site / name).unlink(missing_ok=True)
        os.link(site_of() / name, site / name)


@pytest.mark.parametrize(("names", "kind", "words"), [
    ([f"edge/edge-{isa}.wasm" for isa in ("relaxed", "relaxed16", "simd")], "flipped", "wasm is damaged: upload"),
    ([MODEL], "truncated", MODEL), exhaustive([MODEL], "swapped", MODEL),
    *(([START], kind, "The page did not start") for kind in ("truncated", "empty", "absent")),
])  # fmt: skip
def test_page_that_cannot_start_says_so(page: Page, site: Path, names: list[str], kind: str, words: str) -> None:
    """No module is left that this browser runs; the model has another length or is another site's; no first script."""
    for name in names:
        damage(site, name, kind)
    with served(site) as (url, _):
        page.visit(url)
        if names != [START]:
            until(page, "document.getElementById('status')?.className === 'bad'")
        assert words in page.value(STATUS)


@pytest.mark.parametrize("place", ['id="about"', "<script"])
def test_half_a_page_says_so_without_its_scripts(page: Page, site: Path, place: str) -> None:
    path = site / "index.html"
    text = path.read_text()
    path.unlink()
    path.write_text(text[: text.index(place)])
    with served(site) as (url, _):
        page.visit(url)
        assert "upload the site again" in page.value(STATUS)

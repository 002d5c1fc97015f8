"""`edge export --device web`: what a site holds and says of itself, what is refused, and what a browser says of a site
whose files were damaged on their way: one line that names them, and nothing of them runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Page, complaints, until
from bundles import model_of
from conftest import GOLDEN, NEEDS_WASM, examples, exhaustive
from test_cli import edge
from web_site import NAME, PIECE, READY, ROWS, served, site_of

from edge.apps.bundle import MODEL, export, prepare
from edge.apps.manifest import MANIFEST
from edge.apps.module import PAGE, initial_pages
from edge.apps.planning import plan_bundle
from edge.backends.tvm.targets import choose_target
from edge.devices.profiles import find_profile
from edge.errors import BudgetError, InputError
from edge.lab.prediction.forecast import forecast
from edge.options import Options

GGUF = GOLDEN / f"{NAME}.gguf"
MOST = 65535 * 65536  # bytes: addresses have 32 bits, and memory whole pages

pytestmark = [pytest.mark.slow, NEEDS_WASM]


def test_every_file_is_in_the_manifest() -> None:
    site = site_of()
    manifest = json.loads((site / MANIFEST).read_text())
    files = {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    del files[MANIFEST]
    described = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    assert manifest["files"] == described
    assert {"index.html", "page.js", "page.css", "sw.js", "README.md", "_headers", MODEL} <= files.keys()
    assert {"edge/index.js", "edge/index.d.ts", "edge/package.json", "edge/worker.js"} <= files.keys()
    assert manifest["device"] == {"name": "web", "machine": "wasm32", "system": "web"}
    assert list(manifest["web"]["modules"]) == manifest["isas"] == ["relaxed", "relaxed16", "simd"]  # by speed


def test_memory_is_that_of_the_plan() -> None:
    site = site_of()
    manifest = json.loads((site / MANIFEST).read_text())
    web, plan = manifest["web"], manifest["plan"]
    assert plan["peak"] == sum(plan["bytes"].values())
    assert plan["peak"] < web["memory"]["maximum"] * PAGE < plan["peak"] + (9 << 20)
    modules = [(site / path).read_bytes() for path in web["modules"].values()]
    assert web["memory"]["initial"] == max(map(initial_pages, modules)) < web["memory"]["maximum"]


def test_same_inputs_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.apps.site.PIECE", PIECE)
    again = export(GGUF, tmp_path / "again", device="web", max_kv_size=ROWS, memory="64MiB")
    assert again == json.loads((site_of() / MANIFEST).read_text())


def test_instruction_sets_are_those_of_pages(tmp_path: Path) -> None:
    refused = edge("export", str(GGUF), "--device", "web", "--isa", choose_target().name, "-o", str(tmp_path / "site"))
    assert refused.returncode == 2
    assert refused.stderr.endswith("choose relaxed, relaxed16, simd\n")
    assert not list(tmp_path.iterdir())
    chosen = prepare(model_of(NAME), find_profile("web"), Options().updated(max_kv_size=ROWS), ["simd"])
    assert [each.target.name for each in chosen.designs] == ["simd"]


def test_memory_is_512_mib_unless_it_is_stated() -> None:
    """Phones grant that much; 4 GiB are the end of addresses."""
    web, model = find_profile("web"), model_of(NAME)
    assert plan_bundle(web, model.spec, Options(), 0).limit == 512 << 20
    assert plan_bundle(web, model.spec, Options(memory=3 << 30), 0).limit == 3 << 30
    assert plan_bundle(web, model.spec, Options(memory=MOST), 0).limit == MOST
    with pytest.raises(InputError, match=r"^--memory 4\.0 GiB: a WebAssembly module has less than 4 GiB$"):
        plan_bundle(web, model.spec, Options(memory=1 << 32), 0)
    with pytest.raises(BudgetError, match=r"the memory budget is 8\.0 MiB: the smallest that fits is --memory \d+MiB"):
        plan_bundle(web, model.spec, Options(memory=8 << 20), 0)


@pytest.mark.parametrize("memory", [None, 2 << 30, MOST])
def test_model_too_large_for_a_page_is_refused(memory: int | None) -> None:
    """Nobody is sent after a --memory that is refused then."""
    spec = replace(model_of(NAME).spec, vocab=1 << 28)
    with pytest.raises(
        BudgetError, match=r"^needs [\d.]+ GiB, and a WebAssembly module has less than 4 GiB: take a sm"
    ):
        plan_bundle(find_profile("web"), spec, Options(memory=memory), 0)


@pytest.mark.parametrize("options", [{}, {"kv_policy": "h2o", "kv_dtype": "int8", "max_kv_size": 512}])
def test_edge_plan_foretells_the_plan_of_a_site(options: dict[str, object]) -> None:
    chosen = Options().updated(**options)
    expected = prepare(model_of("smollm2-135m"), find_profile("web"), chosen).plan
    plan = forecast("smollm2-135m", chosen, device="web").plan
    assert replace(plan, bytes=expected.bytes, predicted_peak=0) == replace(expected, predicted_peak=0)
    assert expected.bytes.total <= plan.bytes.total < 1.02 * expected.bytes.total


# Damaged on its way, in Chromium

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
    elif kind != "absent":  # half of a page, up to what is named
        path.write_bytes(data[: data.index(kind.encode())])


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
    *((["index.html"], kind, "upload the site again") for kind in ('id="about"', "<script")),
])  # fmt: skip
def test_page_that_cannot_start_says_so(page: Page, site: Path, names: list[str], kind: str, words: str) -> None:
    """No module is left that this browser runs; the model has another length or is another site's; no first
    script, or half a page."""
    for name in names:
        damage(site, name, kind)
    with served(site) as (url, _):
        page.visit(url)
        if names not in ([START], ["index.html"]):
            until(page, "document.getElementById('status')?.className === 'bad'")
        assert words in page.value(STATUS)

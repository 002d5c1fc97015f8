"""`edge export --device web`: what a site holds and says of itself, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from bundles import model_of
from conftest import GOLDEN, NEEDS_WASM
from test_cli import edge
from web_site import NAME, PIECE, ROWS, site_of

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


@pytest.fixture(scope="module")
def site() -> Path:
    return site_of()


def test_every_file_is_in_the_manifest(site: Path) -> None:
    manifest = json.loads((site / MANIFEST).read_text())
    files = {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    del files[MANIFEST]
    described = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    assert manifest["files"] == described
    assert {"index.html", "page.js", "page.css", "sw.js", "README.md", "_headers", MODEL} <= files.keys()
    assert {"edge/index.js", "edge/index.d.ts", "edge/package.json", "edge/worker.js"} <= files.keys()
    assert manifest["device"] == {"name": "web", "machine": "wasm32", "system": "web"}
    assert list(manifest["web"]["modules"]) == manifest["isas"] == ["relaxed", "relaxed16", "simd"]  # by speed


def test_memory_is_that_of_the_plan(site: Path) -> None:
    manifest = json.loads((site / MANIFEST).read_text())
    web, plan = manifest["web"], manifest["plan"]
    assert plan["peak"] == sum(plan["bytes"].values())
    assert plan["peak"] < web["memory"]["maximum"] * PAGE < plan["peak"] + (9 << 20)
    modules = [(site / path).read_bytes() for path in web["modules"].values()]
    assert web["memory"]["initial"] == max(map(initial_pages, modules)) < web["memory"]["maximum"]


def test_same_inputs_give_the_same_bytes(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.apps.site.PIECE", PIECE)
    again = export(GGUF, tmp_path / "again", device="web", max_kv_size=ROWS, memory="64MiB")
    assert again == json.loads((site / MANIFEST).read_text())


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

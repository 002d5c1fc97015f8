"""A share of benchmarks/web_equality.py, and what the benchmarks of web pages stand on."""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser import find_chromium

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = [("Node", "relaxed16", 2), ("Node", "simd", 1), ("Chromium", "relaxed", 2), ("Chromium", "simd", 2)]
MODEL, TOKENS = "smollm2-135m", 48

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_differences_of_texts_are_found(benchmark: Any) -> None:
    alike = benchmark("web_equality").alike
    assert alike(["same", "other", "longer"], ["same", "ocean", "long"]) == [None, 1, 4]


def test_pages_of_benchmarks_are_isolated(benchmark: Any, tmp_path: Path) -> None:
    (tmp_path / "a.mjs").write_text("export {}")
    with benchmark("web_page").serve({"files": tmp_path}) as address:
        found = dict[str, Any]()
        for path in ("/files/a.mjs", "/other/a.mjs"):
            connection = HTTPConnection(urlsplit(address).netloc)
            connection.request("GET", path)
            found[path] = connection.getresponse()
            connection.close()
    assert found["/files/a.mjs"].status == 200
    assert found["/files/a.mjs"].headers["Content-Type"] == "text/javascript"
    assert found["/files/a.mjs"].headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert found["/other/a.mjs"].status == 404


def test_peers_that_npm_cannot_install_are_one_line(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        benchmark("web_page").install(tmp_path)
    assert "npm" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("where", "isa", "threads"), CASES)
def test_modules_write_what_the_x86_engine_writes(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory,
    where: str, isa: str, threads: int,
) -> None:  # fmt: skip
    if platform.machine() != "x86_64" or shutil.which("node") is None or find_chromium() is None:
        pytest.skip("another machine than x86-64, no Node or no Chromium")
    monkeypatch.setenv("EDGE_ISA", "")  # restored behind `native`, which sets it
    equality = benchmark("web_equality")
    folder = tmp_path_factory.getbasetemp() / "web-equality"
    site = folder / "equality"
    if not site.exists():
        site = equality.make_site(folder, MODEL)
    (model,) = folder.glob("*.gguf")
    plan = json.loads((site / "manifest.json").read_text(encoding="utf-8"))["plan"]
    prompts = equality.PROMPTS[:2]
    wanted = equality.native(model, plan, equality.ORACLE, threads, prompts, TOKENS)
    assert equality.alike(wanted, equality.WHERE[where](site, isa, threads, prompts, TOKENS)) == [None, None]

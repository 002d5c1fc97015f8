"""The page of `edge profile --on web:DIR` in Chromium, and its result."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from browser import CONTRAST, Page, complaints, until
from conftest import NEEDS_WASM
from kits import GOLDEN_MODEL, settings
from web_site import served

from edge.errors import InputError
from edge.lab.profiling.kit.device import device_of
from edge.lab.profiling.kit.page import make_page
from edge.lab.profiling.kit.result import Result, parse_result, profile_of
from edge.lab.report.document import terminal
from edge.lab.report.profile import profile_summary
from edge.run.starting.opening import open_model

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("page") / "site"
    model = open_model(str(GOLDEN_MODEL))
    kit = make_page(model, GOLDEN_MODEL.name, made, settings(sustained=0.5), quick=True)
    assert json.loads((made / "kit.json").read_text()) == asdict(kit)
    return made


def measure(page: Page, folder: Path, *, isolated: bool) -> Result:
    with served(folder, isolated=isolated) as (url, _):
        page.visit(url)
        until(page, "!document.getElementById('measure').disabled")
        page.value("document.getElementById('measure').click()")
        until(page, "!document.getElementById('result').hidden || !document.getElementById('measure').disabled")
        text = page.value("fetch(document.getElementById('result').href).then((each) => each.text())")
    return parse_result(text.encode(), "it")


@NEEDS_WASM
def test_page_measures_its_browser(page: Page, folder: Path, tmp_path: Path) -> None:
    found = measure(page, folder, isolated=True)
    assert complaints(page) == []
    assert all(ratio >= 4.5 for ratio, _ in page.value(CONTRAST))
    assert asdict(found.kit) == json.loads((folder / "kit.json").read_text())
    assert (found.in_page, found.prompts, found.tokens, found.ttft.count) == (True, 3, 24, 3)
    assert [each.context for each in found.curve] == [16, 48]
    assert found.threads == min(found.cores, found.kit.plan.config.threads)
    assert [each.threads for each in found.by_threads] == [1 << i for i in range(8) if 1 << i < found.threads]
    assert found.sustained.windows
    assert found.ceilings.read > 1e8
    assert found.ceilings.f32 > 1e8
    assert 0 < found.peak <= found.kit.plan.predicted_peak
    said = terminal(profile_summary(profile_of(found)), None)
    assert "by WebAssembly" in said
    assert "estimated" in said  # joules
    with pytest.raises(InputError, match="WebAssembly in its browser: measure the device with a kit"):
        device_of(found, "mine")

"""The npm package as `make dist` packs it, in a project that npm and Vite know nothing else of."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from browser import Page, until
from conftest import NEEDS_WASM
from test_web_package import expected
from test_web_types import complaints
from web_site import served, site_of

ROOT = Path(__file__).parents[2]
VITE = ROOT / "build" / "vite" / "node_modules" / ".bin" / "vite"
# Where an exported site is a folder of a page: in Vite's `public`, whose files are copied as they are.
COPIED = ("manifest.json", "model.edge", "edge/*.wasm")
PAGE = {
    "package.json": '{ "name": "page", "private": true, "type": "module" }',
    "index.html": '<p id="answer"></p><script type="module" src="/main.ts"></script>',
    "main.ts": """import { Edge, type Report } from "edge-web";

const session = await Edge.open("./");
const answer: string = await session.ask("abc", { temperature: 0, maxTokens: 24, ignoreEos: true });
const report: Report | null = session.report;
document.querySelector("#answer")!.textContent = `${report?.finish} ${session.info.isolated} ${answer}`;
""",
}

pytestmark = [
    pytest.mark.slow, NEEDS_WASM,
    pytest.mark.skipif(not VITE.exists() and os.environ.get("CI") != "true", reason="no Vite: make test installs it"),
]  # fmt: skip


def test_page_built_by_vite_answers_as_edge(page: Page, tmp_path: Path) -> None:
    for name, text in PAGE.items():
        (tmp_path / name).write_text(text)
    dist = runpy.run_path(str(ROOT / "docs" / "dist.py"))
    tarball = dist["npm_tarball"](tmp_path, dist["project_version"]())
    install = ["npm", "install", "--offline", "--silent", "--no-audit", "--no-fund", str(tarball)]
    subprocess.run(install, cwd=tmp_path, check=True)
    required = ["node", "-p", "typeof require('edge-web').Edge.open"]  # by CommonJS
    assert subprocess.run(required, cwd=tmp_path, capture_output=True, text=True).stdout == "function\n"
    site = site_of()
    for path in (path for pattern in COPIED for path in site.glob(pattern)):
        to = tmp_path / "public" / path.relative_to(site)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)

    assert complaints(tmp_path, "main.ts") == ""
    built = subprocess.run([VITE, "build", "--logLevel", "warn"], cwd=tmp_path, capture_output=True, text=True)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    with served(tmp_path / "dist") as (url, sent):
        page.visit(url)
        until(page, "document.querySelector('#answer').textContent")
        assert page.value("document.querySelector('#answer').textContent") == f"length true {expected('abc', 24)}"
        assert not [path for path in sent.paths if path.startswith("/edge/") and not path.endswith(".wasm")]

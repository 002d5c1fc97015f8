"""TypeScript's view of the JavaScript package and the page: types stated in comments, and those of index.d.ts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WEB = ROOT / "edge" / "apps" / "web"
PROFILING = ROOT / "edge" / "lab" / "profiling" / "kit" / "page"
SERVED = ROOT / "edge" / "server" / "page"
TSC = ROOT / "build" / "typescript" / "node_modules" / ".bin" / "tsc"
FLAGS = (
    "--noEmit", "--strict", "--allowJs", "--checkJs", "--target", "es2024", "--module", "esnext",
    "--moduleResolution", "bundler", "--moduleDetection", "force", "--lib", "esnext,dom,dom.iterable,dom.asynciterable",
)  # fmt: skip
MISSING = not (TSC.exists() and shutil.which("node"))

pytestmark = pytest.mark.skipif(
    MISSING and os.environ.get("CI") != "true", reason="no TypeScript: make test installs it"
)

STATED = """
import * as stated from "./edge/index.js";
import * as made from "./edge/made.js";
type Statics<T> = Omit<T, "prototype">;
export const edge: Statics<typeof stated.Edge> = made.Edge;
export const session: stated.Session = null as unknown as made.Session;
export const error: stated.EdgeError = null as unknown as made.EdgeError;
export const names: keyof typeof stated = null as unknown as keyof typeof made;
export const methods: keyof stated.Session = null as unknown as keyof made.Session;
export const statics: keyof typeof stated.Edge = null as unknown as keyof typeof made.Edge;
"""
MISTAKES = """import { Edge, Session } from "./edge/index.js";
const session = await Edge.open("./");
session.stream(5);
session.stream('a', { temprature: 1 });
session.report.tokens;
session.past('a');
Edge.open('./', { memory: true });
session.info.rows;
new Session();
"""


def complaints(folder: Path, *files: str) -> str:
    done = subprocess.run([TSC, *FLAGS, *files], cwd=folder, capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


def test_scripts_of_sites_have_their_types(tmp_path: Path) -> None:
    """As a site has them, and a project of npm; and examples of the docs. What index.js exports is assignable to what
    index.d.ts says, and nothing is missing there. Wrong types are errors."""
    shutil.copytree(WEB / "page", tmp_path, dirs_exist_ok=True)
    shutil.copytree(WEB / "chat", tmp_path / "chat")
    for name in ("edge", "node_modules/edge-web"):
        shutil.copytree(WEB / "package", tmp_path / name)
    scripts = [f"{part}/{each.name}" for part in ("chat", "edge") for each in sorted((tmp_path / part).glob("*.js"))]
    shutil.copy(tmp_path / "edge" / "index.js", tmp_path / "edge" / "made.js")
    made = {"stated.ts": STATED, "mistakes.ts": MISTAKES}
    for document in (WEB / "page" / "README.md", ROOT / "docs" / "web.md"):
        for code in re.findall(r"^```js\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL):
            made[f"{document.stem}{len(made)}.ts"] = code
    assert len(made) >= 5
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    said = complaints(tmp_path, "start.js", "page.js", "chats.js", *scripts, *made)
    lines = re.findall(r"^mistakes\.ts\((\d+),\d+\): error TS.*\n(?: .*\n)*", said, re.MULTILINE)
    assert [int(line) for line in lines] == [*range(3, 1 + MISTAKES.count("\n"))], said
    assert re.sub(r"^mistakes\.ts\(.*\n(?: .*\n)*", "", said, flags=re.MULTILINE) == ""


@pytest.mark.parametrize(("page", "beside"), [
    (PROFILING, "package"), (SERVED, "chat"),
], ids=["profiling", "serve"])  # fmt: skip
def test_scripts_of_other_pages_have_their_types(page: Path, beside: str, tmp_path: Path) -> None:
    """Of the profiling page, and of the page of `edge serve`."""
    shutil.copytree(page, tmp_path, dirs_exist_ok=True)
    shutil.copytree(WEB / beside, tmp_path / {"package": "edge"}.get(beside, beside), dirs_exist_ok=True)
    assert complaints(tmp_path, *(each.name for each in sorted(page.glob("*.js")))) == ""

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts as a site has them, and as a project of npm has."""
    folder = tmp_path_factory.mktemp("types")
    shutil.copytree(WEB / "page", folder, dirs_exist_ok=True)
    shutil.copytree(WEB / "chat", folder / "chat")
    for name in ("edge", "node_modules/edge-web"):
        shutil.copytree(WEB / "package", folder / name)
    return folder


def complaints(folder: Path, *files: str) -> str:
    done = subprocess.run([TSC, *FLAGS, *files], cwd=folder, capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


def test_scripts_have_their_types(site: Path, tmp_path: Path) -> None:
    """Of the package and its page, of the profiling page, and of the page of `edge serve`."""
    scripts = [f"{part}/{each.name}" for part in ("chat", "edge") for each in sorted((site / part).glob("*.js"))]
    assert complaints(site, "start.js", "page.js", "chats.js", *scripts) == ""
    shutil.copytree(PROFILING, profiling := tmp_path / "profiling")
    shutil.copytree(site / "edge", profiling / "edge", dirs_exist_ok=True)
    assert complaints(profiling, "kit.js", "ceiling.js") == ""
    shutil.copytree(SERVED, served := tmp_path / "served")
    shutil.copytree(WEB / "chat", served / "chat")
    assert complaints(served, *(each.name for each in sorted(SERVED.glob("*.js")))) == ""


def test_stated_types_are_those_of_the_package(site: Path) -> None:
    """What index.js exports is assignable to what index.d.ts says, and nothing is missing there."""
    shutil.copy(site / "edge" / "index.js", site / "edge" / "made.js")
    (site / "stated.ts").write_text(
        """import * as stated from "./edge/index.js";
           import * as made from "./edge/made.js";
           type Statics<T> = Omit<T, "prototype">;
           export const edge: Statics<typeof stated.Edge> = made.Edge;
           export const session: stated.Session = null as unknown as made.Session;
           export const error: stated.EdgeError = null as unknown as made.EdgeError;
           export const names: keyof typeof stated = null as unknown as keyof typeof made;
           export const methods: keyof stated.Session = null as unknown as keyof made.Session;
           export const statics: keyof typeof stated.Edge = null as unknown as keyof typeof made.Edge;"""
    )
    assert complaints(site, "stated.ts") == ""


def test_examples_of_the_docs_have_their_types(site: Path) -> None:
    names = []
    for document in (WEB / "page" / "README.md", ROOT / "docs" / "web.md"):
        for code in re.findall(r"^```js\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL):
            names.append(f"{document.stem}{len(names)}.ts")
            (site / names[-1]).write_text(code)
    assert len(names) >= 3
    assert complaints(site, *names) == ""


def test_wrong_types_in_scripts_are_errors(site: Path) -> None:
    """Each line after the second is one."""
    mistakes = [
        "session.stream(5);", "session.stream('a', { temprature: 1 });", "session.report.tokens;", "session.past('a');",
        "Edge.open('./', { memory: true });", "session.info.rows;", "new Session();",
    ]  # fmt: skip
    head = ['import { Edge, Session } from "./edge/index.js";', 'const session = await Edge.open("./");']
    (site / "mistakes.ts").write_text("\n".join(head + mistakes))
    noticed = re.findall(r"^mistakes\.ts\((\d+),\d+\): error TS", complaints(site, "mistakes.ts"), re.MULTILINE)
    assert [int(line) for line in noticed] == [*range(3, 3 + len(mistakes))]

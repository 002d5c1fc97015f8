"""The examples of README and docs work: shell blocks run in bash, console blocks print what they show, Python runs.

A block runs unless a comment before it says why not: `<!-- not run: reason -->`, or `<!-- slow: reason -->` for blocks
that only `make test-all` runs. `<!-- first run: reason -->` gives it an empty cache folder. The blocks of a page run in
order, in one folder with the files that examples name. A table that an example prints has figures: a row of dashes
measured nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import COMMAND, forking
from lora_files import write_adapter
from test_prefix_runs import write_prefix

from edge.model.model import open_model

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
SEES = "pictures.md"  # its examples show a picture to a model
MAKES_MODELS = ("README.md", "convert.md")  # their examples write model.gguf and small.gguf
OFTEN = ("README.md", "chat.md", "run.md", "serve.md")  # in make test
TIMEOUT = 600  # seconds, on a loaded machine that compiles

_BLOCK = re.compile(
    r"^(?:(?P<pad> *)<!-- (?P<mark>not run|slow|first run): [^\n]+ -->\n)?"
    r"(?P<indent> *)```(?P<language>sh|console|python)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Code in a page: its first line there, its language, and `slow`, `not run`, `first run` or nothing."""

    line: int
    language: str
    mark: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["mark"] or "",
            re.sub(f"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
        )
        for found in _BLOCK.finditer(text)
    ]


def pages_with(mark: str) -> list[str]:
    return [name for name, page in PAGES.items() if any(block.mark == mark for block in blocks_of(page))]


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the files that examples name; joules are estimated and no history is kept."""
    page = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    (tmp_path / "letter.txt").write_text(page[:600], encoding="utf-8")
    (tmp_path / "rules.txt").write_text(page[:1500], encoding="utf-8")
    (tmp_path / "text.txt").write_text(page[:1800], encoding="utf-8")
    (tmp_path / "long.txt").write_text(page, encoding="utf-8")
    for name in ("a.txt", "b.txt", "other.txt"):
        shutil.copy(tmp_path / "text.txt", tmp_path / name)
    write_adapter(tmp_path / "pirate.gguf", open_model(GOLDEN / "llama-gqa-tied.gguf"), rank=4)
    write_prefix(tmp_path / "pirate")
    shutil.copytree(GOLDEN / "folders" / "llama", tmp_path / "SmolLM2-135M")
    shutil.copy(GOLDEN / "lfm2.gguf", tmp_path)
    (tmp_path / "sensors" / "sys").mkdir(parents=True)
    monkeypatch.setenv("EDGE_SENSORS", str(tmp_path / "sensors"))
    monkeypatch.setenv("EDGE_HISTORY", "0")
    command = tmp_path_factory.mktemp("bin") / "edge"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(forking(COMMAND, "edge"))} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    for place in (Path(sys.executable).parent, command.parent):
        monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    return tmp_path


@pytest.fixture(scope="session")
def prepared() -> None:
    """The pages show runs that are not a model's first one."""
    command = [sys.executable, "-m", "edge", "run", "smollm2-135m", "-p", "x", "-n", "1", "--quiet"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in OFTEN)) for name in pages_with("")]
)
def test_examples_work(name: str, folder: Path) -> None:
    run_blocks(name, "", folder)


@pytest.mark.parametrize("name", pages_with("first run"))
def test_examples_of_first_runs_work(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(folder / "cache"))
    run_blocks(name, "first run", folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", pages_with("slow"))
def test_slow_examples_work(name: str, folder: Path) -> None:
    run_blocks(name, "slow", folder)


def test_every_page_with_examples_is_found() -> None:
    """Blocks whose comment or fence is misspelt would be left out in silence."""
    for page in PAGES.values():
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^ *```(?:sh|console|python)$", text, re.MULTILINE)) == len(blocks_of(page)), page.name
        assert len(re.findall(r"<!-- .* -->", text)) == sum(bool(block.mark) for block in blocks_of(page)), page.name


def test_row_of_dashes_is_found() -> None:
    table = "| policy | rows | tok/s |\n| --- | ---: | ---: |\n| full | 400 | – |\n| h2o | – | – |\n\n| a | – |"
    assert rows_of_dashes(table) == ["| h2o | – | – |"]


def run_blocks(name: str, mark: str, folder: Path) -> None:
    for model in ("model.gguf", "small.gguf") if mark or name not in MAKES_MODELS else ():
        shutil.copy(GOLDEN / ("eyes/smolvlm.gguf" if name == SEES else "llama-gqa-tied.gguf"), folder / model)
    if name == SEES:
        shutil.copy(GOLDEN / "eyes" / "mmproj.gguf", folder / "mmproj-model.gguf")
        shutil.copy(ROOT / "docs" / "chat-page.png", folder / "photo.jpg")
    for block in blocks_of(PAGES[name]):
        if block.mark == mark:
            where = f"{name}:{block.line}"
            if block.language == "console":
                compare_output(block.code, folder, where)
            else:
                program = ["bash", "-ec"] if block.language == "sh" else [sys.executable, "-c"]
                done = _run([*program, block.code], folder)
                assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
                assert rows_of_dashes(done.stdout) == [], where


def compare_output(code: str, folder: Path, where: str) -> None:
    """Every line that the page shows under a command is printed, but for its numbers.

    `…` stands for lines left out. What a model answers is not compared: it may differ between processors.
    """
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        done = _run(["bash", "-c", command], folder)
        printed = {_blurred(line) for line in f"{done.stdout}\n{done.stderr}".splitlines()}
        refused = re.search(r"^edge: |^\{\"error\"", shown, re.MULTILINE) is not None
        assert bool(done.returncode) == refused, f"{where}: {command}\n{done.stderr}"
        assert rows_of_dashes(done.stdout) == [], f"{where}: {command}"
        answers = re.search(r"\bedge (run|chat) ", command) is not None
        for line in shown.splitlines():
            if line and line != "…" and (" · " in line or line.startswith("edge: ") or not answers):
                assert _blurred(line) in printed, f"{where}: {command}\nnot printed: {line}\nbut: {printed}"


def rows_of_dashes(printed: str) -> list[str]:
    """Rows of printed tables whose columns of figures, which are flush right, have none."""
    found, columns = list[str](), list[int]()
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")] if line.startswith("|") else []
        if cells and all(re.fullmatch("-+:?", cell) for cell in cells):
            columns = [number for number, cell in enumerate(cells) if cell.endswith(":")]
        elif not cells:
            columns = []
        elif columns and all(cells[number] in ("", "–") for number in columns if number < len(cells)):
            found.append(line)
    return found


def _blurred(line: str) -> str:
    """A line without its figures, their units, the widths of columns, and whether an answer ended before its limit."""
    line = re.sub(r"stopped: (eos|length)", "stopped: eos or length", line)
    line = re.sub(r"\d[\d.,]*( ?([kKMG]i?B|m?s|m?J|m?W)\b)?", "#", line)
    return re.sub(r"\s+", " ", re.sub(r"-{2,}:?", "-", line)).strip()


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT
    )

"""What has been measured, one JSON line each, so that a long run which was interrupted can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge.errors import InputError
from edge.quality.cells import Cache, Cell
from edge.quality.perplexity import Streamed
from edge.quality.repeat import Repeated
from edge.quality.retrieval import Retrieved

Figures = Streamed | Repeated | Retrieved
FIGURES: dict[str, type[Streamed] | type[Repeated] | type[Retrieved]] = {
    "perplexity": Streamed, "retrieval": Retrieved, "repeat": Repeated,
}  # fmt: skip
"""What each task measures."""


@dataclass(frozen=True)
class Measured:
    """One task in one cell: figures, or the reason why there are none."""

    cell: Cell
    task: str
    cache: Cache | None = None
    figures: Figures | None = None
    reason: str = ""


class Journal:
    """Figures by cell and task. The file's first line says of what: settings that differ give other figures.

    path: None keeps nothing. Without `resume`, a file that is there is replaced. Raises InputError for a file that
    was made with other settings, is no journal, or cannot be written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, resume: bool = False) -> None:
        self.path = path
        self._found: dict[tuple[Cell, str], Measured] = {}
        settings = json.loads(json.dumps(settings))
        if path is None:
            return
        lines = _lines(path) if resume and path.exists() else []
        if lines:
            _check_settings(path, lines[0], settings)
        for number, line in enumerate(lines[1:], start=2):
            measured = _parse(line, f"{path}: line {number}")
            self._found[measured.cell, measured.task] = measured
        self._rewrite(settings)

    def find(self, cell: Cell, task: str) -> Measured | None:
        return self._found.get((cell, task))

    def add(self, measured: Measured) -> None:
        """Remember figures; reasons are found again soon enough. On disk before it returns."""
        if measured.figures is None:
            return
        self._found[measured.cell, measured.task] = measured
        if self.path is not None:
            try:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(_line(measured))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _rewrite(self, settings: Mapping[str, Any]) -> None:
        """Start the file, without what an interruption left half written."""
        assert self.path is not None
        content = json.dumps(settings) + "\n" + "".join(map(_line, self._found.values()))
        write_whole(self.path, content)


def write_whole(path: Path, text: str) -> None:
    """All of a file or nothing. Raises InputError."""
    try:
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def _line(measured: Measured) -> str:
    record = {name: value for name, value in asdict(measured).items() if name != "reason"}
    return json.dumps(record, allow_nan=False) + "\n"


def _lines(path: Path) -> list[str]:
    """Whole lines: the last one is dropped if it has no end."""
    try:
        return [line[:-1] for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{path}: cannot be read: leave out --resume to start anew") from None


def _check_settings(path: Path, line: str, settings: Mapping[str, Any]) -> None:
    try:
        stored = json.loads(line)
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise InputError(f"{path}: no measurements of edge eval kv: leave out --resume to start anew")
    other = [name for name in settings if stored.get(name) != settings[name]]
    if other:
        was, now = (json.dumps(each.get(other[0]))[:80] for each in (stored, settings))
        raise InputError(f"{path} was made with other settings ({other[0]}: {was}, now {now}): leave out --resume")


def _parse(line: str, where: str) -> Measured:
    try:
        record = json.loads(line)
        figures, cache, cell = record["figures"], Cache(**record["cache"]), Cell(**record["cell"])
        if not all(_is_numbers(value) for value in figures.values()):
            raise TypeError
        return Measured(cell, record["task"], cache, FIGURES[record["task"]](**figures))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InputError(f"{where} is no measurement: leave out --resume to start anew") from None


def _is_numbers(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_numbers(each) for each in value)
    return isinstance(value, int | float)

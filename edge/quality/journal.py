"""What has been measured of KV caches, by cell and task, so that a long run which was interrupted can go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge.quality.cells import Cache, Cell
from edge.quality.lines import Lines, are_numbers
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
    """Figures by cell and task, kept in `Lines`. Settings that differ give other figures. Raises InputError."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, resume: bool = False) -> None:
        self._lines = Lines(path, settings, _parse, resume=resume)
        self._found = {(each.cell, each.task): each for each in self._lines.found}

    def find(self, cell: Cell, task: str) -> Measured | None:
        return self._found.get((cell, task))

    def add(self, measured: Measured) -> None:
        """Remember figures; reasons are found again soon enough. On disk before it returns."""
        if measured.figures is None:
            return
        self._found[measured.cell, measured.task] = measured
        self._lines.add({name: value for name, value in asdict(measured).items() if name != "reason"})


def _parse(record: Any) -> Measured:
    figures, cache, cell = record["figures"], Cache(**record["cache"]), Cell(**record["cell"])
    if not all(are_numbers(value) for value in figures.values()):
        raise TypeError
    return Measured(cell, record["task"], cache, FIGURES[record["task"]](**figures))

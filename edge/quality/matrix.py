"""The table of the KV cache's quality: every task in every cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from edge.errors import EdgeError
from edge.quality.cells import Cell, Setup
from edge.quality.journal import Journal, Measured
from edge.quality.perplexity import Advance
from edge.quality.tasks import TASKS, Material

OnProgress = Callable[[str, int, int], None]
"""What is being measured, tokens that have been run, tokens in all."""


def run_matrix(
    setup: Setup, cells: Sequence[Cell], material: Material, journal: Journal, on_progress: OnProgress
) -> Iterator[Measured]:
    """Measure cell by cell. What the journal has is not measured again; what is measured goes there at once.

    What an engine cannot do becomes a reason; but the first cell is the reference, and its errors are raised.
    """
    tasks = {name: material.tokens(name) for name in TASKS if material.tokens(name)}
    total, done = len(cells) * sum(tasks.values()), 0
    for cell in cells:
        for name, tokens in tasks.items():
            label = " ".join(part for part in (cell.policy, cell.kv_dtype, cell.size) if part) + f": {name}"

            def show(count: int, label: str = label, before: int = done) -> None:
                on_progress(label, before + count, total)

            show(0)
            found = journal.find(cell, name)
            if found is None:
                found = _measure(setup, cell, name, material, _counted(show), must=cell is cells[0])
                journal.add(found)
            show(tokens)
            done += tokens
            yield found


def _measure(setup: Setup, cell: Cell, task: str, material: Material, advance: Advance, *, must: bool) -> Measured:
    try:
        cache, figures = TASKS[task](setup, cell, material, advance)
    except EdgeError as error:
        if must:
            raise
        return Measured(cell, task, reason=str(error))
    return Measured(cell, task, cache, figures)


def _counted(show: Callable[[int], None]) -> Advance:
    """Adds up what it is told."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        show(done)

    return advance

"""The quality matrix: every task in every cell, where a cell is one setting of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from edge.backends import find_backend
from edge.backends.importance import ranking_bytes
from edge.budget import format_bytes
from edge.errors import EdgeError
from edge.kv import make_policy
from edge.lab.quality.journal import Journal, are_numbers
from edge.lab.quality.material import LONGEST_CHUNK, TASK_NAMES, Material, Setup
from edge.lab.quality.perplexity import LOGITS_ROWS, Advance, Repeated, Streamed, measure_repeats, stream_documents
from edge.lab.quality.retrieval import Retrieved, recall_compressed, recall_streamed
from edge.lab.quality.windows import Diverged, diverge_documents
from edge.options import AUTO, Options
from edge.plan.engines import plan_here
from edge.plan.kv_losses import KVLoss, remember_losses
from edge.run.session import Session
from edge.run.starting.loading import load

FULL = "full"
_READ_CHUNK = 256  # tokens of a pass where nothing is evicted before the whole text has been read

Figures = Streamed | Repeated | Retrieved | Diverged
_FIGURES: dict[str, type[Streamed] | type[Repeated] | type[Retrieved] | type[Diverged]] = {
    "perplexity": Streamed, "retrieval": Retrieved, "repeat": Repeated, "kl": Diverged,
}  # fmt: skip
OnProgress = Callable[[str, int, int], None]
"""Called with the measurement in progress, tokens that have been run, and tokens in all."""


@dataclass(frozen=True)
class Cell:
    """A requested KV setting. Without a size, the cache has as many rows as the text needs."""

    policy: str
    kv_dtype: str | None = None  # None: the engine's default
    kv_memory: int | None = None  # size in bytes
    max_kv_size: int | None = None  # size in rows

    @property
    def size(self) -> str:
        """The requested size in words."""
        if self.kv_memory:
            return format_bytes(self.kv_memory)
        return f"{self.max_kv_size} rows" if self.max_kv_size else ""


@dataclass(frozen=True)
class Cache:
    """A KV cache as allocated."""

    policy: str
    kv_dtype: str
    rows: int
    nbytes: int  # of all its arrays
    reads: int | None = None  # most rows that a head reads for a token; None: all


@dataclass(frozen=True)
class Measured:
    """A task's figures in a cell, or the reason why there are none."""

    cell: Cell
    task: str
    cache: Cache | None = None
    figures: Figures | None = None
    reason: str = ""


CellJournal = Journal[tuple[Cell, str], Measured]
"""Measurements by cell and task."""


def make_cells(
    policies: Sequence[str], dtypes: Sequence[str | None], sizes: Sequence[int], *, in_rows: bool = False
) -> list[Cell]:
    """The full cache and other policies that evict nothing, in every dtype; then all combinations of the others with
    sizes and dtypes. The first cell is the reference.

    policies: as in --kv-policy. sizes: bytes, or rows. Raises InputError for unknown policies.
    """
    keeping = [FULL, *(each for each in policies if each != AUTO and not make_policy(each).evicts)]
    cells = [Cell(policy, dtype) for policy in keeping for dtype in dtypes]
    for size, policy in product(sizes, (each for each in policies if each not in keeping)):
        for dtype in dtypes if policy != AUTO else [None]:  # the plan chooses the dtype, too
            cells.append(Cell(policy, dtype, max_kv_size=size) if in_rows else Cell(policy, dtype, kv_memory=size))
    return list(dict.fromkeys(cells))


def open_journal(path: Path | None, settings: Mapping[str, Any], *, resume: bool = False) -> CellJournal:
    """Open a journal of cells. Raises InputError, as `Journal` does."""
    return Journal(path, settings, _parse, resume=resume)


def remember(journal: CellJournal, measured: Measured) -> None:
    """Write a cell's figures to the journal. Reasons are not kept, since finding them again costs nothing."""
    if measured.figures is not None:
        record = {name: value for name, value in asdict(measured).items() if name != "reason"}
        journal.add((measured.cell, measured.task), measured, record)


def _parse(record: Any) -> tuple[tuple[Cell, str], Measured]:
    cell, task, cache, figures = Cell(**record["cell"]), record["task"], Cache(**record["cache"]), record["figures"]
    if not all(map(are_numbers, figures.values())):
        raise TypeError
    return (cell, task), Measured(cell, task, cache, _FIGURES[task](**figures))


def run_matrix(
    setup: Setup, cells: Sequence[Cell], material: Material, journal: CellJournal, on_progress: OnProgress
) -> Iterator[Measured]:
    """Measure cell by cell, skipping those in the journal, and add each new measurement to it.

    An engine's error becomes a reason, except in the first cell: it is the reference, and its errors are raised. KL of
    full caches is remembered for plans (`edge.plan.kv_losses`).
    """
    tasks = {name: material.tokens(name) for name in TASK_NAMES if material.tokens(name)}
    total, done = len(cells) * sum(tasks.values()), 0
    for cell in cells:
        for task, tokens in tasks.items():
            label = " ".join(part for part in (cell.policy, cell.kv_dtype, cell.size) if part) + f": {task}"
            run = 0

            def advance(count: int, label: str = label, before: int = done) -> None:
                nonlocal run
                run += count
                on_progress(label, before + run, total)

            advance(0)
            known = journal.find((cell, task))
            found = known or _measure(setup, cell, cells[0], task, material, advance)
            done += tokens
            on_progress(label, done, total)
            yield found  # first, so that a report of an interrupted run has everything that the journal has
            if known is None:
                remember(journal, found)
            _remember_loss(setup, cells[0], found)


def _remember_loss(setup: Setup, reference: Cell, found: Measured) -> None:
    """Keep the KL of a full cache in another dtype than the reference's."""
    if not isinstance(found.figures, Diverged) or found.cell.policy != FULL or found.cache is None:
        return
    backend = find_backend(setup.backend, setup.model.file, setup.model.spec, found.cache.kv_dtype)
    exact, dtype = backend.CAPABILITIES.kv_dtypes[0], found.cache.kv_dtype
    if dtype != exact == (reference.kv_dtype or exact):
        kl, stderr, tokens = found.figures.total
        remember_losses(setup.model.file, backend, {dtype: KVLoss(kl, stderr, tokens)})


def _measure(setup: Setup, cell: Cell, reference: Cell, task: str, material: Material, advance: Advance) -> Measured:
    """Measure a task in a cell. reference: the cell to compare with, whose errors are raised."""
    try:
        with open_cell(setup, cell, material.longest) as session:
            config = session.plan.config
            tables = ranking_bytes(session.spec, session.plan.policy.needs)
            nbytes = session.engine.kv.nbytes + tables
            cache = Cache(session.plan.kv_policy, config.kv_dtype, config.capacity, nbytes, config.reads or None)
            if task == "perplexity":
                return Measured(cell, task, cache, stream_documents(session, material.documents, advance))
            if task == "repeat":
                return Measured(cell, task, cache, measure_repeats(session, material.repeats, advance))
            if task == "kl":
                with open_cell(setup, reference, material.longest) as exact:
                    return Measured(cell, task, cache, diverge_documents(exact, session, material.compared, advance))
            streamed = recall_streamed(session, material.trials, advance)
        return Measured(cell, task, cache, _retrieval(setup, cell, cache, material, streamed, advance))
    except EdgeError as error:
        if cell is reference:
            raise
        return Measured(cell, task, reason=str(error))


def _retrieval(
    setup: Setup, cell: Cell, cache: Cache, material: Material, streamed: list[int], advance: Advance
) -> Retrieved:
    """Complete retrieval: `streamed` was measured in the cell's own cache; the other protocols run here, in a cache
    with room for the whole text, after one compression to the cell's number of rows."""
    trials, longest = material.trials, max(trial.tokens for trial in material.trials)
    roomy = replace(cell, policy=cache.policy, kv_dtype=cache.kv_dtype, kv_memory=None, max_kv_size=longest)
    rows = longest if cell.policy == FULL else cache.rows
    with open_cell(replace(setup, chunk=min(_READ_CHUNK, longest)), roomy, longest) as session:
        once = recall_compressed(session, trials, rows, advance)
    digits, depths = [len(trial.key) for trial in trials], [trial.depth for trial in trials]
    return Retrieved(digits, depths, once.known, once.later, streamed)


def open_cell(setup: Setup, cell: Cell, tokens: int) -> Session:
    """Open a session with the cell's cache, for texts of up to `tokens` tokens."""
    options = Options(
        memory=setup.memory,
        backend=setup.backend,
        kv_policy=cell.policy,
        sinks=setup.sinks,
        max_kv_size=cell.max_kv_size if cell.size else tokens,
        kv_memory=cell.kv_memory,
        kv_dtype=cell.kv_dtype,
        prefill_step_size=setup.chunk,
        threads=setup.threads,
        expected_tokens=tokens,
        logits_rows=LOGITS_ROWS,
    )
    if setup.chunk is None:
        _, planned = plan_here(setup.model.file, setup.model.spec, options)
        options = replace(options, prefill_step_size=min(LONGEST_CHUNK, planned.config.chunk))
    return load(setup.model, options)

"""The cells of the table: what a KV cache may be, and sessions that have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from edge.budget import format_bytes
from edge.kv import DEFAULT_SINKS, make_policy
from edge.model.model import Model
from edge.plan import AUTO, PlanRequest
from edge.quality.perplexity import LOGITS_ROWS
from edge.run.session import Session, load

FULL = "full"


@dataclass(frozen=True)
class Cell:
    """A KV setting as it is asked for. kv_dtype: None is the engine's own. kv_memory: bytes; or max_kv_size: rows; a
    full cache has as many as the text needs."""

    policy: str
    kv_dtype: str | None = None
    kv_memory: int | None = None
    max_kv_size: int | None = None

    @property
    def size(self) -> str:
        """As it was asked for, for people."""
        if self.kv_memory:
            return format_bytes(self.kv_memory)
        return f"{self.max_kv_size} rows" if self.max_kv_size else ""


@dataclass(frozen=True)
class Cache:
    """A KV cache as it was allocated. nbytes: all of its arrays."""

    policy: str
    kv_dtype: str
    rows: int
    nbytes: int


@dataclass(frozen=True)
class Setup:
    """What all cells have in common. chunk: tokens that run at once in a cell's own cache."""

    model: Model
    backend: str
    chunk: int = 64
    sinks: int = DEFAULT_SINKS
    threads: int | None = None


def make_cells(
    policies: Sequence[str], dtypes: Sequence[str | None], sizes: Sequence[int], *, in_rows: bool = False
) -> list[Cell]:
    """The full cache in every dtype, then all combinations. The first one is the reference.

    policies: as in --kv-policy. sizes: bytes, or rows. Raises InputError for policies that there are not.
    """
    for policy in policies:
        if policy != AUTO:
            make_policy(policy)
    cells = [Cell(FULL, dtype) for dtype in dtypes]
    for size, policy in product(sizes, (each for each in policies if each != FULL)):
        for dtype in dtypes if policy != AUTO else [None]:  # the plan chooses that, too
            cells.append(Cell(policy, dtype, max_kv_size=size) if in_rows else Cell(policy, dtype, kv_memory=size))
    return list(dict.fromkeys(cells))


def open_cell(setup: Setup, cell: Cell, tokens: int) -> Session:
    """A session of its own, with the cell's cache, for texts of up to so many tokens."""
    request = PlanRequest(
        kv_policy=cell.policy,
        sinks=setup.sinks,
        max_kv_size=tokens if cell.policy == FULL else cell.max_kv_size,
        kv_memory=None if cell.kv_memory is None else f"{cell.kv_memory}B",
        kv_dtype=cell.kv_dtype,
        prefill_step_size=setup.chunk,
        threads=setup.threads,
        expected_tokens=tokens,
        logits_rows=LOGITS_ROWS,
    )
    return load(setup.model, backend=setup.backend, request=request)


def cache_of(session: Session) -> Cache:
    config = session.plan.config
    return Cache(session.plan.kv_policy, config.kv_dtype, config.capacity, session.engine.kv.nbytes)

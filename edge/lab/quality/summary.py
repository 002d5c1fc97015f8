"""Summary of the quality matrix: figures per cell, relative to the full cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

from edge.lab.quality.matrix import Cell, Measured
from edge.lab.quality.perplexity import Repeated, Streamed
from edge.lab.quality.retrieval import PROTOCOLS, Retrieved
from edge.lab.quality.windows import Diverged

SCHEMA = 1


@dataclass(frozen=True)
class Figure:
    """A mean and its standard error, if there is one."""

    value: float
    stderr: float | None
    over: int  # number of averaged samples
    what: str  # kind of sample


@dataclass(frozen=True)
class Row:
    """A cell's figures.

    figures: perplexity, ratio (to the full cache's), known, later and streamed (digits), repeat, repeat_ratio, kl
    (nats).
    """

    cell: Cell
    policy: str  # this and the next three: as allocated; None without a cache
    kv_dtype: str | None
    rows: int | None
    nbytes: int | None
    tok_s: float | None
    figures: dict[str, Figure] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # by task: why it has no figures
    samples: dict[str, list[float]] = field(default_factory=dict)  # of figures that are means, paired across rows
    reads: int | None = None  # as in `Cache`


def make_rows(measured: Iterable[Measured]) -> list[Row]:
    """One row per cell, in order of arrival; the first cell is the reference."""
    by_cell: dict[Cell, dict[str, Measured]] = {}
    for each in measured:
        by_cell.setdefault(each.cell, {})[each.task] = each
    reference = next(iter(by_cell.values()), {})
    return [_row(cell, found, reference) for cell, found in by_cell.items()]


def to_json(rows: Sequence[Row], settings: dict[str, Any], *, complete: bool) -> dict[str, Any]:
    """Everything but samples, for JSON. Sizes are bytes; `stderr` is null where samples are too few."""
    lines = [{name: each for name, each in asdict(row).items() if name != "samples"} for row in rows]
    return {"schema": SCHEMA, "complete": complete, "settings": settings, "rows": lines}


def _row(cell: Cell, found: dict[str, Measured], reference: dict[str, Measured]) -> Row:
    figures: dict[str, Figure] = {}
    samples: dict[str, list[float]] = {}
    tok_s = None
    for task, each in found.items():
        full = reference[task].figures if task in reference else None
        match each.figures:
            case Streamed() as streamed:
                figures |= _perplexity(streamed, full)
                samples["ratio"] = _blocks(streamed)
                tok_s = sum(streamed.tokens) / streamed.seconds
            case Repeated() as repeated:
                figures |= _repeat(repeated, full)
            case Diverged() as diverged:
                kl, stderr, tokens = diverged.total
                figures["kl"] = Figure(kl, stderr, tokens, "tokens")
            case Retrieved() as retrieved:
                shares = {name: _shares(retrieved, name) for name in PROTOCOLS}
                figures |= {
                    name: Figure(fmean(each), _stderr(each), len(each), "keys") for name, each in shares.items()
                }
                samples["streamed"] = shares["streamed"]
    cache = next((each.cache for each in found.values() if each.cache), None)
    return Row(
        cell=cell,
        policy=cell.policy if cache is None or cache.policy == cell.policy else f"{cell.policy} ({cache.policy})",
        kv_dtype=cache.kv_dtype if cache else cell.kv_dtype,
        rows=cache.rows if cache else None,
        nbytes=cache.nbytes if cache else None,
        tok_s=tok_s,
        figures=figures,
        reasons={task: each.reason for task, each in found.items() if each.reason},
        samples=samples,
        reads=cache.reads if cache else None,
    )


def _perplexity(streamed: Streamed, full: object) -> dict[str, Figure]:
    total, nll = sum(streamed.tokens), _weighted(streamed.nll, streamed.tokens)
    figures = {"perplexity": _exponential(nll, _blocks(streamed), total)}
    if isinstance(full, Streamed) and full.tokens == streamed.tokens:
        more = [one - other for one, other in zip(_blocks(streamed), _blocks(full), strict=True)]
        figures["ratio"] = _exponential(nll - _weighted(full.nll, full.tokens), more, total)
    return figures


def _repeat(repeated: Repeated, full: object) -> dict[str, Figure]:
    total = repeated.tokens * len(repeated.again)
    samples = {"first": repeated.first, "repeat": repeated.again}
    if isinstance(full, Repeated) and len(full.again) == len(repeated.again):
        samples["repeat_ratio"] = [one - other for one, other in zip(repeated.again, full.again, strict=True)]
    return {name: _exponential(fmean(each), each, total) for name, each in samples.items()}


def _shares(retrieved: Retrieved, name: str) -> list[float]:
    return [right / count for right, count in zip(getattr(retrieved, name), retrieved.digits, strict=True)]


def _blocks(streamed: Streamed) -> list[float]:
    return [each for document in streamed.blocks for each in document]


def _exponential(mean: float, samples: Sequence[float], tokens: int) -> Figure:
    """exp of a mean, with a standard error estimated from samples whose mean is (nearly) `mean`."""
    error, value = _stderr(samples), math.exp(min(mean, 700.0))
    return Figure(value, None if error is None else value * error, tokens, "tokens")


def _stderr(samples: Sequence[float]) -> float | None:
    return stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else None


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

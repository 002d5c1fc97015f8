"""The quality of KV settings as a table: what was measured, summed up per cell and set against the full cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any

from edge.quality.matrix import Cell, Measured
from edge.quality.perplexity import BLOCK, Repeated, Streamed
from edge.quality.retrieval import PROTOCOLS, Retrieved

SCHEMA = 1


@dataclass(frozen=True)
class Figure:
    """A mean and its standard error, where it has one; `over`: of how many `what` it is."""

    value: float
    stderr: float | None
    over: int
    what: str


@dataclass(frozen=True)
class Row:
    """A cell's figures by name, see `HEADINGS`; None is what was not measured. reasons: by task, why not.

    policy, kv_dtype, rows, nbytes: as allocated; None where no cache was. samples: what figures are means of, block by
    block and key by key, the same in all rows.
    """

    cell: Cell
    policy: str
    kv_dtype: str | None
    rows: int | None
    nbytes: int | None
    tok_s: float | None
    figures: dict[str, Figure] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


HEADINGS = {
    "perplexity": "perplexity",
    "ratio": "× full",
    "known": "digits, question known",
    "later": "question later",
    "streamed": "streamed",
    "repeat": "repeated segment",
    "repeat_ratio": "× full",
}


def make_rows(measured: Iterable[Measured]) -> list[Row]:
    """One row per cell, in the order in which they come; the first cell is the reference."""
    by_cell: dict[Cell, dict[str, Measured]] = {}
    for each in measured:
        by_cell.setdefault(each.cell, {})[each.task] = each
    reference = next(iter(by_cell.values()), {})
    return [_row(cell, found, reference) for cell, found in by_cell.items()]


def to_json(rows: Sequence[Row], settings: dict[str, Any], *, complete: bool) -> dict[str, Any]:
    """Everything, for programs. Sizes in bytes; `stderr` null where there are too few to tell."""
    lines = [{name: each for name, each in asdict(row).items() if name != "samples"} for row in rows]
    return {"schema": SCHEMA, "complete": complete, "settings": settings, "rows": lines}


def cells_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the table, for people. What nothing was measured of has no column."""
    shown = [name for name in HEADINGS if any(name in row.figures for row in rows)]
    headings = ["policy", "KV", "rows", "allocated", *(HEADINGS[name] for name in shown), "tok/s"]
    return headings, [_line(row, shown) for row in rows]


def reasons_of(rows: Sequence[Row]) -> list[str]:
    """A line for each reason why figures are missing, with the cells that it concerns."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        title = " ".join(part for part in (row.policy, row.kv_dtype, row.cell.size) if part)
        for task, reason in row.reasons.items():
            everything = len(set(row.reasons.values())) == 1 and not row.figures
            cells.setdefault((reason, "" if everything else f" ({task})"), []).append(title)
    return [f"{', '.join(dict.fromkeys(names))}{task}: {reason}" for (reason, task), names in cells.items()]


def notes_of(rows: Sequence[Row], settings: dict[str, Any]) -> list[str]:
    """What the columns mean and how many each figure is a mean of."""
    first = rows[0].figures if rows else {}
    notes = ["All figures are measured; allocated: the bytes of all arrays of the cache; ±: standard error."]
    if "ratio" in first:
        documents = settings["documents"]
        notes.append(
            f"perplexity: {first['perplexity'].over:,} tokens of {len(documents)} document(s), streamed through the "
            f"cache in chunks of {settings['chunk']}. × full: against the first row, token by token; its error from "
            f"the differences of {BLOCK}-token means. tok/s: of this run, with the loss of every token; measured once."
        )
    if "known" in first:
        notes.append(
            f"digits: share of digits told right, greedy, given those before, in {first['known'].over} texts of "
            f"{settings['length']:,} tokens with a 5-digit key at evenly spread depths. question known: all is read, "
            "question too, then the cache is compressed once. question later: compressed before the question. In both "
            "the cache holds everything until then. streamed: never more rows than there are; the text begins with "
            "what will be asked."
        )
    if "repeat" in first:
        over = first["repeat"].over
        notes.append(
            f"repeated segment: perplexity of {over:,} tokens that come again 1,500 tokens later; when they came first "
            f"it was {rows[0].figures['first'].value:.3g} (full cache)."
        )
    return notes


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
            case Retrieved() as retrieved:
                figures |= _retrieval(retrieved)
                samples["streamed"] = _shares(retrieved, "streamed")
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
    )


def _perplexity(streamed: Streamed, full: object) -> dict[str, Figure]:
    total = sum(streamed.tokens)
    blocks = _blocks(streamed)
    nll = _weighted(streamed.nll, streamed.tokens)
    figures = {"perplexity": _exponential(nll, blocks, total, "tokens")}
    if isinstance(full, Streamed) and full.tokens == streamed.tokens:
        more = [one - other for one, other in zip(blocks, _blocks(full), strict=True)]
        figures["ratio"] = _exponential(nll - _weighted(full.nll, full.tokens), more, total, "tokens")
    return figures


def _repeat(repeated: Repeated, full: object) -> dict[str, Figure]:
    total = repeated.tokens * len(repeated.again)
    figures = {
        "first": _exponential(fmean(repeated.first), repeated.first, total, "tokens"),
        "repeat": _exponential(fmean(repeated.again), repeated.again, total, "tokens"),
    }
    if isinstance(full, Repeated) and len(full.again) == len(repeated.again):
        more = [one - other for one, other in zip(repeated.again, full.again, strict=True)]
        figures["repeat_ratio"] = _exponential(fmean(more), more, total, "tokens")
    return figures


def _retrieval(retrieved: Retrieved) -> dict[str, Figure]:
    figures = {}
    for name in PROTOCOLS:
        shares = _shares(retrieved, name)
        figures[name] = Figure(fmean(shares), _stderr(shares), len(shares), "keys")
    return figures


def _blocks(streamed: Streamed) -> list[float]:
    return [each for document in streamed.blocks for each in document]


def _shares(retrieved: Retrieved, name: str) -> list[float]:
    return [right / count for right, count in zip(getattr(retrieved, name), retrieved.digits, strict=True)]


def _exponential(mean: float, samples: Sequence[float], over: int, what: str) -> Figure:
    """exp of a mean; its error by that of the samples which the mean is (nearly) made of."""
    error, value = _stderr(samples), math.exp(min(mean, 700.0))
    return Figure(value, None if error is None else value * error, over, what)


def _stderr(samples: Sequence[float]) -> float | None:
    return stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else None


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _line(row: Row, shown: Sequence[str]) -> list[str]:
    first = [row.policy, row.kv_dtype or "–", _count(row.rows), _bytes(row.nbytes)]
    return [*first, *(_figure(row.figures.get(name), name) for name in shown), _count(row.tok_s)]


def _bytes(count: int | None) -> str:
    """More exactly than elsewhere: cells of one size are to be compared."""
    if count is None:
        return "–"
    return f"{count / (1 << 20):.2f} MiB" if count >= 1 << 20 else f"{count / 1024:.1f} KiB"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _figure(figure: Figure | None, name: str) -> str:
    if figure is None:
        return "–"
    places = 4 if name == "ratio" else 2
    error = "" if figure.stderr is None or name == "perplexity" else f" ± {figure.stderr:.{places}f}"
    return f"{figure.value:.{places}f}{error}"

"""The recommended KV setting, where measurements can distinguish settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from edge.lab.quality.summary import Row

_NAMED = 3  # settings of a tie to name; the others are counted
_LEAST = 8  # differences that a test needs
_FASTER = 1.25  # least speed-up to mention: speeds are measured once, so less is noise
_DOES = {"ratio": "lose{s} least", "streamed": "find{s} most of what was read"}


@dataclass(frozen=True)
class Choice:
    """The recommended setting for a cache size, with the reason."""

    size: str  # as in `Cell`
    row: Row
    sentence: str


def choices(rows: Sequence[Row]) -> list[Choice]:
    """A choice for every size at which measurements distinguish settings, in order."""
    found = [(size, _candidates(rows, size)) for size in dict.fromkeys(row.cell.size for row in rows) if size]
    return [_choose(size, candidates) for size, candidates in found if candidates]


def title(row: Row) -> str:
    return " ".join(part for part in (row.policy, row.kv_dtype) if part)


def figure_words(row: Row, name: str) -> str:
    """A figure with its standard error: perplexity relative to the full cache, or digits."""
    figure = row.figures[name]
    value = f"{figure.value - 1:+.1%}" if name == "ratio" else f"{figure.value:.0%} of digits"
    return value if figure.stderr is None else f"{value} ± {figure.stderr:.{int(name == 'ratio')}%}"


def leaders(rows: Sequence[Row], name: str) -> list[Row]:
    """The best setting, and those within its noise. Higher is better for digits, lower for ratios."""
    best, *others = sorted(rows, key=lambda row: row.figures[name].value, reverse=name != "ratio")
    return [best, *(row for row in others if not apart(best, row, name))]


def apart(one: Row, other: Row, name: str) -> bool:
    """Whether two figures differ significantly at 95 %, by paired differences, since all settings read the same
    texts."""
    mine, others = one.samples[name], other.samples[name]
    if len(mine) != len(others):
        return False
    differences = [first - second for first, second in zip(mine, others, strict=True)]
    if name != "ratio":
        differences += [1.0, -1.0]  # with few keys, even all right or all wrong is uncertain (Agresti)
    left = len(differences) - 1
    if left + 1 < _LEAST:
        return False
    times = 1.96 + 2.37 / left + 2.82 / left**2  # Student's t with `left` degrees of freedom
    return abs(fmean(differences)) > times * stdev(differences) / math.sqrt(left + 1)


def _candidates(rows: Sequence[Row], size: str) -> list[Row]:
    """All comparable rows, without duplicates, such as `auto` where it chose a listed setting."""
    for name in _DOES:
        found: list[Row] = []
        for row in rows:
            same = any(row.figures == each.figures and row.nbytes == each.nbytes for each in found)
            if row.cell.size == size and name in row.figures and not same:
                found.append(row)
        if found:
            return found
    return []


def _choose(size: str, rows: Sequence[Row]) -> Choice:
    where = f"At {size}" if size.endswith("rows") else f"At {size} of KV cache"
    names = [name for name in _DOES if all(name in row.figures for row in rows)]
    kept, said = list(rows), list[str]()
    for name in names:
        best = leaders(kept, name)
        if name == names[0] or len(best) < len(kept):
            said.append(_lead("Of these" if said else where, name, best, len(kept)))
        kept = best
    pick, streaming = kept[0], [row for row in rows if row.cell.policy == "streaming"]
    if len(kept) > 1:
        simple = [row for row in kept if row in streaming]
        pick = simple[0] if simple else max(kept, key=lambda row: row.tok_s or 0.0)
        said.append(f"Take {title(pick)}, {'the simplest' if simple else 'in this run the fastest'} of them.")
    most = leaders(rows, names[-1])
    if pick not in most:
        said.append(f"{title(most[0])} finds more of what was read: {figure_words(most[0], names[-1])}.")
    if streaming and pick not in streaming:
        said.append(_instead(pick, leaders(streaming, names[0])[0], names[0]))
    return Choice(size, pick, " ".join(said))


def _lead(where: str, name: str, best: Sequence[Row], of: int) -> str:
    """A sentence that names the leading settings, or says that noise hides them."""
    last = sorted(best, key=lambda row: row.figures[name].value)[0 if name != "ratio" else -1]
    figures = "perplexity " if name == "ratio" else ""
    figures += figure_words(best[0], name) + (f" to {figure_words(last, name)}" if last is not best[0] else "")
    figures += " against the full cache" if name == "ratio" else ""
    if of == 1:
        return f"{where}, only {title(best[0])} was measured: {figures}."
    if len(best) == of:
        return f"{where}, noise hides which of {of} settings {_DOES[name].format(s='s')}: {figures}."
    noise = ", within noise of each other" if len(best) > 1 else ""
    return f"{where}, {_list(best)} {_DOES[name].format(s='' if noise else 's')}{noise}: {figures}."


def _instead(pick: Row, streaming: Row, name: str) -> str:
    """A sentence about when to prefer the simplest setting."""
    costs = f"perplexity {figure_words(streaming, name)}" if name == "ratio" else figure_words(streaming, name)
    faster = streaming.tok_s / pick.tok_s if streaming.tok_s and pick.tok_s else 1.0
    if faster >= _FASTER:
        return f"Keep {title(streaming)} if speed matters more: {costs}, {faster:.1f} × as fast in this run."
    return f"With {title(streaming)}: {costs}."


def _list(rows: Sequence[Row]) -> str:
    names = [title(row) for row in rows[:_NAMED]]
    names += [f"{len(rows) - _NAMED} more"] if len(rows) > _NAMED else []
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)

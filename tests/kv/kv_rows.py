"""Made-up figures of KV settings, for tests of what is said of them."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

from edge.lab.quality.matrix import Cell
from edge.lab.quality.summary import Figure, Row

SETTINGS = {
    "model": "llama 135M Q4_1", "backend": "cpu", "versions": {"edge": "0.1.0"}, "trials": 20, "length": 2048,
    "documents": [{"name": "a.txt", "tokens": 8000}], "chunk": 64, "seed": 0,
}  # fmt: skip
BLOCKS = 125  # of 64 tokens
KEYS = 20


def make_row(
    policy: str,
    ratio: float | None = None,
    *,
    dtype: str = "int8",
    size: int | None = 12 << 20,
    found: int | None = None,
    noise: float = 0.02,
    tok_s: float = 1000.0,
    blocks: int = BLOCKS,
    rows: int | None = None,
) -> Row:
    """ratio: of its perplexity to the full cache's. found: how many of `KEYS` were found. noise: of a block's loss.

    All read the same text, some blocks of which are harder than others.
    """
    text, own = random.Random(1), random.Random(f"{policy} {dtype} {size}")
    figures: dict[str, Figure] = {}
    samples: dict[str, list[float]] = {}
    if ratio is not None:
        full = [text.gauss(3.1, 0.4) for _ in range(blocks)]
        more = [math.log(ratio) + own.gauss(0, noise) for _ in full]
        more = [each - fmean(more) + math.log(ratio) for each in more]  # exactly this ratio
        value, error = math.exp(fmean(more)), stdev(more) / math.sqrt(blocks) if blocks > 1 else None
        samples["ratio"] = [one + other for one, other in zip(full, more, strict=True)]
        figures["perplexity"] = Figure(math.exp(fmean(samples["ratio"])), 0.5, 64 * blocks, "tokens")
        figures["ratio"] = Figure(value, None if error is None else value * error, 64 * blocks, "tokens")
    if found is not None:
        samples["streamed"] = [1.0 * (key < found) for key in range(KEYS)]
        share = Figure(found / KEYS, stdev(samples["streamed"]) / math.sqrt(KEYS), KEYS, "keys")
        figures |= {"known": share, "later": share, "streamed": share}
    cell = Cell(policy, dtype, None if rows else size, rows)
    return Row(cell, policy, dtype, 512, size or 184_320_000, tok_s, figures, {}, samples)


def make_table(sizes: tuple[int, ...] = (6 << 20, 11_796_480)) -> list[Row]:
    """A whole one, with all that a page has to show."""
    rows = [make_row("full", 1 + 0.0015 * number, dtype=dtype, size=None, found=KEYS, noise=1e-3)
            for number, dtype in enumerate(("f16", "int8"))]  # fmt: skip
    policies = ("h2o", "h2o:aging=0.75", "scissorhands", "snapkv:window=16", "streaming", "window")
    for number, size in enumerate(sizes):
        for rank, policy in enumerate(policies):
            for dtype in ("f16", "int8"):
                ratio = 1.02 + 0.02 * rank + 0.03 * (dtype == "f16") + 0.05 * (number == 0) + (policy == "window")
                rows.append(make_row(policy, ratio, dtype=dtype, size=size, found=18 - 3 * rank, tok_s=1500 + rank))
    for row in rows:
        again = Figure(20 * row.figures["ratio"].value, 1.1, 960, "tokens")
        row.figures.update({"first": Figure(24.0, 1.0, 960, "tokens"), "repeat": again, "repeat_ratio": again})
    return [*rows, missing("fastgen", sizes[0])]


def missing(policy: str, size: int) -> Row:
    return Row(Cell(policy, "int4", size), policy, None, None, None, None, {}, {"perplexity": "it cannot"})

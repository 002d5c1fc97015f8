"""What a small KV cache costs in quality: perplexity of long real texts against the full cache, at equal bytes.

Every policy gets the bytes of 512 rows in f16 (11.25 MiB of SmolLM2-135M), as f16 rows and as about twice as many int8
rows. Speed is that of the evaluation, in chunks of 64 tokens, and says what choosing costs; it is measured once.
"""

from __future__ import annotations

import argparse
import time

from text import long_text

import edge
from edge.cli.show import table
from edge.kv import POLICY_NAMES
from edge.quality.perplexity import LOGITS_ROWS
from edge.types import IntArray

MODEL, ROWS = "smollm2-135m", 512
DOCUMENTS = ("secI8.html", "secJ3.html", "secI5.html", "secJ5.html")
CELLS = [("full", "f16")] + [(name, dtype) for name in POLICY_NAMES if name != "full" for dtype in ("f16", "int8")]


def measure(model: edge.Model, tokens: IntArray, policy: str, dtype: str) -> tuple[float, int, float]:
    """Perplexity, rows, tokens per second."""
    count = tokens.size - 1
    size = {"max_kv_size": count} if policy == "full" else {"kv_memory": ROWS * 2 * model.spec.kv_values_per_row}
    options = {"kv_policy": policy, "kv_dtype": dtype, "expected_tokens": count, "prefill_step_size": 64}
    with edge.load(model, logits_rows=LOGITS_ROWS, **options, **size) as session:
        started = time.perf_counter()
        figure = edge.perplexity(session, tokens).perplexity
        return figure, session.engine.kv.capacity, count / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8000, help="of each document")
    parser.add_argument("--documents", default=",".join(DOCUMENTS))
    options = parser.parse_args()
    model = edge.open_model(MODEL)
    documents = options.documents.split(",")
    texts = [
        model.encode_prompt(long_text(name).read_text(encoding="utf-8"), raw=True)[: options.tokens + 1]
        for name in documents
    ]
    lines, full = [], [0.0] * len(texts)
    for policy, dtype in CELLS:
        figures = [measure(model, tokens, policy, dtype) for tokens in texts]
        if policy == "full":
            full = [each for each, _, _ in figures]
        ratios = [each / whole for (each, _, _), whole in zip(figures, full, strict=True)]
        rows, speed = figures[0][1], sum(each for _, _, each in figures) / len(figures)
        mean = sum(ratios) / len(ratios)
        lines.append([policy, dtype, str(rows), f"{mean:.4f}", *(f"{each:.4f}" for each in ratios), f"{speed:,.0f}"])
        print(" ".join(lines[-1]), flush=True)
    print(f"\n## Perplexity of {options.tokens} tokens of each document, × the full cache's\n")
    print(table(["policy", "KV", "rows", "mean", *documents, "tok/s"], lines, left=2))


if __name__ == "__main__":
    main()

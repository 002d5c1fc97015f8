"""What a small KV cache costs in quality: perplexity of long real texts at 512 rows against the full cache."""

from __future__ import annotations

import argparse

from text import long_text

import edge
from edge.cli.show import table
from edge.evaluate import LOGITS_ROWS

MODEL, ROWS = "smollm2-135m", 512
DOCUMENTS = ("secI8.html", "secJ3.html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of each document")
    count = parser.parse_args().tokens
    model = edge.open_model(MODEL)
    lines = []
    for document in DOCUMENTS:
        tokens = model.encode_prompt(long_text(document).read_text(encoding="utf-8"), raw=True)[: count + 1]
        full = 0.0
        for policy, rows in (("full", count), ("streaming", ROWS), ("window", ROWS)):
            options = {"kv_policy": policy, "max_kv_size": rows, "expected_tokens": count, "logits_rows": LOGITS_ROWS}
            with edge.load(model, **options) as session:
                perplexity = edge.perplexity(session, tokens).perplexity
            full = full or perplexity
            lines.append([document, policy, str(rows), f"{perplexity:.3f}", f"{perplexity / full:.3f}"])
    print(f"\n## Perplexity of the first {count} tokens\n")
    print(table(["document", "policy", "KV rows", "perplexity", "× full"], lines, left=2))


if __name__ == "__main__":
    main()

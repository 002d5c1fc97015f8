"""What a small KV cache costs in quality: perplexity of a long real text at 512 rows against the full cache."""

from __future__ import annotations

from text import long_text

import edge
from edge.cli.show import table
from edge.evaluate import LOGITS_ROWS

MODEL, TOKENS, ROWS = "smollm2-135m", 8000, 512


def main() -> None:
    model = edge.open_model(MODEL)
    tokens = model.encode_prompt(long_text().read_text(encoding="utf-8"), raw=True)[: TOKENS + 1]
    results = {}
    for policy, rows in (("full", TOKENS), ("streaming", ROWS), ("window", ROWS)):
        options = {"kv_policy": policy, "max_kv_size": rows, "expected_tokens": TOKENS, "logits_rows": LOGITS_ROWS}
        with edge.load(model, **options) as session:
            results[policy] = (rows, edge.perplexity(session, tokens))
    full = results["full"][1].perplexity
    print(f"\n## Perplexity of {TOKENS} tokens\n")
    lines = [
        [name, str(rows), f"{result.perplexity:.3f}", f"{result.perplexity / full:.3f}"]
        for name, (rows, result) in results.items()
    ]
    print(table(["policy", "KV rows", "perplexity", "× full"], lines))


if __name__ == "__main__":
    main()

"""The cost of the native engine's 8-bit activations: perplexity of real texts, against llama.cpp on the same file.

Every document is run through a full f16 cache, in both engines. `--model` takes any GGUF file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from text import long_text

import edge
from edge.cli.terminal.show import table
from edge.lab.quality.perplexity import LOGITS_ROWS
from edge.model.model import Model

DOCUMENTS = ("secI8.html", "secJ3.html", "secI5.html", "secJ5.html", "secI4.html", "secJ7.html")
ENGINES = (("llamacpp", "f16"), ("cpu", "f16"), ("cpu", "int8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096, help="of each document")
    options = parser.parse_args()
    model = edge.open_model(options.model)
    lines, first, count = [], 0.0, 0
    for backend, kv_dtype in ENGINES:
        perplexity, count = perplexity_of(model, backend, kv_dtype, DOCUMENTS, options.tokens)
        first = first or perplexity
        lines.append([backend, kv_dtype, f"{perplexity:.4f}", f"{perplexity / first:.4f}"])
    print(f"\n## Perplexity of {count} tokens in {len(DOCUMENTS)} documents, {model.spec.label}\n")
    print(table(["engine", "KV", "perplexity", "× llama.cpp"], lines, left=2))


def perplexity_of(
    model: Model, backend: str, kv_dtype: str, documents: Sequence[str], tokens: int
) -> tuple[float, int]:  # fmt: skip
    """The perplexity of `tokens` tokens of each document, and their total number."""
    texts = [model.encode_prompt(long_text(name).read_text(encoding="utf-8"), raw=True) for name in documents]
    settings = {"backend": backend, "kv_dtype": kv_dtype, "kv_policy": "full", "max_kv_size": tokens}
    with edge.load(model, logits_rows=LOGITS_ROWS, expected_tokens=tokens, **settings) as session:
        figures = [edge.perplexity(session, text, max_tokens=tokens) for text in texts]
    count = sum(figure.tokens for figure in figures)
    return math.exp(sum(figure.nll * figure.tokens for figure in figures) / count), count


if __name__ == "__main__":
    main()

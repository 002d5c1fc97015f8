"""An upper bound of the gain from recalling evicted rows.

Eviction forgets rows; rows kept in slow memory or on disk could be recalled when they matter again. Here recall is
free: before every chunk of 64 tokens, each head gets the rows of the *whole* past with the most attention from the last
64 queries, as many as fast memory holds. A real scheme would also have to estimate the attention of absent rows. The
table compares it with H2O, which forgets, in the same number of rows, and with the full cache.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from text import long_text

import edge
from edge.backends.base import EngineConfig
from edge.backends.tvm.engine import NativeEngine
from edge.cli.terminal.show import table
from edge.kv.policy import Needs, best_rows
from edge.lab.quality.perplexity import LOGITS_ROWS, token_loss
from edge.run.sequences.eviction import view_for
from edge.types import IntArray

MODEL, DOCUMENTS, CHUNK = "smollm2-135m", ("secI8.html", "secJ3.html"), 64


def recalled(model: edge.Model, tokens: IntArray, rows: int) -> float:
    """Perplexity with `rows` chosen anew for every chunk from the whole past."""
    config = EngineConfig(tokens.size, CHUNK, "f16", threads=2, logits_rows=CHUNK, observes=True, per_head=True)
    whole, small = (NativeEngine(model.file, model.spec, config) for _ in range(2))
    losses = []
    for start in range(0, tokens.size - 1, CHUNK):
        part = tokens[start : min(start + CHUNK, tokens.size - 1)]
        _copy(whole, small)
        if whole.kv.length > rows:
            view = view_for(whole.kv, Needs(queries=CHUNK))
            assert view.attention.size
            small.kv.keep_heads(best_rows(view.attention, view, rows, 4, rows // 4))
        logits = small.forward_all(part)
        losses += [token_loss(line, int(wanted)) for line, wanted in zip(logits, tokens[start + 1 :], strict=False)]
        whole.kv.clear_attention()
        whole.observe(CHUNK)
        whole.forward(part)
    whole.close()
    small.close()
    return math.exp(float(np.mean(losses)))


def _copy(whole: NativeEngine, small: NativeEngine) -> None:
    small.kv.truncate(0)
    if whole.kv.length:
        small.kv.append(whole.kv.save())


def bounded(model: edge.Model, tokens: IntArray, policy: str, rows: int) -> float:
    options = {"kv_policy": policy, "max_kv_size": rows, "prefill_step_size": CHUNK, "expected_tokens": tokens.size}
    with edge.load(model, kv_dtype="f16", logits_rows=LOGITS_ROWS, **options) as session:
        return edge.perplexity(session, tokens).perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="of each document")
    parser.add_argument("--rows", default="128,256,512")
    options = parser.parse_args()
    model, lines = edge.open_model(MODEL), []
    for name in DOCUMENTS:
        text = long_text(name).read_text(encoding="utf-8")
        tokens = model.encode_prompt(text, raw=True)[: options.tokens + 1]
        full = bounded(model, tokens, "full", tokens.size - 1)
        for rows in map(int, options.rows.split(",")):
            kept = bounded(model, tokens, "h2o", rows)
            bound = recalled(model, tokens, rows - CHUNK)  # including room for one chunk, as in a session
            lines.append([name, str(rows), f"{kept / full:.4f}", f"{bound / full:.4f}"])
            print(" ".join(lines[-1]), flush=True)
    print(f"\n## Perplexity of {options.tokens} tokens, × the full cache's\n")
    print(table(["document", "rows", "h2o, forgetting", "recalled, for free"], lines))


if __name__ == "__main__":
    main()

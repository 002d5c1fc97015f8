"""A head in two stages against the whole head: the same tokens, bytes and time.

    python benchmarks/head.py [--models smollm2-135m,gemma3-270m] [--tokens 96] [--rounds 5]

The engine continues each prompt greedily, `--tokens` tokens by either way in turns, and both must choose the same. A
share counts tiles of 16 rows that the second stage read, per token. Speed: medians of the rounds, without sampling and
text; the machine should be quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
from machine import machine, say

import edge
from edge.cli.terminal.show import table
from edge.types import IntArray

PROMPTS = (
    "Write a story about a lighthouse keeper.",
    "def quicksort(values):\n    if len(values) <= 1:\n        return values\n",
    "The causes of the First World War were",
    "Expliquez comment fonctionne une bicyclette.",
)


def decode(engine: Any, prompt: IntArray, count: int, *, whole: bool) -> tuple[list[int], list[int], float]:
    """Tokens, tiles that the second stage read for each (-1: the whole head), and seconds."""
    engine.kv.truncate(0)
    token, tokens, tiles = int(engine.forward(prompt).argmax()), list[int](), list[int]()
    started = time.perf_counter()
    for _ in range(count):
        tokens.append(token)
        given = np.array([token], np.int32)
        if whole:
            token = int(engine.forward(given).argmax())
            continue
        read, through = engine.stages.tiles_read, engine.stages.tokens
        (found,), _ = engine.forward_top(given, 1)
        tiles.append(engine.stages.tiles_read - read if engine.stages.tokens > through else -1)
        token = int(found)
    return tokens, tiles, time.perf_counter() - started


def measure(name: str, count: int, rounds: int) -> dict[str, Any]:
    with edge.load(name, backend="cpu", max_kv_size=1024) as session:
        engine: Any = session.engine
        if not engine.most_candidates:
            raise SystemExit(f"{name}: its head is not read in two stages")
        seconds: dict[bool, list[float]] = {False: [], True: []}
        tiles = list[int]()
        prompts = [np.asarray(session.tokenizer.encode(text), np.int32) for text in PROMPTS]
        for number in range(rounds):
            for prompt in prompts:
                found = {}
                for whole in (False, True) if number % 2 else (True, False):
                    found[whole], read, spent = decode(engine, prompt, count, whole=whole)
                    seconds[whole].append(spent / count)
                    tiles += read
                if found[True] != found[False]:
                    raise SystemExit(f"{name}: the tokens differ")
            say(f"{name}: round {number + 1} of {rounds}")
        all_tiles = -(-engine.spec.vocab // 16)
        shares = [each / all_tiles for each in tiles if each >= 0]
        ratios = [one / two for one, two in zip(seconds[True], seconds[False], strict=True)]
        return {
            "model": name,
            "median_share": statistics.median(shares),
            "p90_share": float(np.percentile(shares, 90)),
            "whole_heads": tiles.count(-1) / len(tiles),
            "whole_tok_s": 1 / statistics.median(seconds[True]),
            "two_stages_tok_s": 1 / statistics.median(seconds[False]),
            "ratio": statistics.median(ratios),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2-135m,gemma3-270m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(name, args.tokens, args.rounds) for name in args.models.split(",")]
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    print(machine())
    print(table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

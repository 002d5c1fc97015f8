"""What a pass over a block of tokens costs, in steps of the same model: what decoding in blocks could gain on this CPU.

    python benchmarks/blocks.py [--models qwen3:1.7b,ministral3:3b] [--type q4_0] [--rows 512] [--rounds 9]

c(n) is the time of a pass of n tokens with all logits, behind --rows rows, by that of a step; weights are random, in
real shapes. Block diffusion takes a pass for every few tokens, and another one that commits the block. So it decodes
n / (n / t · c(n) + c(n)) = 1 / (1 / t + 1 / n) / c(n) times as fast as steps do, with t tokens a pass as published:
2.57 for Nemotron-Labs-Diffusion 8B with blocks of 32 (arXiv:2607.05722). Self-speculation takes two passes a round, and
its rounds 4 to 5 tokens: 4.5 / (2 · c(n)). Both times are medians of rounds that take turns, and the CPU time's ratio
is beside the clock's, since other programs disturb it less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from eagle_cost import RANDOM, model_file
from machine import machine, say

from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.cli.terminal.show import table
from edge.model.reader import read_spec

SIZES = (1, 4, 8, 16, 32)
A_PASS, A_ROUND = 2.57, 4.5  # tokens: published for diffusion with blocks of 32, and assumed for self-speculation


def measure(folder: Path, name: str, args: Any) -> dict[int, tuple[float, float]]:
    """Median milliseconds of a pass, by the clock and of CPU time, by its number of tokens."""
    model = model_file(folder / "model.gguf", name, args.type)
    spec = read_spec(model)
    config = EngineConfig(args.rows + 64, 64, "f16", args.threads, max(SIZES))
    engine: Any = engine_named("cpu").load(model, spec, config)
    tokens = RANDOM.integers(0, spec.vocab, args.rows + max(SIZES)).astype(np.int32)
    engine.forward(tokens[: args.rows])
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}
    for number in range(args.rounds + 1):
        for size in SIZES:
            started = time.perf_counter(), time.process_time()
            engine.forward_all(tokens[args.rows : args.rows + size])
            if number:  # the first round reads the weights from the disk
                found[size].append((time.perf_counter() - started[0], time.process_time() - started[1]))
            engine.kv.truncate(args.rows)
    engine.close()
    return {
        size: tuple(1e3 * statistics.median(each) for each in zip(*times, strict=True)) for size, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3:1.7b,ministral3:3b")
    parser.add_argument("--type", default="q4_0")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for name in args.models.split(","):
        say(f"{name} ...")
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), name, args)
        for size, (clock, cpu) in found.items():
            cost = clock / found[1][0]
            lines.append({
                "model": name, "tokens": size, "ms": clock, "cost": cost, "cpu_cost": cpu / found[1][1],
                "diffusion": 1 / (1 / A_PASS + 1 / size) / cost if size >= 8 else None,
                "speculation": A_ROUND / (2 * cost) if size >= 8 else None,
            })  # fmt: skip
    if args.json:
        print(json.dumps({"machine": machine(), "passes": lines}))
        return
    say(f"{machine()}\n")
    headings = ["model", "tokens", "ms", "c(n)", "of CPU time", "diffusion, ×", "self-speculation, ×"]
    print(table(headings, [
        [line["model"], str(line["tokens"]), f"{line['ms']:.1f}", f"{line['cost']:.2f}", f"{line['cpu_cost']:.2f}",
         *(f"{line[key]:.2f}" if line[key] else "" for key in ("diffusion", "speculation"))]
        for line in lines
    ]))  # fmt: skip


if __name__ == "__main__":
    main()

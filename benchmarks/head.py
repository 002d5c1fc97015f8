"""A head in two stages against the whole head: the same tokens, bytes and time.

    python benchmarks/head.py [--models gemma3-270m] [--tokens 96] [--rounds 5] [--app]
    python benchmarks/head.py --llama-bench PATH [--llama-args "-t 2 -fa 1 -rtr 1"]

The engine continues each prompt greedily, `--tokens` tokens by either way in turns, and both must choose the same. A
share counts tiles of 16 rows that the second stage read, per token. Speed: medians of the rounds, without sampling and
text; the machine should be quiet.

--app: the C library of `edge export` instead, with sampling and text, and one whose head is not packed for two stages
(unsplit). A session reads the whole head where a penalty needs all logits; here one that is too small to change any.

--llama-bench: of a build of llama.cpp or of a fork (-rtr is ik_llama.cpp's), which decodes as many tokens of the same
file after each prompt of edge's, in a process of its own that has loaded before it counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from llama_bench import LlamaBench
from machine import machine, say

import edge
from edge.apps.enums import Role, Speculate
from edge.backends.tvm.packing import layout
from edge.backends.tvm.targets import choose_target
from edge.cli.terminal.show import table
from edge.types import IntArray

sys.path.append(str(Path(__file__).parent.parent / "tests" / "apps"))
from ctypes_bundle import BundleSession, open_bundle

NO_PENALTY = 1e-30

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


def measure(name: str, count: int, rounds: int, llama: LlamaBench | None) -> dict[str, Any]:
    with edge.load(name, backend="cpu", max_kv_size=1024) as session:
        engine: Any = session.engine
        if not engine.most_candidates:
            raise SystemExit(f"{name}: its head is not read in two stages")
        seconds: dict[str, list[float]] = {"whole": [], "two_stages": []}
        theirs = list[float]()
        tiles = list[int]()
        prompts = [np.asarray(session.tokenizer.encode(text), np.int32) for text in PROMPTS]
        for number in range(rounds):
            for prompt in prompts:
                found = {}
                for way in list(seconds)[:: -1 if number % 2 else 1]:
                    found[way], read, spent = decode(engine, prompt, count, whole=way == "whole")
                    seconds[way].append(spent / count)
                    tiles += read
                if found["whole"] != found["two_stages"]:
                    raise SystemExit(f"{name}: the tokens differ")
                if llama:
                    theirs.append(1 / llama.run(session.model.file.path, 0, count)["decode"])
            say(f"{name}: round {number + 1} of {rounds}")
        all_tiles = -(-engine.spec.vocab // 16)
        shares = [each / all_tiles for each in tiles if each >= 0]
        beside = dict[str, Any]()
        if llama:
            ratio = ratio_of(theirs, seconds["two_stages"])
            beside = {"llama_bench_tok_s": 1 / statistics.median(theirs), "two_stages_over_it": ratio}
        return {
            "model": name,
            "median_share": statistics.median(shares),
            "p90_share": float(np.percentile(shares, 90)),
            "whole_heads": tiles.count(-1) / len(tiles),
            **speeds(seconds),
            **beside,
        }


def speeds(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """seconds: of a token, by ways that took turns. Ratios: of the first way's time to the others'."""
    first, *others = seconds
    found = {f"{way}_tok_s": 1 / statistics.median(times) for way, times in seconds.items()}
    return found | {f"{way}_ratio": ratio_of(seconds[first], seconds[way]) for way in others}


def ratio_of(first: list[float], second: list[float]) -> float:
    """The median of ratios of runs side by side."""
    return statistics.median(one / other for one, other in zip(first, second, strict=True))


def answer(session: BundleSession, prompt: str, count: int, *, whole: bool) -> tuple[list[int | None], float]:
    """Tokens, and seconds of each but the first."""
    penalty = {"frequency_penalty": NO_PENALTY} if whole else {}
    session.set(temperature=0, ignore_eos=1, max_tokens=count, speculate=Speculate.OFF, **penalty)
    session.rewind()
    session.append(Role.RAW, prompt)
    tokens = [session.next().token]
    started = time.perf_counter()
    tokens += [piece.token for piece in session.pieces()]
    return tokens, (time.perf_counter() - started) / (len(tokens) - 1)


def export_app(name: str, folder: Path, least_share: float) -> Path:
    """A bundle for this machine. least_share: of a token's bytes, for which a head is packed for two stages."""
    layout.make_layout.cache_clear()
    with patch.object(layout, "_LEAST_SHARE", least_share):
        edge.export(name, folder, isas=[choose_target().name], max_kv_size=1024)
    layout.make_layout.cache_clear()
    return folder


def measure_app(name: str, count: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"unsplit": [], "whole": [], "two_stages": []}
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        folders = [export_app(name, Path(work) / title, share) for title, share in (("unsplit", 2), ("split", 0))]
        bundles = [stack.enter_context(open_bundle(folder)) for folder in folders]
        unsplit, split = (stack.enter_context(bundle.session()) for bundle in bundles)
        for number in range(rounds):
            for prompt in PROMPTS:
                found = {}
                for way in list(seconds)[:: 1 if number % 2 else -1]:
                    session = unsplit if way == "unsplit" else split
                    found[way], spent = answer(session, prompt, count, whole=way != "two_stages")
                    seconds[way].append(spent)
                if len(set(map(tuple, found.values()))) > 1:
                    raise SystemExit(f"{name}: the tokens differ")
            say(f"{name}: round {number + 1} of {rounds}")
    return {"model": name, **speeds(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gemma3-270m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--app", action="store_true", help="measure the C library")
    parser.add_argument("--llama-bench", type=Path, help="measure this llama-bench beside the engine")
    parser.add_argument("--llama-args", default="", help="more of its arguments")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.app and args.llama_bench:
        parser.error("--llama-bench is measured beside the engine, without --app")
    llama = LlamaBench(args.llama_bench, tuple(args.llama_args.split())) if args.llama_bench else None
    rows = [
        measure_app(name, args.tokens, args.rounds) if args.app else measure(name, args.tokens, args.rounds, llama)
        for name in args.models.split(",")
    ]
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    print(machine())
    print(table(list(rows[0]), [[_shown(value) for value in row.values()] for row in rows]))


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

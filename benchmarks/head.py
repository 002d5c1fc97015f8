"""Decoding with the head in two stages and with the whole head: the same tokens, fewer bytes.

Two engines of one process take turns, token by token, along the same texts. Of the head in two stages: the bytes that
it reads, and the tiles of 16 rows that its second stage reads, of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine, say

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.largest import top_k
from edge.backends.tvm.ranking import first_stage
from edge.cli.terminal.show import table
from edge.devices.host import usable_cores
from edge.model.model import Model, open_model
from edge.types import IntArray

_HERE = Path(__file__).parents[1]
TEXTS = {"prose": _HERE / "LICENSE", "documentation": _HERE / "docs/kv-cache.md", "code": _HERE / "edge/run/session.py"}
_BEGINNING = 32  # tokens of a text that go before the answer
_PASSES = 8  # that follow each token of the text


def compare(whole: Any, ranking: Any, text: IntArray, count: int, tokens: int) -> dict[str, float]:
    """Greedy answers of a few tokens to ever longer beginnings of the text; seconds per token of both engines."""
    engines = (whole, ranking)
    spent: list[list[float]] = [[], []]
    read = []
    ranking.accounts.clear()
    for start in range(_BEGINNING, text.size, max(1, (text.size - _BEGINNING) * _PASSES // tokens)):
        for engine in engines:
            engine.kv.truncate(0)
            engine.forward(text[:start])
        token = text[start : start + 1]
        for number in range(_PASSES if token.size else 0):
            found: list[Any] = [None, None]
            for which in (number % 2, 1 - number % 2):
                began = time.perf_counter()
                if which:
                    found[1] = ranking.forward_top(token, count)
                else:
                    logits = whole.forward(token)
                    ids = np.array([logits.argmax()], np.int32) if count == 1 else top_k(logits, count)
                    found[0] = ids, logits[ids]
                spent[which].append(time.perf_counter() - began)
            for one, other in zip(*found, strict=True):
                assert (one == other).all(), (start, number)
            read.append(ranking.accounts[count].last)
            token = found[0][0][:1]
    paired = [one / other for one, other in zip(*spent, strict=True)]
    tiles = [1.0 if each is None else each for each in read]
    shares = [1.0 if each is None else first_stage(ranking.spec) + each for each in read]
    return {
        "whole": 1 / statistics.median(spent[0]),
        "ranked": 1 / statistics.median(spent[1]),
        "ratio": statistics.median(paired),
        "tiles": 100 * float(np.median(tiles)),
        "tiles p99": 100 * float(np.percentile(tiles, 99)),
        "bytes": 100 * float(np.mean(shares)),
    }


def load(model: Model, threads: int, *, ranks: bool) -> Any:
    module = find_backend("cpu", model.file, model.spec)
    return module.load(model.file, model.spec, EngineConfig(2048, 256, "f16", threads, ranks=ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["gemma3-270m", "smollm2-135m"])
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 5, 40])
    parser.add_argument("-n", "--tokens", type=int, default=400, help="of each text")
    parser.add_argument("-t", "--threads", type=int, default=usable_cores())
    arguments = parser.parse_args()
    print(json.dumps(machine()))
    for name in arguments.model:
        model, rows = open_model(name), []
        with (
            closing(load(model, arguments.threads, ranks=False)) as whole,
            closing(load(model, arguments.threads, ranks=True)) as ranking,
        ):
            for kind, path in TEXTS.items():
                text = model.tokenizer.encode(path.read_text()[:6000])[:1000]
                for count in arguments.top_k:
                    say(f"{name}, {kind}, the {count} largest logits")
                    found = compare(whole, ranking, np.asarray(text, np.int32), count, arguments.tokens)
                    rows.append([
                        kind, str(count), f"{found['whole']:,.1f}", f"{found['ranked']:,.1f}", f"{found['ratio']:.2f}",
                        f"{found['bytes']:.0f}", f"{found['tiles']:.1f}", f"{found['tiles p99']:.0f}",
                    ])  # fmt: skip
        print(f"\n{name}\n")
        head = ["text", "largest", "whole, tok/s", "two stages, tok/s", "ratio", "head read, %", "tiles, %", "p99"]
        print(table(head, rows))


if __name__ == "__main__":
    main()

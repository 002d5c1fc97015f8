"""A tokenizer's first start, which makes its tables, and the next one, which maps them; and llama.cpp's own.

Each is a process of its own; rounds are interleaved, figures are medians. MODEL: files or installed names; a file that
holds a vocabulary alone will do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge.backends.llamacpp.tokenizer import LlamaCppTokenizer
from edge.cli.terminal.show import table
from edge.devices.memory import memory_use
from edge.formats.gguf import GGUFFile, TensorInfo, read_gguf
from edge.model.names.catalog import find_model
from edge.model.tokens.tokenizer import Tokenizer, TokenizerLike

TEXT = "The quick brown fox jumps over the lazy dog, 1,234 times. " * 4000
_FIGURES = ("start", "encode", "rss", "peak")
KINDS = ("first start", "warm start", "llama.cpp's")


def with_embedding(file: GGUFFile) -> GGUFFile:
    """A vocabulary alone as if it had an embedding, by whose height tokenizers check it."""
    name = "token_embd.weight"
    size = file.count("tokenizer.ggml.tokens")
    return replace(file, tensors={name: TensorInfo(name, (1, size), "F32", 0, 0, 4 * size), **file.tensors})


def measure(path: str, kind: str) -> dict[str, float]:
    """CPU-seconds of a start and of encoding TEXT; MiB of resident memory after the start and at its peak."""
    file = with_embedding(read_gguf(Path(path)))
    before, began = memory_use().rss, time.process_time()
    tokenizer: TokenizerLike = LlamaCppTokenizer(file) if kind == KINDS[2] else Tokenizer(file)
    started, after = time.process_time() - began, memory_use()
    began = time.process_time()
    tokenizer.encode(TEXT)
    encoded = time.process_time() - began
    return {
        "start": started, "encode": encoded, "rss": (after.rss - before) / 2**20, "peak": (after.peak - before) / 2**20,
    }  # fmt: skip


def in_a_child(path: str, kind: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, path]
    done = subprocess.run(
        command, env={**os.environ, "EDGE_CACHE": cache}, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, float] = json.loads(done)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("model", nargs="*", default=["smollm2-135m", "gemma3-270m"])
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(measure(chosen.model[0], chosen.child)))
        return
    paths = {model: str(find_model(model)) for model in chosen.model}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as tried:
        for path in paths.values():
            in_a_child(path, KINDS[2], tried)  # the child's own try, once
        for _ in range(chosen.rounds):
            for model, path in paths.items():
                with tempfile.TemporaryDirectory() as cache:
                    for kind, folder in zip(KINDS, (cache, cache, tried), strict=True):
                        found.setdefault((model, kind), []).append(in_a_child(path, kind, folder))
    rows = []
    for (model, kind), runs in found.items():
        start, encode, rss, peak = (statistics.median(run[key] for run in runs) for key in _FIGURES)
        rows.append([Path(model).stem, kind, f"{start:.3f}", f"{rss:.1f}", f"{peak:.1f}", f"{1000 * encode:.0f}"])
    headings = ["model", "tokenizer", "CPU-s", "MiB", "peak MiB", f"CPU-ms for {len(TEXT) >> 10} KiB of text"]
    print(table(headings, rows, left=2))
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    print(next((line for line in lines if line.startswith("Model name")), ""))


if __name__ == "__main__":
    main()

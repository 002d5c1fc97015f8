"""Weights larger than the budget: tokens, peak and speed at shares of weights + KV, against the prediction.

    python benchmarks/streaming.py [--rounds 3] [--shares 1,0.8,0.6,0.5] [--model NAME_OR_FILE ...] [--short]

A share is the part of weights and KV rows for which `--memory` leaves room. Runs are interleaved, each in a process of
its own. Of its steps, and of its passes of one chunk, the fastest tenth counts, which other processes disturb least.
slower: their time over that without streaming. predicted: from the bytes that the plan streams and the cost of their
pages, measured beforehand, and the time of a pass that streams nothing. Weights come from the page cache; with --short
from the disk, since a cgroup then limits the process and its page cache to the budget.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from limited import cgroup, limit
from machine import files_folder
from model_files import large_file

from edge.budget import format_bytes
from edge.cli.terminal.show import table
from edge.lab.prediction.work import streaming_cost
from edge.model.names.catalog import find_model
from edge.storage.cache import entries

SMALL, LARGE_SHAPE = "smollm2-135m", (2048, 16, 8192)
PROMPT, ANSWER = 256, 64
CHUNK, CHUNKS, STEPS = 128, 12, 150
CHUNKS_FROM_DISK, STEPS_FROM_DISK = 4, 40
RUN = f"""
import json, os, sys, time
import numpy as np
import edge

if group := sys.argv[3]:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
model, memory = edge.open_model(sys.argv[1]), int(sys.argv[2]) or None
prompt = (np.arange({PROMPT}) * 7919 % model.spec.vocab).astype(np.int32)
with edge.load(model, backend="cpu", memory=memory, expected_tokens={PROMPT + ANSWER}) as session:
    text = session.generate(prompt, max_tokens={ANSWER}, ignore_eos=True)
    report, engine, seconds = session.report.to_dict(), session.engine, dict(chunk=[], step=[])
    def run(kind, tokens, rows):
        engine.kv.truncate(rows)
        started = time.perf_counter()
        engine.forward(tokens)
        seconds[kind].append(time.perf_counter() - started)
    for _ in range({CHUNKS_FROM_DISK} if group else {CHUNKS}):
        run("chunk", prompt[:{CHUNK}], 0)
    for _ in range({STEPS_FROM_DISK} if group else {STEPS}):
        run("step", prompt[:1], {CHUNK})
print(json.dumps(dict(text=text, report=report, seconds=seconds)))
"""


def run(model: str, memory: int, group: Path | None = None) -> dict[str, Any]:
    """One run. group: a cgroup that limits its memory, including the page cache."""
    if group:
        limit(group, memory)
        forget(find_model(model).name)
    command = [sys.executable, "-c", RUN, model, str(memory), str(group or "")]
    environment = {**os.environ, "EDGE_HISTORY": "0"}  # reads from a cold disk predict no run of the user's
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"a run within {memory} bytes failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def forget(name: str) -> None:
    """Drop the packed weights from the page cache, where they would not count against the cgroup."""
    for entry in entries("weights"):
        if entry.about == name:
            with open(entry.path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def quick(runs: list[dict[str, Any]], kind: str) -> float:
    """Seconds of a pass: the first decile of all rounds."""
    return float(np.quantile(np.concatenate([each["seconds"][kind] for each in runs]), 0.1))


def measure(model: str, shares: list[float], rounds: int, group: Path | None) -> None:
    ample = run(model, 0)
    counted = ample["report"]["plan"]["bytes"]
    rest = counted["interpreter"] + counted["scratch"] + counted["reserve"]
    weights_and_rows = counted["weights"] + counted["kv"]
    budgets = {share: int(rest + share * weights_and_rows) for share in shares}
    free: list[dict[str, Any]] = []
    runs: dict[float, list[dict[str, Any]]] = {share: [] for share in shares}
    for _ in range(rounds):
        free.append(run(model, 0))
        for share, budget in budgets.items():
            runs[share].append(run(model, budget, group))
    rows, name = [], find_model(model).name
    step, chunk = quick(free, "step"), quick(free, "chunk")
    for share, each in runs.items():
        report = each[0]["report"]
        memory, passes = report["memory"], -(-CHUNK // report["plan"]["config"]["chunk"])
        cost = streaming_cost(memory["streamed"], report["plan"]["config"]["threads"], name)
        seconds = ((cost.disk_s if group else cost.cached_s) or 0.0) if cost else 0.0
        slower = quick(each, "step") / step, quick(each, "chunk") / chunk
        predicted = 1 + seconds / step, 1 + passes * seconds / chunk
        peak = max(one["report"]["memory"]["peak_rss"] for one in each)
        rows.append([
            f"{share:.0%}", format_bytes(budgets[share]), format_bytes(peak), format_bytes(memory["streamed"]),
            "same" if all(one["text"] == ample["text"] for one in each) else "OTHER",
            *(f"{a:.2f} × ({b:.2f})" for a, b in zip(slower, predicted, strict=True)),
            f"{predicted[0] / slower[0] - 1:+.0%}",
        ])  # fmt: skip
    sizes = f"{format_bytes(counted['weights'])} of weights, {format_bytes(counted['kv'])} of KV"
    print(f"\n## {Path(model).stem}: {sizes}, {1 / step:.0f} tok/s in memory\n")
    heads = [
        "share",
        "--memory",
        "peak",
        "streamed",
        "tokens",
        "step slower (predicted)",
        f"{CHUNK} tokens slower",
        "error",
    ]
    print(table(heads, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shares", default="1,0.8,0.6,0.5")
    parser.add_argument("--model", action="append", help="default: smollm2-135m and a random 1B")
    parser.add_argument("--short", action="store_true", help="no page cache beyond the budget")
    asked = parser.parse_args()
    cache = files_folder()
    models = asked.model or [SMALL, str(large_file(cache, find_model(SMALL), LARGE_SHAPE))]
    with cgroup(0) if asked.short else nullcontext() as group:
        if asked.short and group is None:
            sys.exit("--short needs a cgroup whose memory can be limited, and none can be made here")
        for model in models:
            measure(model, [float(share) for share in asked.shares.split(",")], asked.rounds, group)


if __name__ == "__main__":
    main()

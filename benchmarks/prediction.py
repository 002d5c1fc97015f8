"""Errors of predictions: peak memory, speed and joules, predicted before each run and compared with its report.

Every configuration is predicted twice by `edge plan --json`: from ceilings alone (measured at the start), and from
earlier runs of the same configuration as well. Then it runs several times, each in a process of its own, and every run
is compared with both. The table shows the error of the median run and, behind ±, the distance of single runs from their
median, which no prediction can reduce. The history and the profile of this device are kept in a temporary folder, apart
from yours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from text import long_text

from edge.cli.terminal.show import table

SMALL = "smollm2-135m"
WANTED = {"decode": 0.20, "joules": 0.15, "peak": 0.10}  # errors of single runs
Errors = dict[str, list[float]]


@dataclass(frozen=True)
class Configuration:
    """characters: of the prompt. new: tokens of the answer."""

    model: str
    characters: int
    new: int
    flags: str

    @property
    def name(self) -> str:
        return f"{Path(self.model).stem}, prompt {self.characters} characters, {self.flags}"


@dataclass(frozen=True)
class Figures:
    """Figures of a run, or predicted; None: unknown. joules: of prompt and answer."""

    prefill: float | None
    decode: float | None
    peak: float
    joules: float | None


NAMES = [each.name for each in fields(Figures)]


def configurations(second: str) -> list[Configuration]:
    """Two models, contexts short and long, three KV dtypes, one and two threads, two engines."""
    return [
        Configuration(SMALL, 400, 128, "--memory 256MiB --max-kv-size 512"),
        Configuration(SMALL, 400, 128, "--memory 256MiB --max-kv-size 512 --threads 1"),
        Configuration(SMALL, 8000, 128, "--memory 400MiB --max-kv-size 4096"),
        Configuration(SMALL, 8000, 128, "--memory 400MiB --max-kv-size 4096 --kv-dtype int8"),
        Configuration(SMALL, 2000, 128, "--memory 300MiB --max-kv-size 1024 --kv-dtype int4"),
        Configuration(SMALL, 2000, 64, "--max-kv-size 1024 --backend llamacpp"),
        Configuration(second, 400, 64, "--max-kv-size 512"),
        Configuration(second, 4000, 64, "--max-kv-size 2048"),
        Configuration(second, 4000, 64, "--max-kv-size 2048 --kv-dtype int8"),
        Configuration(second, 400, 64, "--max-kv-size 512 --threads 1"),
    ]


def edge(*arguments: str, stdin: str | None = None, history: str | None = None) -> Any:
    """The JSON output of a command. history: EDGE_HISTORY, if not that of all runs."""
    done = subprocess.run(
        [sys.executable, "-m", "edge", *arguments, "--json"], input=stdin, capture_output=True, text=True,
        env=os.environ | ({"EDGE_HISTORY": history} if history else {}),
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"edge {' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout)


def run(each: Configuration, prompt: str) -> Figures:
    """The figures that a run reports."""
    report = edge("run", each.model, "-n", str(each.new), "--ignore-eos", "--raw", *each.flags.split(), stdin=prompt)
    timings = report["timings"]
    return Figures(
        timings["prefill_tok_s"], timings["decode_tok_s"], report["memory"]["peak_rss"], report["energy"]["joules"]
    )


def predict(each: Configuration, prompt: int, history: str | None = None) -> Figures:
    """The prediction at the middle of the answer, the average context of decoding."""
    flags = [*each.flags.split(), "--tokens", str(prompt + each.new), "--prompt-tokens", str(prompt)]
    rows = int(flags[flags.index("--max-kv-size") + 1])
    plan = edge("plan", each.model, *flags, "--at", str(min(rows, prompt + each.new // 2)), history=history)
    predicted = plan["prediction"]
    decode = predicted["decode"][0] if predicted["decode"] else None
    energy = predicted["prompt_joules"]
    joules = None
    if decode and decode["joules"] and energy:
        joules = energy["value"] + decode["joules"]["value"] * (each.new - 1)
    return Figures(
        predicted["prefill_tok_s"] and predicted["prefill_tok_s"]["value"],
        decode and decode["tok_s"]["value"],
        plan["predicted_peak"],
        joules,
    )


def errors(predicted: Figures, runs: list[Figures]) -> dict[str, list[float]]:
    """Relative errors of each figure against each run; none if it was not predicted."""
    pairs = {name: [(getattr(predicted, name), getattr(run, name)) for run in runs] for name in NAMES}
    return {name: [guess / real - 1 for guess, real in each if guess and real] for name, each in pairs.items()}


def cell(found: list[float]) -> str:
    """The median error, and the largest distance of a run from the median run."""
    if not found:
        return "–"
    middle = median(found)
    spread = max(abs((1 + middle) / (1 + each) - 1) for each in found)
    return f"{middle:+.1%} ± {spread:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--second", default=SMALL, help="another model's GGUF file")
    parser.add_argument("--only", type=int, help="measure only the first N configurations")
    parser.add_argument("--seconds", type=float, default=8, help="to measure the ceilings")
    parser.add_argument("--earlier", type=int, default=3, help="runs of a configuration before it is predicted by them")
    parser.add_argument("--later", type=int, default=3, help="runs that predictions are held against")
    arguments = parser.parse_args()
    text = long_text().read_text(encoding="utf-8")
    chosen = list(dict.fromkeys(configurations(arguments.second)))[: arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"EDGE_DEVICES": f"{folder}/devices", "EDGE_HISTORY": f"{folder}/history"}
        probed = edge("devices", "probe", "--seconds", str(arguments.seconds))["figures"]
        print(f"\nread {probed['read_bandwidth']['value'] / 1e9:.1f} GB/s, "
              f"float32 {probed['f32_flops']['value'] / 1e9:.0f} GFLOP/s, "
              f"int8 {probed['int8_ops']['value'] / 1e9 if 'int8_ops' in probed else 0:.0f} Gop/s")  # fmt: skip
        both = [measure(each, text[: each.characters], arguments.earlier, arguments.later) for each in chosen]
    for title, rows in zip(("by ceilings alone", "by earlier runs"), zip(*both, strict=True), strict=True):
        show(title, chosen, list(rows))


def measure(each: Configuration, prompt: str, earlier: int, later: int) -> tuple[Errors, Errors]:
    """Errors from ceilings alone, and from earlier runs."""
    warm = edge("run", each.model, "-n", "2", "--raw", *each.flags.split(), stdin=prompt, history="0")
    tokens = warm["tokens"]["prompt"]
    with tempfile.TemporaryDirectory() as nothing:  # runs of other configurations may be of the same setting
        by_ceilings = predict(each, tokens, history=nothing)
    for _ in range(earlier):
        run(each, prompt)
    by_history = predict(each, tokens)
    runs = [run(each, prompt) for _ in range(later)]
    return errors(by_ceilings, runs), errors(by_history, runs)


def show(title: str, chosen: list[Configuration], rows: list[Errors]) -> None:
    print(f"\n## Predicted {title}: error of the median run ± spread of the runs\n")
    cells = [[each.name, *(cell(row[name]) for name in NAMES)] for each, row in zip(chosen, rows, strict=True)]
    worst = [max((abs(median(row[name])) for row in rows if row[name]), default=0.0) for name in NAMES]
    print(table(["configuration", *NAMES], [*cells, ["largest", *(f"{each:.1%}" for each in worst)]]))
    print()
    for name, bound in WANTED.items():
        single = [abs(each) for row in rows for each in row[name]]
        print(f"{name} within {bound:.0%}: {sum(each <= bound for each in single)} of {len(single)} single runs")


if __name__ == "__main__":
    main()

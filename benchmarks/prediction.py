"""Is the plan right? Peak memory, speed and joules, predicted before each run and compared with what it then reports.

Every configuration is predicted twice, each time by `edge plan --json`: by ceilings alone (measured at the start), and
by earlier runs of the same configuration besides. Then it runs, in a process of its own. The history and the profile
of this device lie in a temporary folder, apart from yours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from text import long_text

from edge.cli.show import table

SMALL = "smollm2-135m"


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
    """Of a run, or predicted. None: nothing was said. joules: of prompt and answer."""

    prefill: float | None
    decode: float | None
    peak: float
    joules: float | None


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


def edge(*arguments: str, stdin: str | None = None, history: bool = True) -> Any:
    """What the command says as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "edge", *arguments, "--json"], input=stdin, capture_output=True, text=True,
        env=os.environ | ({} if history else {"EDGE_HISTORY": "0"}),
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"edge {' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout)


def run(each: Configuration, prompt: str) -> Figures:
    """What a run reports."""
    report = edge("run", each.model, "-n", str(each.new), "--ignore-eos", "--raw", *each.flags.split(), stdin=prompt)
    timings = report["timings"]
    return Figures(
        timings["prefill_tok_s"], timings["decode_tok_s"], report["memory"]["peak_rss"], report["energy"]["joules"]
    )


def predict(each: Configuration, prompt: int) -> Figures:
    """In the middle of the answer, at whose context decoding is on average."""
    flags = [*each.flags.split(), "--tokens", str(prompt + each.new), "--prompt-tokens", str(prompt)]
    rows = int(flags[flags.index("--max-kv-size") + 1])
    plan = edge("plan", each.model, *flags, "--at", str(min(rows, prompt + each.new // 2)))
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


def errors(predicted: Figures, measured: Figures) -> list[float | None]:
    """Of prefill, decode, peak and joules, as parts of what was measured."""
    pairs = [(getattr(predicted, name), getattr(measured, name)) for name in Figures.__dataclass_fields__]
    return [None if not guess or not real else guess / real - 1 for guess, real in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--second", default=SMALL, help="another model's GGUF file")
    parser.add_argument("--only", type=int, help="so many configurations")
    parser.add_argument("--seconds", type=float, default=8, help="to measure the ceilings")
    parser.add_argument("--earlier", type=int, default=3, help="runs of a configuration before the one by history")
    arguments = parser.parse_args()
    text = long_text().read_text(encoding="utf-8")
    chosen = list(dict.fromkeys(configurations(arguments.second)))[: arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"EDGE_DEVICES": f"{folder}/devices", "EDGE_HISTORY": f"{folder}/history"}
        measure(chosen, text, arguments.seconds, arguments.earlier)


def measure(chosen: list[Configuration], text: str, seconds: float, earlier: int) -> None:
    probed = edge("devices", "probe", "--seconds", str(seconds))["figures"]
    print(f"\nread {probed['read_bandwidth']['value'] / 1e9:.1f} GB/s, "
          f"float32 {probed['f32_flops']['value'] / 1e9:.0f} GFLOP/s")  # fmt: skip
    tables: dict[str, list[list[float | None]]] = {"by ceilings alone": [], "by earlier runs": []}
    for each in chosen:
        prompt = text[: each.characters]
        warm = edge("run", each.model, "-n", "2", "--raw", *each.flags.split(), stdin=prompt, history=False)
        tokens = warm["tokens"]["prompt"]
        by_ceilings = predict(each, tokens)
        first, *_ = [run(each, prompt) for _ in range(earlier)]
        by_history = predict(each, tokens)
        tables["by ceilings alone"].append(errors(by_ceilings, first))
        tables["by earlier runs"].append(errors(by_history, run(each, prompt)))
    for title, rows in tables.items():
        print(f"\n## Predicted {title}: error\n")
        cells = [[each.name, *map(_percent, row)] for each, row in zip(chosen, rows, strict=True)]
        worst = [
            max((abs(value) for value in column if value is not None), default=None)
            for column in zip(*rows, strict=True)
        ]
        cells.append(["largest", *map(_percent, worst)])
        print(table(["configuration", "prefill", "decode", "peak", "joules"], cells))


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


if __name__ == "__main__":
    main()

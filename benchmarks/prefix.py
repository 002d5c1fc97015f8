"""The benefit of the prompt cache: time to the first token of a run whose first 1,000 tokens an earlier process ran.

Three processes, interleaved, for each engine and KV dtype: `edge run` with an empty cache folder (it runs the whole
prompt and stores it), another question after the same system prompt (it restores the rows), and that question without a
cache (it must give the same answer). Medians; the time to the first token excludes loading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from edge.cli.terminal.show import table
from edge.model.model import open_model

MODEL = "smollm2-135m"
SHARED_TOKENS = 1000
SETTINGS = (("cpu", "f16"), ("cpu", "int8"), ("llamacpp", "f16"), ("llamacpp", "q8_0"))


def system_prompt() -> str:
    """Enough rules for SHARED_TOKENS tokens."""
    model, rules = open_model(MODEL), ["You are a careful assistant."]
    while model.encode_prompt("Go on.", system=" ".join(rules)).size < SHARED_TOKENS:
        rule = len(rules)
        rules.append(f"Rule {rule}: asked about topic {rule * 7 % 31}, answer briefly and cite section {rule}.")
    return " ".join(rules)


def run(system: str, question: str, backend: str, kv_dtype: str, *more: str) -> dict[str, Any]:
    """The report of one process."""
    command = [sys.executable, "-m", "edge", "run", MODEL, "--system", system, "-p", question, "-n", "16", "--json"]
    done = subprocess.run(
        [*command, "--backend", backend, "--kv-dtype", kv_dtype, *more], capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-r", "--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    system = system_prompt()
    for setting in SETTINGS:  # compiled and read once
        run(system, "Hi.", *setting)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {setting: [] for setting in SETTINGS}
    reused, size, same = {}, {}, dict.fromkeys(SETTINGS, 0)
    for number in range(rounds):
        for setting in SETTINGS:
            with tempfile.TemporaryDirectory() as folder:
                question = f"Name {number + 2} colours, please."
                first = run(system, "What is the capital of France?", *setting, "--prompt-cache", folder)
                second = run(system, question, *setting, "--prompt-cache", folder)
                plain = run(system, question, *setting)
                size[setting] = sum(path.stat().st_size for path in Path(folder).iterdir())
            times[setting].append((first["timings"]["ttft_s"], second["timings"]["ttft_s"]))
            reused[setting] = f"{second['tokens']['reused']} of {second['tokens']['prompt']}"
            same[setting] += second["text"] == plain["text"]
    rows = []
    for setting in SETTINGS:
        first_s, second_s = (statistics.median(values) for values in zip(*times[setting], strict=True))
        ratio = statistics.median(second / first for first, second in times[setting])
        rows.append(
            [f"{setting[0]} {setting[1]}", f"{1000 * first_s:.1f}", f"{1000 * second_s:.1f}", f"{100 * ratio:.1f} %",
             reused[setting], f"{size[setting] / (1 << 20):.1f}", f"{same[setting]} of {rounds}"]
        )  # fmt: skip
    print(f"\n## Time to the first token behind a shared prefix, two processes ({rounds} rounds, medians)\n")
    headings = ["engine", "first, ms", "second, ms", "ratio", "tokens reused", "MiB on disk", "same answer as without"]
    print(table(headings, rows))


if __name__ == "__main__":
    main()

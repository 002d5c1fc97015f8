"""Is the plan right? Predicted against measured peak memory, each combination in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from text import long_text

from edge.budget import format_bytes
from edge.cli.show import table

MODEL = "smollm2-135m"
COMBINATIONS = (
    "--memory 256MiB --max-kv-size 512",
    "--memory 256MiB --max-kv-size 512 --kv-dtype int8",
    "--memory 180MiB --max-kv-size 256 --kv-dtype f16",
    "--memory 256MiB",
    "--memory 400MiB --max-kv-size 2048",
    "--memory 512MiB --max-kv-size 4096 --kv-dtype int8",
    "--memory 1GiB --max-kv-size 8192",
    "--max-kv-size 1024 --prefill-step-size 512",
)
PROMPT_CHARACTERS = 12_000


def main() -> None:
    prompt = long_text().read_text(encoding="utf-8")[:PROMPT_CHARACTERS]
    rows, worst = [], 0.0
    for flags in COMBINATIONS:
        command = [sys.executable, "-m", "edge", "run", MODEL, "-n", "20", "--ignore-eos", "--json", *flags.split()]
        done = subprocess.run(command, input=prompt, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout)
        predicted, measured = report["plan"]["predicted_peak"], report["memory"]["peak_rss"]
        error = predicted / measured - 1
        worst = max(worst, abs(error))
        rows.append([flags, format_bytes(predicted), format_bytes(measured), f"{error:+.1%}"])
    print("\n## Predicted and measured peak memory\n")
    print(table(["settings", "predicted", "measured", "error"], rows))
    print(f"\nlargest error {worst:.1%}")


if __name__ == "__main__":
    main()

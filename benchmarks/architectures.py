"""Which engine runs which architecture: the smallest random model of each, through `edge run`.

The models are those of tests/golden, made from transformers' classes, one of each architecture in a GGUF file's header;
every engine is asked for an answer in a process of its own. Prints a table in Markdown: `yes`, or why not, in numbered
notes; and the engine that `auto` takes.

    python benchmarks/architectures.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edge.cli.terminal.show import table
from edge.formats.gguf import read_gguf

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
ENGINES = {"cpu": "native", "onnx": "ONNX", "llamacpp": "llama.cpp"}
TOKENS = 4


@dataclass(frozen=True)
class Outcome:
    """engine: that ran. reason: why none did."""

    engine: str | None
    reason: str = ""


def smallest_models(folder: Path) -> dict[str, Path]:
    """The smallest file of each architecture."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf"), key=lambda path: path.stat().st_size, reverse=True):
        found[str(read_gguf(path).metadata["general.architecture"])] = path
    return dict(sorted(found.items()))


def run(path: Path, backend: str, environment: dict[str, str]) -> Outcome:
    flags = ["--backend", backend, "-p", "Once upon a time", "-n", str(TOKENS), "--ignore-eos", "--json"]
    command = [sys.executable, "-m", "edge", "run", str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        report = json.loads(done.stdout)
        if report["tokens"]["generated"] != TOKENS:
            return Outcome(None, f"generated {report['tokens']['generated']} tokens of {TOKENS}")
        return Outcome(report["plan"]["backend"])
    said = done.stderr.strip().splitlines() or ["no reason given"]
    reason = said[-1].removeprefix("edge: ").replace(f"{path}: ", "")
    return Outcome(None, re.sub(r": use --backend \w+$", "", reason))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=GOLDEN, help="folder of GGUF files (default: tests/golden)")
    models = smallest_models(parser.parse_args().models)
    notes: dict[str, int] = {}
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {"EDGE_CACHE": cache, **os.environ}
        for architecture, path in models.items():
            cells = [architecture]
            for engine in ENGINES:
                outcome = run(path, engine, environment)
                note = outcome.reason.replace(f"{architecture} models", "these models")
                cells.append("yes" if outcome.engine else f"no ({notes.setdefault(note, len(notes) + 1)})")
            chosen = run(path, "auto", environment)
            rows.append([*cells, ENGINES.get(chosen.engine or "", f"none: {chosen.reason}")])
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(["architecture", *ENGINES.values(), "`auto`"], rows))
    for reason, number in notes.items():
        print(f"\n({number}) {reason}")


if __name__ == "__main__":
    main()

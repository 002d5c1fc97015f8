"""The cost of a pass over the next tokens of several sequences, for edge and llama.cpp on one GGUF file.

    python benchmarks/batching.py [--small] [--model smollm2-135m] [--isa avx2] [--depth 64] [--json]
    python benchmarks/batching.py --rounds 1 --passes 4    a test that everything runs; its figures mean nothing

The file is peers.py's 1B of random weights, or with --small the model, all Q4_0. Both engines have a process of their
own that loads once, f16 KV, as many threads and room for as many sequences. Each unit is a number of passes with one
token of each of M sequences and the argmax of each row, where every sequence holds --depth rows before. Units are
interleaved: engines within numbers of sequences within rounds; before each the parent waits until no worker uses CPU
time.

- pass: milliseconds of one pass, the median over rounds. c(M): that by the pass of one sequence.
- tok/s: of all sequences together, and in brackets by those of one sequence.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from machine import files_folder, machine, say
from model_files import large_file, pure_file
from turns import EDGE, LLAMA, Setting, Sizes, Worker, quiet_seconds

from edge.cli.terminal.show import table
from edge.devices.host import logical_cores
from edge.model.names.catalog import find_model

_SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16)
_SPARE = 64  # rows beyond those of a unit


def measure(setting: Setting, model: Path, depth: int, passes: int) -> dict[str, dict[int, list[float]]]:
    """Seconds of a pass in every round, by engine and number of sequences; each engine's first round does not count."""
    most = max(_SEQUENCES)
    cells = depth + passes + _SPARE
    workers = []
    for engine in (EDGE, LLAMA):
        command = setting.command(engine, "serve", model, cells, most)
        workers.append(Worker(engine, command, setting.environment(engine)))
        setting.versions[engine] = workers[-1].version
    found: dict[str, dict[int, list[float]]] = {each.engine: {count: [] for count in _SEQUENCES} for each in workers}
    try:
        for number in range(setting.rounds + 1):
            say(f"round {number} of {setting.rounds} ...")
            for count in _SEQUENCES:
                for worker in workers:
                    seconds = quiet_seconds(
                        worker, workers, setting.foreign,
                        op="batch", sequences=count, depth=depth, n=passes * count, seed=number,
                    )  # fmt: skip
                    if number:
                        found[worker.engine][count].append(seconds / passes)
    finally:
        for worker in workers:
            worker.close()
    return found


def lines(found: dict[str, dict[int, list[float]]]) -> list[list[str]]:
    """A line of the table for each number of sequences."""
    made = []
    for count in _SEQUENCES:
        line = [str(count)]
        for runs in found.values():
            one, here = (statistics.median(runs[each]) for each in (1, count))
            line += [f"{here * 1e3:.2f}", f"{here / one:.2f}", f"{count / here:,.0f} ({count * one / here:.2f}×)"]
        made.append(line)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu", help="edge's engine; cpu:int8 has other KV rows")
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file or installed name, made all Q4_0")
    parser.add_argument("--small", action="store_true", help="--model itself, not a 1B with its vocabulary")
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--isa", help="EDGE_ISA for edge's worker, such as avx2")
    parser.add_argument("--cache", type=Path, default=files_folder())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--passes", type=int, default=32, help="in a unit")
    parser.add_argument("--depth", type=int, default=64, help="rows of each sequence before a unit")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    setting = Setting(
        backend=options.backend, isa=options.isa, threads=options.threads, openvino=None,
        cache=options.cache.absolute(), sizes=Sizes(), rounds=options.rounds, starts=0, wanted=(),
    )  # fmt: skip
    about: dict[str, Any] = machine()
    source = find_model(options.model).absolute()
    small = options.small
    model = pure_file(setting.cache, source) if small else large_file(setting.cache, source, setting.sizes.large)
    found = measure(setting, model, options.depth, options.passes)
    if options.json:
        print(json.dumps({
            "machine": about, "versions": setting.versions, "threads": setting.threads, "depth": options.depth,
            "seconds": found, "foreign_cpu": setting.foreign,
        }))  # fmt: skip
        return
    name = options.model if small else "a random 1B"
    print(f"\n## A pass of several sequences ({name}, Q4_0, {options.depth} rows each)\n")
    print(f"{about['cpu']} ({', '.join(about['isa'])}), {setting.threads} threads; medians of {setting.rounds} rounds;")
    print(f"others used {statistics.median(setting.foreign):.0%} of the machine in the median, ", end="")
    print(
        f"{max(setting.foreign):.0%} at most. "
        + "; ".join(f"{key}: {value}" for key, value in setting.versions.items())
    )
    print()
    heads = [f"{engine}: {what}" for engine in found for what in ("pass, ms", "c(M)", "tok/s")]
    print(table(["M", *heads], lines(found), left=1))


if __name__ == "__main__":
    main()

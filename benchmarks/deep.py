"""Behind many tokens: decoding and prompts with each type of KV rows, and llama.cpp with f16 rows, on one GGUF file.

    python benchmarks/deep.py [--model smollm2-135m] [--depth 4096] [--rounds 7] [--json]

The file is the model, all Q4_0. Every engine has a process of its own that loads once; units of 64 steps and of a
prompt of 512 tokens, both behind --depth rows, are interleaved; before each the parent waits until no worker uses CPU
time. Medians, and in brackets those by f16 rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace

from machine import files_folder, machine, say
from model_files import pure_file
from turns import EDGE, LLAMA, Setting, Sizes, Worker, quiet_seconds

from edge.cli.terminal.show import table
from edge.devices.host import logical_cores
from edge.model.names.catalog import find_model

_ROWS = ("f16", "int8", "int4")
_UNITS = {"decode": 64, "prefill": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file or installed name, made all Q4_0")
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--depth", type=int, default=4096, help="rows before a unit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    setting = Setting("", None, options.threads, None, files_folder(), Sizes(), options.rounds, 0, ())
    engines = {f"edge, {rows}": (EDGE, replace(setting, backend=f"cpu:{rows}")) for rows in _ROWS}
    engines |= {"llama.cpp, f16": (LLAMA, setting)}
    about, model = machine(), pure_file(setting.cache, find_model(options.model).absolute())
    cells, foreign = options.depth + max(_UNITS.values()) + 64, setting.foreign
    workers = {
        name: Worker(engine, own.command(engine, "serve", model, cells), own.environment(engine))
        for name, (engine, own) in engines.items()
    }
    everyone = list(workers.values())
    speeds: dict[str, dict[str, list[float]]] = {name: {op: [] for op in _UNITS} for name in workers}
    try:
        for number in range(options.rounds + 1):  # the first does not count
            say(f"round {number} of {options.rounds} ...")
            for op, n in _UNITS.items():
                for name, worker in workers.items():
                    seconds = quiet_seconds(worker, everyone, foreign, op=op, depth=options.depth, n=n, seed=number)
                    if number:
                        speeds[name][op].append(n / seconds)
    finally:
        for worker in workers.values():
            worker.close()
    if options.json:
        print(json.dumps({"machine": about, "depth": options.depth, "speeds": speeds, "foreign_cpu": foreign}))
        return
    first, found = dict[str, float](), list[list[str]]()
    for name, runs in speeds.items():
        medians = {op: statistics.median(each) for op, each in runs.items()}
        first = first or medians
        found.append([name, *(f"{medians[op]:,.0f} ({medians[op] / first[op]:.2f} ×)" for op in _UNITS)])
    print(f"{about['cpu']} ({', '.join(about['isa'])}), {options.threads} threads; medians of {options.rounds} rounds;")
    print(f"others used {statistics.median(foreign):.0%} of the machine in the median, {max(foreign):.0%} at most.\n")
    print(table(["rows", *(f"{op} {n} at {options.depth:,}, tok/s" for op, n in _UNITS.items())], found, left=1))


if __name__ == "__main__":
    main()

"""edge's ONNX engine against onnxruntime-genai, on the same weights with as many threads.

    python benchmarks/onnx_genai.py --genai-python DIR [--kv-dtype f32] [--rounds 11] [--json]

DIR is a virtual environment with `pip install onnxruntime-genai onnx-ir torch transformers accelerate gguf`. The
model is SmolLM2-135M, all Q4_0: edge converts the GGUF file, genai's own builder makes its int4 model of the same
weights. Each sits in a process of its own that loads once; units of work take turns A B A B. Rows:

- decode at 0-64, at 512: 64 steps; edge's with an argmax in NumPy, genai's in its own greedy loop.
- prefill 512: from token ids to the logits after the last of them, in an empty cache.
- memory: the peak resident set of both processes after all that, (−) less is better.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import files_folder, machine, say
from model_files import WORKERS, make_file
from turns import EDGE, Row, Worker, WorkerError, wait_until_quiet

from edge.cli.terminal.show import table
from edge.devices.host import logical_cores
from edge.model.names.catalog import find_model

GENAI = "genai"
CELLS, STEPS = 1024, 64
WORK: dict[str, dict[str, Any]] = {
    "decode at 0-64": {"op": "decode", "depth": 0, "n": STEPS},
    "decode at 512": {"op": "decode", "depth": 512, "n": STEPS},
    "prefill 512": {"op": "prefill", "n": 512},
}


def find_python(given: str) -> Path:
    folder = Path(given)
    python = next((each for each in (folder, folder / "bin/python") if each.is_file()), None)
    if python is None or subprocess.run([python, "-c", "import onnxruntime_genai"], capture_output=True).returncode:
        sys.exit(f"{given} has no onnxruntime_genai: see the head of this file")
    return python


def make_genai(python: Path, source: Path, folder: Path, environment: dict[str, str]) -> Path:
    """genai's model, built once."""
    if not (folder / "int4/genai_config.json").exists():
        say(f"building {folder} ...")
        command = [python, WORKERS / "make_genai.py", source, folder]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            sys.exit(f"genai's builder failed: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return folder / "int4"


def measure(workers: list[Worker], rounds: int) -> list[Row]:
    rows = []
    for name, request in WORK.items():
        say(f"measuring {name} ...")
        row = Row(name, "tok/s", {})
        for number in range(rounds + 1):
            for worker in workers:
                wait_until_quiet(workers)
                seconds = worker.seconds(seed=number, **request)
                if number:  # the first warms up
                    row.runs.setdefault(worker.engine, []).append(request["n"] / seconds)
        rows.append(row)
    peaks = {worker.engine: [worker.peak() / 2**20] for worker in workers}
    return [*rows, Row("memory (−)", "MiB", peaks, less_is_better=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--genai-python", required=True, metavar="DIR")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-dtype", default="f32", help="of edge; genai's are f32")
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cache", type=Path, default=files_folder())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    python, source = find_python(options.genai_python), find_model(options.model).absolute()
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    options.cache.mkdir(parents=True, exist_ok=True)
    model = make_file(options.cache / f"{source.stem}.{source.stat().st_size}.pure-Q4_0.gguf", "pure", source)
    folder = make_genai(python, model, model.with_suffix(".genai"), theirs)
    backend = f"onnx:{options.kv_dtype}"
    commands: dict[str, tuple[list[Any], dict[str, str]]] = {
        EDGE: ([sys.executable, WORKERS / "edge_worker.py", "serve", model, backend, options.threads, CELLS],
               dict(os.environ)),
        GENAI: ([python, WORKERS / "genai_worker.py", folder, options.threads, CELLS], theirs),
    }  # fmt: skip
    workers: list[Worker] = []
    try:
        for engine, (command, environment) in commands.items():
            workers.append(Worker(engine, [str(word) for word in command], environment))
        rows = measure(workers, options.rounds)
    except WorkerError as error:
        sys.exit(f"a worker failed: {error}")
    finally:
        for worker in workers:
            worker.close()
    versions = {worker.engine: worker.version for worker in workers}
    if options.json:
        print(json.dumps({"machine": machine(), "versions": versions, "rows": [row.to_dict() for row in rows]}))
        return
    print(f"\n## edge (onnx, {options.kv_dtype} KV) against onnxruntime-genai, {options.threads} threads\n")
    print("; ".join(f"{engine}: {version}" for engine, version in versions.items()) + ".\n")
    lines = []
    for row in rows:
        ours, peer, ratio = row.median(EDGE), row.median(GENAI), row.ratio(GENAI)
        assert ours
        assert peer
        lines.append([row.name, row.unit, f"{ours:,.1f}", f"{peer:,.1f}", f"{ratio:.2f}"])
    print(table(["", "unit", EDGE, GENAI, f"{EDGE} / {GENAI}"], lines, left=2))


if __name__ == "__main__":
    main()

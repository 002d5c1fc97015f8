"""edge's converters against llama.cpp's and onnxruntime-genai's, on the same Hugging Face folder.

    python benchmarks/converters.py [--genai-python DIR] [--llamacpp-source DIR] [--rounds 5] [--json]

genai-python: a virtual environment with `pip install onnxruntime-genai onnx-ir torch transformers accelerate gguf
sentencepiece`; llama.cpp's converter runs there, too. llamacpp-source: llama.cpp's sources, which those of
llama-cpp-python bring (`pip download --no-binary :all: --no-deps llama-cpp-python`) in `vendor/llama.cpp`.

The folder is SmolLM2-135M with bfloat16 weights, or --folder. Programs run interleaved (A B A B), each in a process
of its own. Rows: seconds from its start to its end (median, and × edge's); its peak resident set; the size of its
output; and the output's perplexity, in windows of 512 tokens of a held-out text: GGUF files in llama.cpp, ONNX in ONNX
Runtime, f32 KV.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from machine import files_folder, machine, say
from model_files import WORKERS
from text import long_text
from turns import EDGE, LLAMA

import edge
from edge.budget import format_bytes
from edge.cli.terminal.show import table
from edge.converters.huggingface.writer import write_folder
from edge.lab.quality.perplexity import LOGITS_ROWS
from edge.lab.quality.windows import Windows, windowed_perplexity
from edge.likelihood import negative_log_likelihoods

GENAI = "genai"
KINDS = {
    "gguf": "HF → GGUF, bfloat16",
    "q4_0": "HF → GGUF, Q4_0, head in Q8_0",
    "onnx": "HF → ONNX, int4 throughout",
}
DOCUMENT = "secJ3.html"
# Prints a command's exit status and its peak resident set in KiB, its own children's included. It stands between us
# and the command because Linux hands a process's peak down to the program that it becomes.
_LAUNCHER = """
import os, sys
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


@dataclass
class Result:
    """What a program did with the folder. Sizes in bytes; seconds of every round."""

    kind: str
    program: str
    command: list[str]
    environment: dict[str, str]
    target: Path
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    size: int = 0
    perplexity: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def results_of(folder: Path, work: Path, python: Path | None, sources: Path | None) -> list[Result]:
    """What can be run here, kind by kind, edge first."""
    found = []
    theirs = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def add(kind: str, program: str, command: Sequence[Any], environment: dict[str, str], target: Path) -> None:
        found.append(Result(kind, program, [str(word) for word in command], environment, target))

    for kind in KINDS:
        ours, llama, genai = (work / f"{kind}.{name}" for name in ("edge", "llama", "genai"))
        add(kind, EDGE, [sys.executable, WORKERS / "edge_converter.py", kind, folder, ours], dict(os.environ), ours)
        if kind == "onnx" and python:
            words = ["-i", folder, "-o", genai, "-p", "int4", "-e", "cpu", "-c", work / "cache"]
            add(kind, GENAI, [python, "-m", "onnxruntime_genai.models.builder", *words], theirs, genai)
        if kind != "onnx" and python and sources:
            words = [sys.executable, WORKERS / "llama_converter.py", kind, folder, llama, python, sources]
            add(kind, LLAMA, words, dict(os.environ), llama)
    return found


def run(result: Result, *, counts: bool) -> None:
    """Once, into a place where nothing is."""
    shutil.rmtree(result.target, ignore_errors=True)
    result.target.unlink(missing_ok=True)
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *result.command]
    started = time.perf_counter()
    done = subprocess.run(launcher, env=result.environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    status, peak = map(int, done.stdout.split()[-2:])
    if status != 0:
        sys.exit(f"{result.program}, {KINDS[result.kind]}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    if counts:
        result.seconds.append(seconds)
        result.peak = max(result.peak, peak << 10)
    result.size = _size(result.target)


def perplexity_of(result: Result, windows: Windows) -> float:
    if result.program == GENAI:
        return ort_perplexity(result.target, windows)
    backend = "onnx" if result.kind == "onnx" else "llamacpp"
    options: dict[str, Any] = {"kv_policy": "full", "kv_dtype": "f32", "expected_tokens": windows.context}
    with edge.load(result.target, backend=backend, logits_rows=LOGITS_ROWS, **options) as session:
        return windowed_perplexity(session, windows).perplexity


def ort_perplexity(folder: Path, windows: Windows) -> float:
    """Of a graph as genai's builder makes it, run by ONNX Runtime alone: a window at a time, with an empty past."""
    import onnxruntime

    said = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    past = np.zeros((1, said["num_key_value_heads"], 0, said["head_size"]), np.float32)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    losses: list[float] = []
    for number in range(len(windows)):
        read, targets = windows.read(number), windows.targets(number)
        if not windows.scored(number):
            continue
        fed: dict[str, Any] = {
            "input_ids": read[None].astype(np.int64),
            "attention_mask": np.ones((1, read.size), np.int64),
        }
        fed |= {name: past for name in names if name not in fed}
        (logits,) = session.run(["logits"], fed)
        losses += negative_log_likelihoods(logits[0][windows.first :], targets[windows.first :]).tolist()
    return math.exp(float(np.mean(losses)))


def find_python(given: str | None) -> Path | None:
    """A virtual environment, or its interpreter, that has genai."""
    if given is None:
        return None
    folder = Path(given).absolute()
    python = next((each for each in (folder, folder / "bin/python") if each.is_file()), None)
    if python is None or subprocess.run([python, "-c", "import onnxruntime_genai"], capture_output=True).returncode:
        say(f"skipping {GENAI} and {LLAMA}: {given} has no onnxruntime_genai: see the head of this file")
        return None
    return python


def find_sources(given: str | None) -> Path | None:
    if given is None:
        return None
    for folder in (Path(given).absolute(), *Path(given).absolute().glob("*/vendor/llama.cpp")):
        if (folder / "convert_hf_to_gguf.py").is_file():
            return folder
    say(f"skipping {LLAMA}: {given} has no convert_hf_to_gguf.py: see the head of this file")
    return None


def make_folder(target: Path) -> Path:
    """SmolLM2 as a Hugging Face folder."""
    model = edge.open_model("smollm2-135m")
    write_folder(model.file, model.spec, target, type="BF16", force=True)
    return target


def print_report(results: Sequence[Result], folder: Path, tokens: int, rounds: int) -> None:
    ours = {each.kind: each for each in results if each.program == EDGE}
    lines = [
        [KINDS[each.kind], each.program, f"{each.median:.2f}", f"{each.median / ours[each.kind].median:.2f}",
         format_bytes(each.peak), format_bytes(each.size), "" if each.perplexity is None else f"{each.perplexity:.3f}"]
        for each in results
    ]  # fmt: skip
    headings = ["what", "program", "seconds", "× edge", "peak memory", "size", "perplexity"]
    print(f"\n## Converting {folder.name}, medians of {rounds}; perplexity of {tokens} tokens of {DOCUMENT}\n")
    print(table(headings, lines, left=2))


def _size(path: Path) -> int:
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--genai-python", metavar="DIR")
    parser.add_argument("--llamacpp-source", metavar="DIR")
    parser.add_argument("--folder", type=Path, help="a Hugging Face model (default: SmolLM2-135M)")
    parser.add_argument("--tokens", type=int, default=4096, help="for perplexity; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=files_folder())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = options.cache / "converters"
    work.mkdir(parents=True, exist_ok=True)
    folder = options.folder.absolute() if options.folder else make_folder(work / "smollm2-135m")
    results = results_of(folder, work, find_python(options.genai_python), find_sources(options.llamacpp_source))
    for number in range(options.rounds + 1):
        for each in results:
            say(f"round {number}: {each.program}, {KINDS[each.kind]} ...")
            run(each, counts=number > 0)  # the first warms up
    if options.tokens:
        model = edge.open_model(next(each.target for each in results if each.kind == "gguf"))
        ids = model.encode_prompt(long_text(DOCUMENT).read_text(encoding="utf-8"), raw=True)[: options.tokens]
        for each in results:
            say(f"perplexity of {each.program}, {KINDS[each.kind]} ...")
            each.perplexity = perplexity_of(each, Windows(ids))
    if options.json:
        rows = [{**asdict(each), "target": str(each.target), "environment": None} for each in results]
        print(json.dumps({"machine": machine(), "rows": rows}))
    else:
        print_report(results, folder, options.tokens, options.rounds)


if __name__ == "__main__":
    main()

"""What a GPU can show in ten minutes, in one command: conformance, speed beside llama.cpp, and what tuning gains.

    pip install -e '.[tvm,gpu,cuda,demo,demo-gemma,dev]'
    python benchmarks/card.py [--adapter cuda:0] [--minutes 10] [--llama-source DIR | --llama-bench PATH] [-o card]

Steps run one after the other, each with a limit, in the order of their worth: whatever ends late is stopped, with its
children, and the next one begins. Each writes its output to the folder when it ends, so that a machine that goes away
takes one step with it. --llama-source is a checkout of llama.cpp, or the folder `vendor/llama.cpp` in the source of
llama-cpp-python, which is built here with CUDA. --minutes bounds the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import machine, say

from edge.cli.terminal.show import table

ROOT = Path(__file__).parents[1]
LARGE = ("--large", "--rounds", "3")


@dataclass(frozen=True)
class Step:
    """A command with its limit in seconds. makes: the suffix of its output's file."""

    name: str
    command: tuple[str, ...]
    limit: float
    makes: str = "txt"


@dataclass(frozen=True)
class Ended:
    """How a step ended: ok, failed, late, or skipped where no time was left."""

    step: str
    how: str
    seconds: float
    last: str  # line of what it said, unless it was ok


def run_steps(steps: Sequence[Step], folder: Path, seconds: float) -> Iterator[Ended]:
    """Run steps in at most `seconds`, each in a process group of its own."""
    end = time.monotonic() + seconds
    for step in steps:
        began = time.monotonic()
        if (limit := min(step.limit, end - began)) <= 0:
            yield Ended(step.name, "skipped", 0.0, f"the {seconds:.0f} seconds are over")
            continue
        out, err = folder / f"{step.name}.{step.makes}", folder / f"{step.name}.log"
        with out.open("wb") as written, err.open("wb") as said:
            process = subprocess.Popen(step.command, stdout=written, stderr=said, cwd=ROOT, start_new_session=True)
            try:
                how = "failed" if process.wait(limit) else "ok"
            except subprocess.TimeoutExpired:
                how = "late"
            finally:
                _stop(process)
        lines = [line for each in (out, err) for line in each.read_text(errors="replace").splitlines() if line.strip()]
        yield Ended(step.name, how, time.monotonic() - began, "" if how == "ok" or not lines else lines[-1][:200])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its group, with what is left of the group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def plan(options: argparse.Namespace, folder: Path) -> list[Step]:
    python, place = sys.executable, ("--adapter", options.adapter)
    bench, first = options.llama_bench, ("--model", options.model[0])
    steps = [Step("devices", (python, "-m", "edge", "devices", "--json"), 60, "json")]
    if options.llama_source:
        build, bench = folder / "llama.cpp", folder / "llama.cpp" / "bin" / "llama-bench"
        source = ("cmake", "-S", str(options.llama_source), "-B", str(build), "-DGGML_CUDA=ON", "-DLLAMA_CURL=OFF")
        steps += [
            Step("configure", (*source, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CUDA_ARCHITECTURES=native"), 60),
            Step("build", ("cmake", "--build", str(build), "-j", str(os.cpu_count()), "--target", "llama-bench"), 240),
        ]
    beside = ("--llama-bench", str(bench)) if bench else ()
    speed = (python, "benchmarks/gpu.py", *place, "--json")
    tests = ("tests/gpu", "tests/backends/test_conformance.py", "tests/model", "-k", "gpu", "-q", "--maxfail", "10")
    steps += [
        *(Step(Path(name).stem, (*speed, "--model", name, *beside), 60, "json") for name in options.model),
        Step("conformance", ("env", f"EDGE_TEST_GPU={options.adapter}", python, "-m", "pytest", *tests), 150),
    ]
    if options.large:
        steps += [Step("large", (*speed, *first, *LARGE, *beside), 150, "json")]
    tune = (python, "-m", "edge", "tune", options.model[0], "--backend", "gpu", "--time", "80s", "--json")
    return [
        *steps,
        Step("tune", ("env", f"EDGE_GPU={options.adapter}", *tune), 120, "json"),
        Step("tuned", (*speed, *first, *beside), 60, "json"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapter", default="cuda:0", help="as edge devices names it")
    parser.add_argument("--model", action="append", help="a GGUF file or the name of a model; again for more")
    parser.add_argument("--small", dest="large", action="store_false", help="without random models of 1B and 3B")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--llama-bench", type=Path, help="llama-bench of a build of llama.cpp for this card")
    parser.add_argument("--llama-source", type=Path, help="llama.cpp's source, to build it here with CUDA")
    parser.add_argument("-o", "--output", type=Path, default=Path("card"), help="folder for what the steps say")
    options = parser.parse_args()
    models = options.model or ["smollm2-135m", "gemma3-270m"]
    options.model = [str(Path(each).absolute()) if Path(each).exists() else each for each in models]
    options.llama_bench, options.llama_source = (
        each and each.absolute() for each in (options.llama_bench, options.llama_source)
    )
    folder = options.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ended = list[Ended]()
    for each in run_steps(plan(options, folder), folder, 60 * options.minutes):
        say(f"{each.step}: {each.how} after {each.seconds:.0f} s {each.last}")
        ended.append(each)
        (folder / "steps.json").write_text(
            json.dumps({"machine": machine(), "steps": [asdict(step) for step in ended]}, indent=2)
        )
    print(table(["step", "how", "seconds", "last line"], [[e.step, e.how, f"{e.seconds:.0f}", e.last] for e in ended]))
    if any(each.how != "ok" for each in ended):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

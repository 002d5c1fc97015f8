"""The gpu engine on the GPUs of this machine, and llama.cpp on the same device.

    python benchmarks/gpu.py [--large] [--adapter TEXT …] [--llama-bench PATH] [--tuning rows=4,split=32] [--json]

Adapters: all GPUs, or where there is none the software adapters; --adapter names others (part of a name, or
wgpu:0). Models: SmolLM2-135M and Gemma 3 270M as installed; with --large, Llamas of 1B and 3B of random weights in
Q4_0, which are written to the cache folder once; --model for others. On a machine with an NVIDIA GPU all it takes is

    pip install -e '.[tvm,gpu,cuda,demo,demo-gemma]' && python benchmarks/gpu.py --large

Each adapter has its own rows. Engines take turns (A B A B); figures are medians of --rounds:

- default, tuned: tok/s with the settings that every device starts from, and with those that `edge tune` recorded for
  this one, or --tuning. decode: --steps greedy tokens behind 16; prefill: --prompt tokens into an empty cache.
- llama.cpp: tok/s of `llama-bench` with -ngl 99 and what --llama-args adds. It chooses its own device, by the build's
  environment variables (GGML_VK_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES).
- bandwidth: decode of the faster settings × the bytes of weights that a token needs, of what a kernel that only reads
  reaches on the same adapter.
- dispatches, host: kernels that run for a token, and time per token in which the host did not wait for the device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from llama_bench import LlamaBench
from machine import files_folder, machine, say
from model_files import bytes_per_token, large_file

import edge
from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.tvm.gpu.bandwidth import measure_bandwidth
from edge.backends.tvm.gpu.hosts import VARIABLE, Adapter, all_adapters, choose_adapter
from edge.cli.terminal.show import table
from edge.errors import EdgeError
from edge.model.model import Model

INSTALLED = ("smollm2-135m", "gemma3-270m")
LARGE = {"1B": (2048, 18, 8192), "3B": (3072, 26, 8192)}  # hidden, layers, FFN; heads of 64
PREFIX, CHUNK = 16, 256
DEFAULT, TUNED, LLAMA = "default", "tuned", "llama.cpp"


class Waits:
    """A device whose reads are timed: there alone the host waits."""

    def __init__(self, device: Any) -> None:
        self._device, self.seconds = device, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def read(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._device.read(*arguments)
        finally:
            self.seconds += time.perf_counter() - began


@dataclass
class Runner:
    """An engine with some tuning. decode, prefill: tokens per second; host: seconds per token; one for each round."""

    engine: Any
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waits = Waits(self.engine.passes.device)
        self.engine.passes.device = self._waits

    def run(self, prompt: int, steps: int, *, counts: bool = True) -> None:
        ids = np.random.default_rng(0).integers(0, self.engine.spec.vocab, max(prompt, PREFIX), np.int32)
        self.engine.kv.truncate(0)
        prefill, _ = self._timed(lambda: self.engine.forward(ids[:prompt]))
        self.engine.kv.truncate(0)
        token = int(np.argmax(self.engine.forward(ids[:PREFIX])))
        decode, waited = self._timed(lambda: self._greedy(token, steps))
        if counts:
            self.prefill.append(prompt / prefill)
            self.decode.append(steps / decode)
            self.host.append((decode - waited) / steps)

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds, and those of them in which the host waited."""
        self._waits.seconds, began = 0.0, time.perf_counter()
        work()
        return time.perf_counter() - began, self._waits.seconds

    def _greedy(self, token: int, steps: int) -> None:
        """As a session generates."""
        if not hasattr(self.engine, "run_greedy"):
            for _ in range(steps):
                token = int(np.argmax(self.engine.forward(np.array([token], np.int32))))
            return
        while steps:
            picked = self.engine.run_greedy(token, steps, np.empty(0, np.int32))
            token, steps = int(picked[-1]), steps - len(picked)


@dataclass(frozen=True)
class Result:
    """Of a model on an adapter. speeds: tok/s by test and engine. share: of `bandwidth`, bytes/s. host: seconds."""

    model: str
    adapter: str
    speeds: dict[str, dict[str, float]]
    bandwidth: float
    share: float
    dispatches: int
    host: float
    tuning: dict[str, int]


def measure(
    model: Model, adapter: Adapter, bandwidth: float, tuning: Mapping[str, int] | None, llama: LlamaBench | None,
    rounds: int, prompt: int, steps: int,
) -> Result:  # fmt: skip
    backend = find_backend("gpu", model.file, model.spec)
    config = EngineConfig(max(prompt, PREFIX + steps) + 1, CHUNK, "f16", threads=1)
    if tuning is None and (record := backend.tuned(model.spec, "f16")):
        tuning = record.values
    settings = {DEFAULT: dict[str, int]()} | ({TUNED: dict(tuning)} if tuning else {})
    runners = dict[str, Runner]()
    theirs = dict[str, list[float]]()
    try:
        for name, values in settings.items():
            say(f"{model.spec.label} on {adapter.name}: loading, {name}")
            found = EngineConfig(**{**asdict(config), "tuning": values})
            runners[name] = Runner(backend.load(model.file, model.spec, found))
            runners[name].run(prompt, steps, counts=False)
        for number in range(rounds):
            say(f"{model.spec.label} on {adapter.name}: round {number + 1} of {rounds}")
            for runner in runners.values():
                runner.run(prompt, steps)
            for test, speed in (llama.run(model.file.path, prompt, steps) if llama else {}).items():
                theirs.setdefault(test, []).append(speed)
        program = runners[DEFAULT].engine.passes.program
    finally:
        for runner in runners.values():
            runner.engine.close()
    speeds = {
        test: {name: statistics.median(getattr(runner, test)) for name, runner in runners.items()}
        for test in ("decode", "prefill")
    }
    for test, runs in theirs.items():
        speeds[test][LLAMA] = statistics.median(runs)
    ours = {name: speed for name, speed in speeds["decode"].items() if name != LLAMA}
    best = max(ours, key=lambda name: ours[name])
    share = ours[best] * bytes_per_token(model.file.path) / bandwidth
    dispatches = sum(len(program.passes.get(name, ())) for name in ("step", "picked"))
    host = statistics.median(runners[best].host)
    label = f"{adapter.name} ({adapter.place})"
    return Result(model.spec.label, label, speeds, bandwidth, share, dispatches, host, dict(tuning or {}))


def rows(result: Result) -> Iterator[list[str]]:
    for test, speeds in result.speeds.items():
        ours = max(speed for name, speed in speeds.items() if name != LLAMA)
        tuned, theirs = speeds.get(TUNED), speeds.get(LLAMA)
        row = [result.model, test, f"{speeds[DEFAULT]:,.1f}"]
        row += [f"{tuned:,.1f} ({tuned / speeds[DEFAULT]:.2f} ×)" if tuned else "–"]
        row += [f"{theirs:,.1f} (edge {ours / theirs:.2f} ×)" if theirs else "–"]
        of_decode = [f"{100 * result.share:.0f} %", str(result.dispatches), f"{result.host * 1e6:.0f} µs"]
        yield row + (of_decode if test == "decode" else [""] * 3)


def models(options: argparse.Namespace) -> list[Model]:
    named = options.model or list(INSTALLED)
    if options.large:
        cache = files_folder()
        source = edge.open_model(INSTALLED[0]).file.path
        named = [*named, *(large_file(cache, source, shape) for shape in LARGE.values())]
    return [edge.open_model(str(each)) for each in named]


def adapters(texts: Sequence[str]) -> list[Adapter]:
    if texts:
        return [choose_adapter(text) for text in texts]
    found = all_adapters()
    return [each for each in found if each.kind != "cpu"] or found or [choose_adapter()]


def tuning_of(text: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (each.partition("=") for each in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapter", action="append", default=[], help="part of a name, or HOST:INDEX; again for more")
    parser.add_argument("--model", action="append", help="a GGUF file or the name of a model; again for more")
    parser.add_argument("--large", action="store_true", help="also random Llamas of 1B and 3B")
    parser.add_argument("--tuning", type=tuning_of, help="NAME=N,… instead of what edge tune recorded")
    parser.add_argument("--llama-bench", type=Path, help="llama-bench of a build of llama.cpp for this device")
    parser.add_argument("--llama-args", default="", help="more of its arguments")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    llama = (
        LlamaBench(options.llama_bench, ("-ngl", "99", *options.llama_args.split())) if options.llama_bench else None
    )
    results = []
    try:
        for adapter in adapters(options.adapter):
            os.environ[VARIABLE] = adapter.place
            bandwidth = measure_bandwidth(adapter)
            for model in models(options):
                results.append(
                    measure(
                        model, adapter, bandwidth, options.tuning, llama, options.rounds, options.prompt, options.steps
                    )
                )
    except EdgeError as error:
        raise SystemExit(str(error)) from None
    if options.json:
        print(json.dumps({"machine": machine(), "results": [asdict(result) for result in results]}))
        return
    about = machine()
    print(f"\n{about['cpu']} (family {about['family']}), {about['cores']} cores, {about['system']}")
    heads = ["model", "tok/s", DEFAULT, TUNED, LLAMA, "bandwidth", "dispatches", "host"]
    for name in dict.fromkeys(result.adapter for result in results):
        mine = [result for result in results if result.adapter == name]
        print(f"\n{name}, reads {mine[0].bandwidth / 1e9:,.1f} GB/s\n")
        print(table(heads, [row for result in mine for row in rows(result)], left=2))


if __name__ == "__main__":
    main()

"""The share of this device's ceilings that engines reach: the figures by which edge predicts speed, measured anew.

Every round measures the ceilings and runs each engine once. The best of all rounds counts, since other processes only
slow an engine down. With --threads 1, CPU time counts, which other processes affect least: use it on a busy machine to
measure the cost of arithmetic.

reading: bytes of weights over the time of a token at an empty cache. rows: the time that rows add to that. linear,
attention: from a chunk at an empty cache and one behind many rows, less the time of its first token. integers: the
share of the weights that the best kernels multiply as integers. step: a token of a model with hardly any weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig
from edge.backends.counts import Footprint
from edge.backends.kv_cache import KVState, end_of
from edge.cli.terminal.show import table
from edge.devices.host import usable_cores
from edge.devices.probe import Ceilings, measure_ceilings
from edge.lab.prediction.efficiency import weight_shares
from edge.lab.prediction.work import Work, work_of
from edge.model.model import Model, open_model

TINY = Path(__file__).parent.parent / "tests" / "golden" / "llama-one-layer.gguf"
CHUNK, DEEP, CAPACITY = 256, 1536, 2048
STEPS = 24  # tokens that are decoded in a row
KINDS = {"cpu": ("f16", "int8", "int4"), "llamacpp": ("f16", "q8_0", "q4_0"), "onnx": ("f32", "int8")}


@dataclass(frozen=True)
class Times:
    """Seconds: a token at an empty cache and behind DEEP rows; a chunk at an empty cache and behind DEEP rows."""

    token: float
    deep_token: float
    chunk: float
    deep_chunk: float

    def quicker(self, other: Times) -> Times:
        """The shorter of each time."""
        return Times(*map(min, astuple(self), astuple(other)))


class Subject:
    """An engine with a model, and its load on the device."""

    def __init__(self, name: str, model: Model, kv_dtype: str, threads: int, capacity: int = CAPACITY) -> None:
        module = find_backend(name, model.file, model.spec)
        repack = module.can_repack(model.spec)
        self.config = EngineConfig(capacity, min(CHUNK, capacity), kv_dtype, threads, repack=repack)
        self.name, self.spec = name, model.spec
        self.integers = weight_shares(model.spec, name, self.config).get("integers", 0.0)
        self.need: Footprint = module.footprint(model.spec, self.config)
        self.engine: Engine = module.load(model.file, model.spec, self.config)
        self.tokens = np.random.default_rng(0).integers(0, model.spec.vocab, capacity, dtype=np.int32)
        self.clock = time.process_time if threads == 1 else time.perf_counter

    def times(self) -> Times:
        chunk = self._run(self.tokens[:CHUNK], at=0, times=1)
        token = self._run(self.tokens[:1], at=0, times=STEPS)
        deep = self._fill(DEEP)
        deep_token = self._run(self.tokens[:1], at=DEEP, times=STEPS, end=deep)
        return Times(token, deep_token, chunk, self._run(self.tokens[:CHUNK], at=DEEP, times=1, end=deep))

    def token(self) -> float:
        return self._run(self.tokens[:1], at=0, times=STEPS)

    def _fill(self, rows: int) -> KVState | None:
        """The end of these rows, to which `_run` goes back."""
        kv = self.engine.kv
        while kv.length < rows:
            self.engine.forward(self.tokens[kv.length : min(rows, kv.length + CHUNK)])
        return end_of(kv)

    def _run(self, tokens: np.ndarray, at: int, times: int, end: KVState | None = None) -> float:
        self.engine.kv.truncate(at, end)
        started = self.clock()
        for _ in range(times):
            self.engine.forward(tokens)
        return (self.clock() - started) / times


def efficiencies(subject: Subject, took: Times, step: float, most: Ceilings) -> list[float]:
    """Shares of bandwidth (reading, rows), of float32 and int8 (linear; 0: unknown), of float32 (attention)."""

    def work(tokens: int, context: int) -> Work:
        return work_of(subject.spec, subject.config, subject.need, tokens, context)

    near, far = work(1, STEPS // 2), work(1, DEEP + STEPS // 2)
    reading = near.weight_bytes / (took.token - step)
    rows = (far.kv_bytes - near.kv_bytes) / (took.deep_token - took.token)
    one, first, behind = work(1, 0), work(CHUNK, 0), work(CHUNK, DEEP)
    rows_of_chunk = (behind.kv_bytes - first.kv_bytes) / rows
    attention = (behind.attention_flops - first.attention_flops) / (took.deep_chunk - took.chunk - rows_of_chunk)
    attended = (first.attention_flops - one.attention_flops) / attention
    linear = (_linear(first) - _linear(one)) / (took.chunk - took.token - attended)
    bandwidth, flops = most.read_bytes_per_s, most.f32_flops
    return [
        reading / bandwidth, rows / bandwidth, linear / flops, linear / most.int8_ops if most.int8_ops else 0.0,
        attention / flops,
    ]  # fmt: skip


def _linear(work: Work) -> float:
    return work.flops - work.attention_flops


def _higher(one: Ceilings, other: Ceilings) -> Ceilings:
    return Ceilings(
        max(one.read_bytes_per_s, other.read_bytes_per_s),
        max(one.f32_flops, other.f32_flops),
        max(one.int8_ops or 0.0, other.int8_ops or 0.0) or None,
        one.threads,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--engines", default="cpu,llamacpp")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    arguments = parser.parse_args()
    engines, threads = arguments.engines.split(","), arguments.threads
    subjects = [
        Subject(name, open_model(model), kind, threads)
        for name in engines for model in arguments.models for kind in KINDS[name]
    ]  # fmt: skip
    tiny = {name: Subject(name, open_model(TINY), KINDS[name][0], threads, 128) for name in engines}
    best: dict[int, Times] = {}
    steps = dict.fromkeys(engines, float("inf"))
    most = Ceilings(0.0, 0.0, None, threads)
    for _ in range(arguments.rounds):
        most = _higher(most, measure_ceilings(threads, seconds=1.2))
        for index, subject in enumerate(subjects):
            took = subject.times()
            best[index] = took.quicker(best.get(index, took))
            steps[subject.name] = min(steps[subject.name], tiny[subject.name].token())
    show(subjects, [efficiencies(each, best[i], steps[each.name], most) for i, each in enumerate(subjects)], steps)
    print(
        f"\nread {most.read_bytes_per_s / 1e9:.1f} GB/s, float32 {most.f32_flops / 1e9:.0f} GFLOP/s, "
        f"int8 {(most.int8_ops or 0) / 1e9:.0f} Gop/s with {threads} threads: the best of {arguments.rounds} rounds"
    )


def show(subjects: Sequence[Subject], reached: Sequence[list[float]], steps: dict[str, float]) -> None:
    rows = [
        [each.name, each.spec.label, each.config.kv_dtype, f"{each.integers:.0%}", *(f"{one:.2f}" for one in values),
         f"{steps[each.name] * 1e6:.0f}"]
        for each, values in zip(subjects, reached, strict=True)
    ]  # fmt: skip
    print("\n## Efficiency of engines\n")
    headings = [
        "engine",
        "model",
        "rows",
        "integers",
        "reading",
        "rows",
        "linear of float32",
        "linear of int8",
        "attention",
    ]
    print(table([*headings, "step, µs"], rows, left=3))


if __name__ == "__main__":
    main()

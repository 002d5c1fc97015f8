"""What engines reach of this device's ceilings: the constants of edge/prediction/efficiency.py, measured anew.

Every round reads the ceilings and runs each engine once; the best of all rounds counts, since what neighbours take is
not the engine's.
weights: bytes of weights over the time of a token at an empty cache. kv: what rows add to that. matmul, attention: from
a chunk at an empty cache and one behind many rows. step: a token of a model that weighs next to nothing.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig, Footprint
from edge.cli.show import table
from edge.devices.host import usable_cores
from edge.devices.probe import measure_ceilings
from edge.opened import Model, open_model
from edge.prediction.work import Work, work_of

TINY = Path(__file__).parent.parent / "tests" / "golden" / "llama-one-layer.gguf"
CHUNK, DEEP, CAPACITY = 256, 1536, 2048
STEPS = 24  # tokens that are decoded in a row
KINDS = {"tvm": "f16", "llamacpp": "f16", "onnx": "f32"}


@dataclass(frozen=True)
class Times:
    """Seconds: a token at an empty cache and behind DEEP rows; a chunk at an empty cache and behind DEEP rows."""

    token: float
    deep_token: float
    chunk: float
    deep_chunk: float

    def quicker(self, other: Times) -> Times:
        """The shorter of each."""
        return Times(*map(min, astuple(self), astuple(other)))


class Subject:
    """An engine with a model, and what it asks of the device."""

    def __init__(self, name: str, model: Model, capacity: int = CAPACITY) -> None:
        module = find_backend(name, model.file, model.spec)
        repack = module.can_repack(model.spec)
        self.config = EngineConfig(capacity, min(CHUNK, capacity), KINDS[name], usable_cores(), repack=repack)
        self.name, self.spec = name, model.spec
        self.need: Footprint = module.footprint(model.spec, self.config)
        self.engine: Engine = module.load(model.file, model.spec, self.config)
        self.tokens = np.random.default_rng(0).integers(0, model.spec.vocab, capacity, dtype=np.int32)

    def times(self) -> Times:
        chunk = self._run(self.tokens[:CHUNK], at=0, times=1)
        token = self._run(self.tokens[:1], at=0, times=STEPS)
        self._fill(DEEP)
        deep_token = self._run(self.tokens[:1], at=DEEP, times=STEPS)
        return Times(token, deep_token, chunk, self._run(self.tokens[:CHUNK], at=DEEP, times=1))

    def token(self) -> float:
        return self._run(self.tokens[:1], at=0, times=STEPS)

    def _fill(self, rows: int) -> None:
        kv = self.engine.kv
        while kv.length < rows:
            self.engine.forward(self.tokens[kv.length : min(rows, kv.length + CHUNK)])

    def _run(self, tokens: np.ndarray, at: int, times: int) -> float:
        self.engine.kv.truncate(at)
        started = time.perf_counter()
        for _ in range(times):
            self.engine.forward(tokens)
        return (time.perf_counter() - started) / times


def efficiencies(subject: Subject, took: Times, step: float, read: float, flops: float) -> list[float]:
    """weights, kv, matmul, attention."""

    def work(tokens: int, context: int) -> Work:
        return work_of(subject.spec, subject.config, subject.need, tokens, context)

    near, far = work(1, STEPS // 2), work(1, DEEP + STEPS // 2)
    weights = near.weight_bytes / (took.token - step) / read
    kv = (far.kv_bytes - near.kv_bytes) / (took.deep_token - took.token) / read
    first, behind = work(CHUNK, 0), work(CHUNK, DEEP)
    more = behind.attention_flops - first.attention_flops
    attention = more / (took.deep_chunk - took.chunk)
    linear = first.flops - first.attention_flops
    matmul = linear / (took.chunk - step - first.attention_flops / attention)
    return [weights, kv, matmul / flops, attention / flops]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--engines", default="tvm,llamacpp")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    engines = arguments.engines.split(",")
    subjects = [Subject(name, open_model(model)) for name in engines for model in arguments.models]
    tiny = {name: Subject(name, open_model(TINY), 128) for name in engines}
    best: dict[int, Times] = {}
    steps = dict.fromkeys(engines, float("inf"))
    read = flops = 0.0
    for _ in range(arguments.rounds):
        ceiling = measure_ceilings(seconds=0.8)
        read, flops = max(read, ceiling.read_bytes_per_s), max(flops, ceiling.f32_flops)
        for index, subject in enumerate(subjects):
            took = subject.times()
            best[index] = took.quicker(best.get(index, took))
            steps[subject.name] = min(steps[subject.name], tiny[subject.name].token())
    print(f"\n## Efficiency of engines\n\nread {read / 1e9:.1f} GB/s, float32 {flops / 1e9:.0f} GFLOP/s")
    print(f"with {usable_cores()} threads, the best of {arguments.rounds} rounds\n")
    rows = []
    for index, subject in enumerate(subjects):
        step = steps[subject.name]
        reached = efficiencies(subject, best[index], step, read, flops)
        rows.append([subject.name, subject.spec.label, *(f"{value:.2f}" for value in reached), f"{step * 1e6:.0f}"])
    print(table(["engine", "model", "weights", "kv", "matmul", "attention", "step, µs"], rows, left=2))


if __name__ == "__main__":
    main()

"""What our engines make of a device's ceilings: learnt on one machine, so that others can be estimated.

tvm, llamacpp: by `benchmarks/efficiency.py` with SmolLM2-135M on a 2-core AMD EPYC with AVX-512 (61 GB/s read, 242
GFLOP/s by NumPy), rounded; llamacpp between Q4_0, which it re-lays, and Q4_1. onnx, reference: rough guesses.
Another processor's, and another model's, differ: what follows from these is an estimate, and is called so everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """weights, kv: of the read bandwidth, while weights are multiplied and rows of the cache attended to. matmul,
    attention: of the float32 rate; above 1 where integers are multiplied. step_s: seconds of every pass besides."""

    weights: float
    kv: float
    matmul: float
    attention: float
    step_s: float


_ENGINES = {
    "tvm": Efficiency(weights=0.93, kv=0.60, matmul=4.2, attention=1.5, step_s=20e-6),
    "llamacpp": Efficiency(weights=0.30, kv=0.12, matmul=1.0, attention=0.35, step_s=55e-6),
    "onnx": Efficiency(weights=0.30, kv=0.15, matmul=1.5, attention=0.50, step_s=300e-6),
    "reference": Efficiency(weights=0.02, kv=0.02, matmul=0.3, attention=0.20, step_s=5e-3),
}

# Instruction sets without a dot product of bytes need more instructions for the same integers: an assumption, from the
# number of them (2 to 4) that take the place of one.
_SLOWER_MATMUL = {"avx2": 0.5, "neon": 0.35, "generic": 0.25}


def efficiency_of(backend: str, isa: str | None = None) -> Efficiency:
    """Of an engine on a target of the native engine; isa None: one with a dot product of bytes, as where it was
    measured."""
    found = _ENGINES[backend]
    slower = _SLOWER_MATMUL.get(isa or "", 1.0)
    return Efficiency(found.weights, found.kv, found.matmul * slower, found.attention, found.step_s)

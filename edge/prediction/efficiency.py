"""The share of a device's ceilings that our engines reach: measured on one machine, to estimate others.

tvm, llamacpp: by `benchmarks/efficiency.py` with SmolLM2-135M in Q4_1, Q4_0 and F16 on a 2-core AMD EPYC with AVX-512
(one thread: 28 GB/s read, 110 GFLOP/s by NumPy, 854 Gop/s of bytes by ONNX Runtime), rounded; the bandwidths with two
threads, at 61 GB/s, and their ratios between types with one. onnx, reference: rough guesses. Another processor's, and
another model's, differ: what follows from these is an estimate, and is called so everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from edge.backends.base import EngineConfig
from edge.backends.llamacpp import RELAID_TYPES
from edge.model.spec import ModelSpec

Kind = Literal["integers", "others", "floats"]
"""Of weights. integers: those that the engine multiplies as integers, by its best kernels. others: quantized ones that
llama.cpp has not re-laid, and multiplies row by row."""
Shares = Mapping[Kind, float]
"""Of the bytes of the weights."""


@dataclass(frozen=True)
class Weights:
    """reading: of the read bandwidth, while they are multiplied with one token. float32: of that rate, while they are
    multiplied with many; above 1 where integers are. int8: of that rate, which goes before; None: it says nothing of
    them."""

    reading: float
    float32: float
    int8: float | None = None

    def rate(self, flops: float, int8_ops: float | None) -> float:
        """Operations per second, of ceilings; int8_ops: None if unknown."""
        return int8_ops * self.int8 if int8_ops and self.int8 else flops * self.float32


@dataclass(frozen=True)
class Rows:
    """Of the cache. reading: of the read bandwidth, while one token attends to them. float32: of that rate, while
    many do."""

    reading: float
    float32: float


@dataclass(frozen=True)
class Efficiency:
    """rows: of each KV dtype, the engine's default first. step_s: seconds of every pass besides."""

    weights: Mapping[Kind, Weights]
    rows: Mapping[str, Rows]
    step_s: float

    def rows_of(self, kv_dtype: str) -> Rows:
        return self.rows.get(kv_dtype) or next(iter(self.rows.values()))

    def together(self, shares: Shares, of: Callable[[Weights], float]) -> float:
        """What weights of several kinds give together, each taking time in inverse proportion."""
        return 1 / sum(share / of(self.weights[kind]) for kind, share in shares.items())


_ENGINES = {
    "tvm": Efficiency(
        {"integers": Weights(0.93, 4.6, 0.57), "floats": Weights(0.93, 1.4)},
        {"f16": Rows(0.60, 1.8), "int8": Rows(0.55, 1.8), "int4": Rows(0.27, 1.6)},
        step_s=20e-6,
    ),
    "llamacpp": Efficiency(
        {"integers": Weights(0.43, 1.8, 0.24), "others": Weights(0.30, 0.42), "floats": Weights(0.70, 1.1)},
        {"f16": Rows(0.12, 0.37), "q8_0": Rows(0.05, 0.09), "q4_0": Rows(0.012, 0.045)},
        step_s=50e-6,
    ),
    "onnx": Efficiency(
        {"integers": Weights(0.30, 1.5, 0.2), "floats": Weights(0.30, 1.0)}, {"f32": Rows(0.15, 0.50)}, step_s=300e-6
    ),
    "reference": Efficiency({"floats": Weights(0.02, 0.3)}, {"f32": Rows(0.02, 0.20)}, step_s=5e-3),
}

# Instruction sets without a dot product of bytes need more instructions for the same integers: an assumption, from the
# number of them (2 to 4) that take the place of one. Of no use where the int8 rate is known: it was measured with them.
_SLOWER = {"avx2": 0.5, "neon": 0.35, "generic": 0.25}

_FLOATS = {"F32", "F16", "BF16"}


def efficiency_of(backend: str, isa: str | None = None) -> Efficiency:
    """Of an engine on a target of the native engine; isa None: one with a dot product of bytes, as where it was
    measured."""
    found, slower = _ENGINES[backend], _SLOWER.get(isa or "", 1.0)
    weights = {
        kind: replace(each, float32=each.float32 * slower) if kind == "integers" else each
        for kind, each in found.weights.items()
    }
    return replace(found, weights=weights)


def weight_shares(spec: ModelSpec, backend: str, config: EngineConfig) -> Shares:
    """Of the kinds of weights that the engine makes of a model's, those that there are."""
    shares: dict[Kind, float] = {}
    total = sum(size for _, size in spec.type_bytes)
    for name, size in spec.type_bytes:
        kind = _kind(name, backend, config)
        shares[kind] = shares.get(kind, 0.0) + size / total
    return shares


def _kind(weight_type: str, backend: str, config: EngineConfig) -> Kind:
    if backend == "reference" or weight_type in _FLOATS:
        return "floats"
    if backend == "llamacpp" and not (config.repack and weight_type in RELAID_TYPES):
        return "others"
    return "integers"

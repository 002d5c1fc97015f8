"""What our engines make of a device's ceilings: learnt on one machine, so that others can be estimated.

tvm, llamacpp: by `benchmarks/efficiency.py` with SmolLM2-135M on a 2-core AMD EPYC with AVX-512, rounded. onnx,
reference: rough guesses. Another processor's, and another model's, differ: what follows from these is an estimate, and
is called so everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edge.backends.base import EngineConfig
from edge.backends.llamacpp import RELAID_TYPES
from edge.spec import ModelSpec


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
    """quick: weights that the engine multiplies as integers, by its best kernels; plain: all others. rows: of each KV
    dtype, the engine's default first. step_s: seconds of every pass besides."""

    quick: Weights
    plain: Weights
    rows: Mapping[str, Rows]
    step_s: float

    def rows_of(self, kv_dtype: str) -> Rows:
        return self.rows.get(kv_dtype) or next(iter(self.rows.values()))


_ENGINES = {
    "tvm": Efficiency(
        quick=Weights(0.93, 4.2, 0.56), plain=Weights(0.93, 1.0), rows={"f16": Rows(0.60, 1.5)}, step_s=20e-6
    ),
    "llamacpp": Efficiency(
        quick=Weights(0.30, 1.0, 0.15), plain=Weights(0.30, 1.0), rows={"f16": Rows(0.12, 0.35)}, step_s=55e-6
    ),
    "onnx": Efficiency(
        quick=Weights(0.30, 1.5, 0.2), plain=Weights(0.30, 1.0), rows={"f32": Rows(0.15, 0.50)}, step_s=300e-6
    ),
    "reference": Efficiency(
        quick=Weights(0.02, 0.3), plain=Weights(0.02, 0.3), rows={"f32": Rows(0.02, 0.20)}, step_s=5e-3
    ),
}

# Instruction sets without a dot product of bytes need more instructions for the same integers: an assumption, from the
# number of them (2 to 4) that take the place of one. Of no use where the int8 rate is known: it was measured with them.
_SLOWER = {"avx2": 0.5, "neon": 0.35, "generic": 0.25}

_FLOATS = {"F32", "F16", "BF16"}


def efficiency_of(backend: str, isa: str | None = None) -> Efficiency:
    """Of an engine on a target of the native engine; isa None: one with a dot product of bytes, as where it was
    measured."""
    found = _ENGINES[backend]
    slower = _SLOWER.get(isa or "", 1.0)
    return replace(found, quick=replace(found.quick, float32=found.quick.float32 * slower))


def quick_share(spec: ModelSpec, backend: str, config: EngineConfig) -> float:
    """Of the bytes of the weights, those that the engine multiplies as integers, by its best kernels."""
    sizes = dict(spec.type_bytes)
    quick = set(sizes) - _FLOATS
    if backend == "llamacpp":  # of other types it multiplies every row by itself
        quick = quick & RELAID_TYPES if config.repack else set()
    if backend == "reference" or not sizes:
        return 0.0
    return sum(sizes[name] for name in quick) / sum(sizes.values())

"""Efficiency: the shares of a device's ceilings that an engine reaches, measured on one machine to estimate others.

Each engine states its own. cpu, llamacpp: by `benchmarks/efficiency.py` with SmolLM2-135M in Q4_1, Q4_0 and F16 on a
2-core AMD EPYC with AVX-512 (one thread: 28 GB/s read, 110 GFLOP/s by NumPy, 854 Gop/s of bytes by ONNX Runtime),
rounded; the bandwidths with two threads, at 61 GB/s, and their ratios between types with one. onnx, reference: rough
guesses. Other processors and models differ: an estimate made from these is called an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from edge.records import dataclass

Kind = Literal["integers", "others", "floats"]
"""Kinds of weights. integers: the engine multiplies them as integers, by its best kernels. others: quantized weights
that llama.cpp has not repacked, and multiplies row by row."""
Shares = Mapping[Kind, float]
"""Each kind's share of the weights' bytes."""


@dataclass(frozen=True)
class WeightEfficiency:
    """Efficiency of products with weights."""

    reading: float  # share of the read bandwidth, with one token
    float32: float  # share of the float32 rate, with many tokens; integer kernels exceed 1
    int8: float | None = None  # share of the int8 rate, which takes precedence; None: not applicable

    def rate(self, flops: float, int8_ops: float | None) -> float:
        """Operations per second, from the ceilings; int8_ops: None if unknown."""
        return int8_ops * self.int8 if int8_ops and self.int8 else flops * self.float32


@dataclass(frozen=True)
class RowEfficiency:
    """Efficiency of attention to cached rows."""

    reading: float  # share of the read bandwidth, with one token
    float32: float  # share of the float32 rate, with many tokens


@dataclass(frozen=True)
class Efficiency:
    """The efficiency of an engine."""

    weights: Mapping[Kind, WeightEfficiency]
    rows: Mapping[str, RowEfficiency]  # by KV dtype, the engine's default first
    step_s: float  # additional seconds of every pass

    def rows_of(self, kv_dtype: str) -> RowEfficiency:
        return self.rows.get(kv_dtype) or next(iter(self.rows.values()))

    def together(self, shares: Shares, of: Callable[[WeightEfficiency], float]) -> float:
        """The combined share for weights of several kinds: the harmonic mean, weighted by their bytes."""
        return 1 / sum(share / of(self.weights[kind]) for kind, share in shares.items())

"""Seconds of a pass's parts, by the roofline model (Williams et al. 2009) with the shares that an engine reaches."""

from __future__ import annotations

from edge.backends.efficiency import Efficiency, Shares
from edge.lab.prediction.work import Work


def reading_s(work: Work, reach: Efficiency, shares: Shares, kv_dtype: str, bandwidth: float) -> float:
    """Seconds that memory needs for the bytes. bandwidth: bytes per second."""
    weights = work.weight_bytes / reach.together(shares, lambda each: each.reading)
    return (weights + work.kv_bytes / reach.rows_of(kv_dtype).reading) / bandwidth


def counting_s(
    work: Work, reach: Efficiency, shares: Shares, kv_dtype: str, flops: float, int8_ops: float | None
) -> float:
    """Seconds that the cores need for the arithmetic. flops, int8_ops: operations per second; None: unknown."""
    linear = reach.together(shares, lambda each: each.rate(flops, int8_ops))
    attention = work.attention_flops / (flops * reach.rows_of(kv_dtype).float32)
    return (work.flops - work.attention_flops) / linear + attention

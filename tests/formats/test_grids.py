"""Grids of block types: the bytes are what other readers read, zero is a value, and plain rounding is ggml's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge.converters.quantizers.hqq import hqq
from edge.converters.quantizers.rtn import nearest
from edge.formats import nf4
from edge.formats.blocks import BLOCK, GRIDS, QuantizedMatrix, dequantize, half, nbytes, unpack
from edge.types import FloatArray

KINDS = sorted(GRIDS)
MINIMA = [kind for kind in KINDS if GRIDS[kind].minima]


def normal(rows: int, columns: int, seed: int = 1) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@st.composite
def codings(draw: st.DrawFn) -> QuantizedMatrix:
    """Any codes with any finite scales."""
    grid = GRIDS[draw(st.sampled_from(KINDS))]
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    numbers = hnp.arrays(np.float16, (rows, blocks), elements=st.floats(-9, 9, width=16))
    codes = draw(hnp.arrays(np.uint8, (rows, blocks * BLOCK), elements=st.integers(0, len(grid.levels) - 1)))
    scales = draw(numbers).astype(np.float32)
    return QuantizedMatrix(grid, codes, scales, draw(numbers).astype(np.float32) if grid.minima else None)


@given(codings())
def test_gguf_reads_values_that_codes_mean(quantized: QuantizedMatrix) -> None:
    found = dequantize(quantized.data, quantized.grid.kind)
    np.testing.assert_allclose(found, quantized.values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", MINIMA)
@pytest.mark.parametrize("group_size", [32, 128])
def test_zero_is_value_of_every_block(kind: str, group_size: int) -> None:
    """Also where all weights of a block have the same sign."""
    weight = normal(6, 288) + np.linspace(-3, 3, 288, dtype=np.float32)
    for quantized in (nearest(weight, GRIDS[kind], np.ones(288), group_size), hqq(weight, GRIDS[kind], group_size)):
        codes = np.rint(-quantized.minima / quantized.scales).repeat(BLOCK, axis=1).astype(np.uint8)
        zeros = QuantizedMatrix(quantized.grid, codes, quantized.scales, quantized.minima)
        assert not dequantize(zeros.data, kind).any()


@pytest.mark.parametrize("kind", KINDS)
def test_searched_scales_beat_extremes(kind: str) -> None:
    weight, cost = normal(8, 256), np.geomspace(1, 100, 256)
    plain = nearest(weight, GRIDS[kind], cost, shrinks=(1.0,))
    searched = nearest(weight, GRIDS[kind], cost)
    losses = [((weight - each.values) ** 2 * cost).sum() for each in (searched, plain)]
    assert losses[0] <= losses[1]
    assert losses[0] < 0.97 * losses[1] or kind == "Q8_0"


DAMAGED = sorted({
    *GRIDS, "F16", "BF16", "F32", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_XS", "IQ1_M", "MXFP4", "TQ1_0",
    "NVFP4", "Q1_0", "Q2_0",
})  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_blocks_are_read_without_warnings(kind: str) -> None:
    """Whatever their bytes are, also where all are ones: numbers of float16 are then NaN, or nearly the largest."""
    size = nbytes(kind, 256)
    rows = np.random.default_rng(3).integers(0, 256, (256, size)).astype(np.uint8)
    rows[-3:] = np.array([[0xFF], [0x7B], [0x7C]], np.uint8)
    assert dequantize(rows, kind).shape == (256, 256)
    if kind in GRIDS or kind == "Q4_K":
        found = unpack(rows, kind)
        assert found.quants.size == rows.shape[0] * 256
    if kind in GRIDS:
        minima = found.minima if GRIDS[kind].minima else None
        codes = np.zeros((256, 256), np.uint8)
        assert QuantizedMatrix(GRIDS[kind], codes, found.scales, minima).values.shape == (256, 256)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("value", [np.float32(3e38), np.float32(np.inf), np.float32(np.nan)])
def test_huge_values_are_rounded_without_warnings(value: np.float32) -> None:
    values = np.full((2, 64), value, np.float32)
    assert not np.isfinite(half(values)).any()
    assert nf4.dequantize(*nf4.quantize(values)).shape == values.shape

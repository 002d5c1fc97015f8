"""Convert tensors between Hugging Face's layout and GGUF's, and between float types."""

from __future__ import annotations

import numpy as np

from edge.converters.huggingface.architectures.common import Layout
from edge.converters.quantizers.rtn import quantize
from edge.errors import ModelFormatError
from edge.types import AnyArray, FloatArray

_SLICE = 1 << 20  # values converted at a time, to keep memory beside the tensor small


def to_gguf(array: AnyArray, layout: Layout, heads: int) -> AnyArray:
    """A tensor of any dtype in GGUF's layout; `plus one` requires floats. heads: the number of interleaved heads."""
    if layout == "interleaved":
        halves: AnyArray = array.reshape(heads, 2, len(array) // heads // 2, -1)
        return np.asarray(halves.swapaxes(1, 2).reshape(array.shape))
    if layout == "plus one":
        return np.asarray(array + np.float32(1))
    return array.T if layout == "transposed" and array.ndim == 2 else array


def to_hf(array: AnyArray, layout: Layout, heads: int) -> AnyArray:
    """The inverse of `to_gguf`."""
    if layout == "interleaved":
        pairs: AnyArray = array.reshape(heads, len(array) // heads // 2, 2, -1)
        return np.asarray(pairs.swapaxes(1, 2).reshape(array.shape))
    if layout == "plus one":
        return np.asarray(array - np.float32(1))
    return array.T if layout == "transposed" and array.ndim == 2 else array


def to_float32(array: AnyArray, kind: str) -> FloatArray:
    """Convert F32, F16, or BF16 stored as uint16."""
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def to_kind(array: AnyArray, kind: str, wanted: str, name: str) -> AnyArray:
    """Round values to another float type, in slices. Raises ModelFormatError on overflow."""
    if kind == wanted:
        return array
    flat = np.ascontiguousarray(array).reshape(-1)
    result = np.empty(flat.size, {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[wanted])
    for start in range(0, flat.size, _SLICE):
        values = to_float32(flat[start : start + _SLICE], kind)
        with np.errstate(over="ignore"):
            result[start : start + _SLICE] = quantize(values[None], wanted).view(result.dtype)[0]
    if not is_finite(result, wanted):
        raise ModelFormatError(f"{name} has values that are too large for {wanted}")
    return result.reshape(array.shape)


def is_finite(array: AnyArray, kind: str) -> bool:
    """Whether no value is infinite or NaN."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, _SLICE):
        part = flat[start : start + _SLICE]
        if not ((part & 0x7F80) != 0x7F80 if kind == "BF16" else np.isfinite(part)).all():
            return False
    return True

"""ONNX Runtime's storage of KV rows: floats, or integers with a scale per channel.

int8: quant · scale. int4: (quant − 8) · scale, two in a byte, the first low.
"""

from __future__ import annotations

import numpy as np

from edge.types import AnyArray, FloatArray

NUMPY_TYPE = {"f32": "float32", "f16": "float16", "int8": "int8", "int4": "uint8"}
LARGEST = {"int8": 127, "int4": 7}  # quantized value


def row_values(values: int, dtype: str) -> int:
    """Stored elements of a row's `values` values."""
    return values // 2 if dtype == "int4" else values


def load_rows(stored: AnyArray, scales: FloatArray, dtype: str) -> FloatArray:
    """Dequantize rows [..., n, width] to float32 [..., n, head]; scales [..., 1, head]. A view if rows are float32."""
    return stored if dtype == "f32" else unscaled(stored, dtype) * (scales if dtype in LARGEST else np.float32(1))


def unscaled(stored: AnyArray, dtype: str) -> FloatArray:
    """Stored rows as float32 without scales: integral values."""
    if dtype == "int4":
        both = np.stack([stored & 15, stored >> 4], axis=-1).astype(np.float32) - np.float32(8)
        return np.asarray(both.reshape(*stored.shape[:-1], -1))
    return np.asarray(stored, np.float32)


def store_rows(values: FloatArray, scales: FloatArray, dtype: str) -> AnyArray:
    """The inverse of `load_rows`."""
    if dtype not in LARGEST:
        return values.astype(NUMPY_TYPE[dtype])
    most = LARGEST[dtype]
    quants = np.clip(np.rint(values / scales), -most - 1, most).astype(np.int8)
    if dtype == "int8":
        return np.asarray(quants)
    nibbles = (quants + 8).astype(np.uint8)
    return np.asarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4))

"""llama.cpp's own rounding of rows, in this process.

Its C code aborts on rows that it cannot fit to a type with a codebook (IQ1 to IQ3), so only tests round to these here.
"""

from __future__ import annotations

import ctypes

import numpy as np

from edge.backends.llamacpp.library import library
from edge.formats.blocks import TYPE_IDS, nbytes
from edge.types import AnyArray, FloatArray

K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # the smallest first


def quantize_rows(values: FloatArray, kind: str, importance: FloatArray | None = None) -> AnyArray:
    """Round finite float32 [rows, n] as llama.cpp does: uint8 [rows, bytes of n values].

    importance: float32 [n], ≥ 0, the weight of errors in each column; None: by the type's own rule. Raises
    MissingExtraError.
    """
    quantize = library()._lib.ggml_quantize_chunk
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    quantize.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    quantize.restype = ctypes.c_size_t
    values, (rows, columns) = np.ascontiguousarray(values, np.float32), values.shape
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    data = np.empty((rows, nbytes(kind, columns)), np.uint8)
    quantize(
        TYPE_IDS[kind], values.ctypes.data, data.ctypes.data, 0, rows, columns,
        None if weights is None else weights.ctypes.data,
    )  # fmt: skip
    return data

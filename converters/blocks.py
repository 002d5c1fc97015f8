"""Block formats of weights: from float32 to bytes and back, by the name of the type (Q4_0, Q8_0, F16 …).

What is stored is bit for bit what llama.cpp and the `gguf` package store for plain rounding.
"""

from __future__ import annotations

import numpy as np

from edge.errors import UnsupportedError
from edge.formats.gguf import BLOCK_TYPES
from edge.types import AnyArray, FloatArray

TYPE_IDS = {name: index for index, (name, _, _) in BLOCK_TYPES.items()}
FLOATS = ("F32", "F16", "BF16")


def block_size(kind: str) -> int:
    """Values per block. Raises UnsupportedError for types that GGUF does not have."""
    return BLOCK_TYPES[_type_id(kind)][1]


def nbytes(kind: str, values: int) -> int:
    """Bytes of so many values, whole blocks of them."""
    _, block, size = BLOCK_TYPES[_type_id(kind)]
    return values // block * size


def quantize(values: FloatArray, kind: str) -> AnyArray:
    """Round float32 [rows, n] to the nearest values of a type: uint8 [rows, bytes of n values]."""
    if kind == "IQ4_NL":  # the one plain type that gguf does not round to
        from edge.converters.grids import find_grid
        from edge.converters.quantizers.rtn import nearest

        return nearest(values, find_grid(kind), np.ones(values.shape[1])).data
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize as plain

    try:
        data = plain(np.ascontiguousarray(values, np.float32), GGMLQuantizationType(_type_id(kind)))
    except NotImplementedError:
        raise UnsupportedError(f"plain rounding to {kind} is not known here") from None
    return np.ascontiguousarray(data).view(np.uint8).reshape(len(values), -1)


def dequantize(data: AnyArray, kind: str) -> FloatArray:
    """uint8 [rows, bytes] to float32 [rows, n]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as plain

    try:
        return np.asarray(plain(data, GGMLQuantizationType(_type_id(kind))), np.float32)
    except NotImplementedError:
        raise UnsupportedError(f"{kind} cannot be read here") from None


def _type_id(kind: str) -> int:
    try:
        return TYPE_IDS[kind]
    except KeyError:
        raise UnsupportedError(f"there is no block type {kind}") from None

"""Matrices of floats, rounded to Q8_0 when an engine packs them: half the bytes of F16, and products of integers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from edge.formats.blocks import BLOCK, FLOATS, QuantizedMatrix, dequantize, find_grid, half, nbytes
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray

ROUNDED = "Q8_0"


def is_rounded(info: TensorInfo) -> bool:
    """Whether a tensor of a rounded model is a matrix that is rounded."""
    return info.type in FLOATS and len(info.shape) == 2 and info.shape[0] % BLOCK == 0


def in_q8_0(file: GGUFFile, spec: ModelSpec) -> ModelSpec:
    """The model with its matrices of floats rounded, and the bytes that they then have."""
    sizes = Counter[str]()
    for info in file.tensors.values():
        kind = ROUNDED if is_rounded(info) else info.type
        sizes[kind] += nbytes(kind, info.elements)
    return replace(spec, rounded=True, type_bytes=tuple(sizes.items()), weight_bytes=sizes.total())


def round_to_q8_0(data: AnyArray, kind: str) -> AnyArray:
    """Rows of a block type, uint8 [rows, bytes], as those of Q8_0, as llama.cpp's quantizer rounds them."""
    values, grid = dequantize(data, kind), find_grid(ROUNDED)
    blocks = values.reshape(len(values), -1, BLOCK)
    scales = np.abs(blocks).max(axis=-1) / np.float32(127)
    codes = grid.codes(blocks, scales[..., None])
    return QuantizedMatrix(grid, codes.reshape(values.shape), half(scales)).data

"""A model's tensors in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edge.errors import UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.model.tensors import Source
from edge.types import FloatArray, IntArray

UNWARNED = np.errstate(all="ignore")  # damaged weights give values that are not finite, which are refused in one line


def read_weights(
    file: GGUFFile, sources: Mapping[str, Source], progress: Callable[[float], None] | None = None
) -> dict[str, FloatArray]:
    """Tensors in float32, matrices [rows, columns], by the names that `find_tensors` gives them. The matrices of
    experts are concatenated."""
    weights: dict[str, FloatArray] = {}
    for done, (name, source) in enumerate(sources.items(), start=1):
        values = _dequantize(file, source.tensor)
        values = values.reshape(-1) if source.is_flat else values
        weights[name] = values[None] if source.is_row else values[source.index].copy()
        if source.transposed:
            runs = weights[name].reshape(-1, source.run, values.shape[1])
            weights[name] = runs.swapaxes(1, 2).reshape(-1, source.run)
        if progress:
            progress(done / len(sources))
    return weights


def read_weight(file: GGUFFile, name: str) -> FloatArray:
    """A tensor in float32, by its name in the file."""
    return _dequantize(file, name)


def read_rows(file: GGUFFile, name: str, rows: IntArray) -> FloatArray:
    """Rows of a matrix in float32, [rows, columns], by the tensor's name in the file."""
    return _dequantize(file, name, rows)


def _dequantize(file: GGUFFile, name: str, rows: IntArray | None = None) -> FloatArray:
    info = file.tensors[name]
    data = file.tensor_bytes(info).reshape(info.elements // info.shape[0], -1)
    try:
        values = dequantize(data if rows is None else data[rows], info.type)
    except UnsupportedError:
        raise UnsupportedError(
            f"the reference engine cannot read {info.type} ({name}): use --backend=llamacpp"
        ) from None
    if info.factor != 1:
        values = values * np.float32(info.factor)
    return values.reshape((-1, info.shape[0]) if info.rows < info.elements else -1)

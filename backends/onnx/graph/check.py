"""Check written files: graphs by ONNX's checker, weights by comparing sampled rows of every matrix with the source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge.backends.onnx.graph.layout import Layout, Matrix, Place
from edge.backends.onnx.graph.weights import read_rows
from edge.errors import ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.types import AnyArray

_EPSILON = 1e-5  # of a row's largest weight: float32 is multiplied and divided on the way


def check_graphs(paths: Iterable[Path]) -> None:
    """Check graphs. Raises ModelFormatError."""
    import onnx

    for path in paths:
        try:
            onnx.checker.check_model(str(path))
        except onnx.checker.ValidationError as error:
            raise ModelFormatError(f"the graph is not valid ONNX: {str(error).splitlines()[0]}") from None


def check_weights(file: GGUFFile, layout: Layout, data: Path) -> None:
    """Compare the first, middle and last rows of every part of a matrix with the source, within the error of their
    form.

    Raises ModelFormatError.
    """
    if data.stat().st_size != layout.nbytes:
        raise _not_meant(data.name)
    with open(file.path, "rb") as source:
        for name, matrix in layout.matrices.items():
            _check_matrix(file, source, layout, name, matrix, data)


def _check_matrix(file: GGUFFile, source: BinaryIO, layout: Layout, name: str, matrix: Matrix, data: Path) -> None:
    for index, part in enumerate(matrix.parts):
        head = len(part.order) or 1
        for first in {0, part.source.rows // head // 2 * head, part.source.rows - head}:
            rows = read_rows(file, source, layout, part, first, head)
            stored = {
                suffix: _read(data, layout.places[f"{name}.{suffix}"], matrix.row(index, first), head)
                for suffix in matrix.form.arrays(matrix.rows, matrix.columns)
            }
            values, meant = matrix.form.restored(stored, rows.kind), rows.values()
            slack = _EPSILON * np.abs(meant).max(axis=1, keepdims=True)
            if not (np.abs(values[0] - meant) <= values[1] + slack).all():
                raise _not_meant(name)


def _read(data: Path, place: Place, first: int, count: int) -> AnyArray:
    """Read some rows of an array."""
    array = place.array
    mapped = np.memmap(data, array.numpy, "r", place.offset, array.shape)
    return np.array(mapped[first : first + count] if array.rows_axis == 0 else mapped[:, first : first + count])


def _not_meant(name: str) -> ModelFormatError:
    return ModelFormatError(f"the written weights do not read back as the model's ({name})")

"""Writer of an ONNX model's data file: its weights, one slice in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge.backends.onnx.graph.forms import RawRows
from edge.backends.onnx.graph.layout import Layout, Matrix, Place, SourceRows, rows_in
from edge.errors import ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.types import AnyArray, Progress

_SLICE = 1 << 20  # weights that are converted at once, with about 30 bytes for each


def write_weights(file: GGUFFile, layout: Layout, target: Path, progress: Progress | None = None) -> None:
    """Write the data file. Raises ModelFormatError if weights are not finite, OSError."""
    with open(target, "wb") as out, open(file.path, "rb") as source:
        out.truncate(layout.nbytes)
        for done, (name, matrix) in enumerate(layout.matrices.items(), start=1):
            _write_matrix(file, source, layout, name, matrix, out)
            if progress:
                progress(done / len(layout.matrices))
        for name, parts in layout.vectors.items():
            first, of_matrix = 0, layout.matrices.get(name.removesuffix(".bias"))
            for together in _together(file, source, layout, parts, in_turn=of_matrix is not None and of_matrix.in_turn):
                values = _in_turn([rows.values() for rows in together])
                _put(out, layout.places[name], first, values.reshape(-1, *layout.places[name].array.shape[1:]))
                first += sum(len(rows.raw) for rows in together)


def read_rows(file: GGUFFile, source: BinaryIO, layout: Layout, part: SourceRows, first: int, count: int) -> RawRows:
    """Read `count` rows of a part from `first` on, in the graph's order; whole heads, if the order differs.

    Raises ModelFormatError if the file ends before them.
    """
    info = file.tensors[part.source.tensor]
    row_bytes = info.nbytes // rows_in(info, part.source)
    pieces = []
    for start, rows in part.source.runs_of(first, count):
        source.seek(info.offset + start * row_bytes)
        pieces.append(source.read(rows * row_bytes))
    raw = np.frombuffer(b"".join(pieces), np.uint8)
    if raw.size != count * row_bytes:
        raise ModelFormatError(f"{file.path}: the file became shorter while it was read")
    heads = raw.reshape(-1, len(part.order) or 1, row_bytes)
    raw = heads[:, list(part.order) or slice(None)].reshape(count, row_bytes)
    divisors = layout.method.divided.get(part.name)
    return RawRows(
        f"{file.path}: {info.name}", raw, info.type, layout.method.multiplied.get(part.name),
        None if divisors is None else divisors[first : first + count], info.factor,
    )  # fmt: skip


def slices(file: GGUFFile, source: BinaryIO, layout: Layout, part: SourceRows) -> Iterator[RawRows]:
    """Iterate over all rows of a part, in slices that take little memory. Raises as `read_rows`."""
    info, head = file.tensors[part.source.tensor], len(part.order) or 1
    step = max(1, _SLICE // (head * (info.elements // rows_in(info, part.source)))) * head
    for first in range(0, part.source.rows, step):
        yield read_rows(file, source, layout, part, first, min(step, part.source.rows - first))


def _write_matrix(file: GGUFFile, source: BinaryIO, layout: Layout, name: str, matrix: Matrix, out: BinaryIO) -> None:
    first = 0
    for together in _together(file, source, layout, matrix.parts, in_turn=matrix.in_turn):
        stored = [matrix.form.stored(rows) for rows in together]
        for suffix in stored[0]:
            _put(out, layout.places[f"{name}.{suffix}"], first, _in_turn([each[suffix] for each in stored]))
        first += sum(len(rows.raw) for rows in together)


def _together(
    file: GGUFFile, source: BinaryIO, layout: Layout, parts: tuple[SourceRows, ...], *, in_turn: bool
) -> Iterator[tuple[RawRows, ...]]:
    """Slices in the order of writing; in turn, one of each part, whose rows alternate."""
    for group in [parts] if in_turn else [(part,) for part in parts]:
        yield from zip(*(slices(file, source, layout, part) for part in group), strict=True)


def _in_turn(arrays: list[AnyArray]) -> AnyArray:
    """The rows of arrays of the same shape, one of each in turn."""
    return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])


def _put(out: BinaryIO, place: Place, first: int, values: AnyArray) -> None:
    """Write rows from `first` on."""
    itemsize, shape = place.array.numpy.itemsize, place.array.shape
    if place.array.rows_axis == 0:
        row_bytes = place.nbytes // max(1, shape[0])
        out.seek(place.offset + first * row_bytes)
        out.write(np.ascontiguousarray(values, place.array.numpy).data)
        return
    out.flush()
    for column, line in enumerate(np.ascontiguousarray(values, place.array.numpy)):
        os.pwrite(out.fileno(), line.data, place.offset + (column * shape[1] + first) * itemsize)

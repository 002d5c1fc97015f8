"""The data file of an ONNX model: its weights, one slice in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge.converters.writers.onnx_blocks import pack, to_blocks, to_floats, with_means
from edge.converters.writers.onnx_layout import Layout, Matrix, Part
from edge.errors import ModelFormatError
from edge.gguf_file import GGUFFile, TensorInfo
from edge.types import AnyArray

_SLICE = 1 << 20  # weights that are converted at once; on the way there are about 30 bytes for each

Progress = Callable[[float], None]


def write_weights(file: GGUFFile, layout: Layout, target: Path, progress: Progress | None = None) -> None:
    """Write the data file. Raises ModelFormatError if weights are not finite, OSError."""
    with open(target, "wb") as out, open(file.path, "rb") as source:
        out.truncate(layout.nbytes)
        for done, (name, matrix) in enumerate(layout.matrices.items(), start=1):
            _write_matrix(file, source, layout, name, matrix, out)
            if progress:
                progress(done / len(layout.matrices))
        for name, parts in layout.vectors.items():
            out.seek(layout.places[name].offset)
            for part in parts:
                for raw, info in _slices(file, source, part):
                    out.write(_checked(file, info, to_floats(raw, info.type, info.type_id)).tobytes())


def _write_matrix(file: GGUFFile, source: BinaryIO, layout: Layout, name: str, matrix: Matrix, out: BinaryIO) -> None:
    kinds = ("floats",) if matrix.bits == 32 else ("quants", "scales", "zeros")[: 2 + matrix.minima]
    ends = {kind: layout.places[f"{name}.{kind}"].offset for kind in kinds}
    for part in matrix.parts:
        for raw, info in _slices(file, source, part):
            for kind, array in _convert(file, raw, info, matrix).items():
                if kind in ends:
                    out.seek(ends[kind])
                    ends[kind] += out.write(np.ascontiguousarray(array).tobytes())


def _convert(file: GGUFFile, raw: AnyArray, info: TensorInfo, matrix: Matrix) -> dict[str, AnyArray]:
    if matrix.bits == 32:
        return {"floats": _checked(file, info, to_floats(raw, info.type, info.type_id))}
    blocks = to_blocks(raw, info.type, info.type_id, matrix.bits)
    if matrix.minima:
        blocks = with_means(blocks)
    return {
        "quants": pack(blocks.quants, matrix.bits),
        "scales": _checked(file, info, blocks.scales),
        "zeros": pack(blocks.zeros, matrix.bits),
    }


def _slices(file: GGUFFile, source: BinaryIO, part: Part) -> Iterator[tuple[AnyArray, TensorInfo]]:
    """A part's rows in the graph's order, uint8 [rows, row bytes], whole heads at a time."""
    info = file.tensors[part.source.tensor]
    row_bytes, row_values = info.nbytes // info.shape[-1], info.elements // info.shape[-1]
    head = part.source.rows // part.heads if part.heads else 1
    step = max(1, _SLICE // (head * row_values)) * head
    for first in range(0, part.source.rows, step):
        count = min(step, part.source.rows - first)
        source.seek(info.offset + (part.source.first + first) * row_bytes)
        raw = np.frombuffer(source.read(count * row_bytes), np.uint8)
        if raw.size != count * row_bytes:
            raise ModelFormatError(f"{file.path}: the file became shorter while it was read")
        raw = raw.reshape(count, row_bytes)
        if part.heads:  # neighbours come apart, into the halves of their head
            raw = raw.reshape(-1, head // 2, 2, row_bytes).swapaxes(1, 2).reshape(count, row_bytes)
        yield raw, info


def _checked(file: GGUFFile, info: TensorInfo, values: AnyArray) -> AnyArray:
    if not np.isfinite(values).all():
        raise ModelFormatError(f"{file.path}: {info.name} contains values that are no numbers: the file is damaged")
    return values

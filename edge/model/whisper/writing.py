"""Write a Whisper model, of any format that `checkpoint.py` reads, as a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from edge.errors import ModelFormatError
from edge.formats.blocks import FILE_TYPES, FLOATS, TYPE_IDS, block_size
from edge.formats.gguf_writer import Planned, write_gguf
from edge.model.whisper.checkpoint import Checkpoint, Part
from edge.types import AnyArray, FloatArray

Quantize = Callable[[FloatArray, str], AnyArray]
_SLAB = 1 << 20  # values that are rounded at once
_EXACT = ("conv1", "conv2", "position_embd")  # which engines do not multiply: they stay floats


def plan_tensors(found: Checkpoint, kind: str | None) -> list[Planned]:
    """The tensors of the GGUF file. kind: the block type of matrices; None: the checkpoint's floats."""
    planned = []
    for part in found.parts:
        own = "F32" if part.source.dtype == "F32" else "F16"
        if len(part.shape) < 2:
            own = "F32"
        elif kind is not None and not part.name.endswith(_EXACT):
            own = kind if part.shape[-1] % block_size(kind) == 0 else "F16"
        planned.append(Planned(f"{part.name}.{part.kind}", tuple(reversed(part.shape)), own))
    return planned


def plain_blocks(values: FloatArray, kind: str) -> AnyArray:
    """Round float32 [rows, columns] to blocks of a plain type, uint8 [rows, bytes]."""
    from gguf.constants import GGMLQuantizationType  # here: gguf costs 6 MB that most commands save
    from gguf.quants import quantize

    return np.asarray(quantize(values, GGMLQuantizationType(TYPE_IDS[kind])))


def write_whisper(
    found: Checkpoint, target: Path, kind: str | None = None, quantize: Quantize = plain_blocks,
    progress: Callable[[float], None] | None = None,
) -> None:  # fmt: skip
    """Write the model atomically. kind: see `plan_tensors`. quantize: rounds rows to blocks of it.

    Raises InputError if the file cannot be written, ModelFormatError for weights that are not finite.
    """
    planned = plan_tensors(found, kind)
    fields = found.fields | {"general.file_type": np.uint32(FILE_TYPES.get(kind or "F16", 1) or 0)}
    data = (_data(part, each.type, quantize) for part, each in zip(found.parts, planned, strict=True))
    write_gguf(target, fields, planned, data, progress)


def _data(part: Part, kind: str, quantize: Quantize) -> AnyArray:
    array = part.read()
    if not np.isfinite(array).all():
        raise ModelFormatError(f"{part.name} has values that are no numbers, or infinite")
    if kind in FLOATS:
        return np.ascontiguousarray(array, np.float32 if kind == "F32" else np.float16)
    return np.concatenate([quantize(rows.astype(np.float32), kind) for rows in _slabs(array)])


def _slabs(array: AnyArray) -> Iterator[AnyArray]:
    step = max(1, _SLAB // array.shape[1])
    return (array[at : at + step] for at in range(0, len(array), step))

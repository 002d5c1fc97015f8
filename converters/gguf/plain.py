"""Round all matrices of a GGUF file to one plain type, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np

from edge.converters.quantizers.rtn import quantize
from edge.errors import ModelFormatError
from edge.formats.blocks import FILE_TYPES, FLOATS, UNNAMED_FILE_TYPE, block_size, dequantize, nbytes
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_writer import Field, Planned, fields_of, write_gguf
from edge.model.drafters.assistant import is_assistant, plain_file, read_assistant
from edge.model.drafters.eagle import is_eagle
from edge.model.mixtures import bits_of, stays_exact
from edge.model.reader import read_spec
from edge.types import AnyArray, FloatArray

_HEAD = "Q8_0"  # the head decides between tokens: fewer bits there cost more than they save
_ODD = "F16"  # for rows that are not whole blocks
_SLAB = 4 << 20  # bytes of float32 rows that are rounded at once
_VERSION = 2  # of ggml's block formats


def plan_plain(file: GGUFFile, kind: str, *, pure: bool = False) -> list[Planned]:
    """The tensors that `write_plain` writes. pure: round also the head, and matrices that need more bits than others,
    to `kind` instead of Q8_0. Raises the errors of `read_spec`."""
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    if is_assistant(file):
        bits = bits_of(plain_file(file), read_assistant(file))
    else:
        bits = {} if is_eagle(file) else bits_of(file, read_spec(file))
    planned = []
    for info in file.tensors.values():
        wanted = kind
        if (info.name == head or bits.get(info.name) == "more") and not pure and kind not in FLOATS:
            wanted = _HEAD
        if info.shape[0] % block_size(wanted):
            wanted = _ODD
        kept = not _is_matrix(info) or stays_exact(info.name) or bits.get(info.name) == "all"
        planned.append(Planned(info.name, info.shape, info.type if kept else wanted))
    return planned


def write_plain(
    file: GGUFFile,
    target: Path,
    kind: str,
    *,
    pure: bool = False,
    progress: Callable[[float], None] | None = None,
) -> list[Planned]:
    """Write `file` in a type of PLAIN, atomically. Returns the tensors.

    Raises InputError if it cannot be written, ModelFormatError for weights that are not finite.
    """
    planned = plan_plain(file, kind, pure=pure)
    data = (rounded(file, file.tensors[each.name], each.type) for each in planned)
    write_gguf(target, fields_as(file, kind), planned, data, progress)
    return planned


def fields_as(file: GGUFFile, kind: str) -> dict[str, Field]:
    """The file's header, adapted to weights of another type."""
    named = np.uint32(FILE_TYPES.get(kind, UNNAMED_FILE_TYPE))
    return {**fields_of(file), "general.file_type": named, "general.quantization_version": np.uint32(_VERSION)}


def _is_matrix(info: TensorInfo) -> bool:
    """Whether llama.cpp counts the tensor as a matrix, or as matrices of experts: no norms, no learned positions."""
    stem, _, kind = info.name.rpartition(".")
    return len(info.shape) > 1 and kind == "weight" and not stem.endswith("_norm") and stem != "position_embd"


_LARGEST_F16 = 65_504  # scales of blocks cannot exceed it; blocks of smaller weights need no check


def rounded(file: GGUFFile, info: TensorInfo, kind: str) -> AnyArray:
    """A tensor's bytes in another type, rounded in slabs of rows.

    Raises ModelFormatError for weights that are not finite.
    """
    data = file.tensor_bytes(info)
    if info.type == kind:
        return data
    columns, rows = info.shape[0], prod(info.shape[1:])
    data = data.reshape(rows, -1)
    out = np.empty((rows, nbytes(kind, columns)), np.uint8)
    step = max(1, _SLAB // (4 * columns))
    for start in range(0, rows, step):
        values = dequantize(data[start : start + step], info.type)
        check_finite(file, info.name, values)
        with np.errstate(over="ignore", invalid="ignore"):
            stored = quantize(values, kind)
        if np.abs(values).max() > _LARGEST_F16:
            check_encoded(file, info.name, dequantize(stored, kind), kind)
        out[start : start + step] = stored
    return out


def check_finite(file: GGUFFile, name: str, values: FloatArray) -> None:
    """Raise ModelFormatError for weights that are not finite."""
    if not np.isfinite(values).all():
        raise ModelFormatError(f"{file.path}: {name} has weights that are no finite numbers")


def check_encoded(file: GGUFFile, name: str, values: FloatArray, kind: str) -> None:
    """Raise ModelFormatError if finite weights overflowed the scales of a type."""
    if not np.isfinite(values).all():
        raise ModelFormatError(f"{file.path}: {name} has weights that are too large for {kind}")

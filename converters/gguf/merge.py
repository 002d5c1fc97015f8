"""Merge LoRA adapters into the weights: W + scale · (alpha / rank) · B A, matrix by matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge.converters.gguf.plain import check_finite
from edge.converters.quantizers.rtn import quantize
from edge.formats.blocks import FLOATS, dequantize
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_writer import Planned, fields_of, write_gguf
from edge.model.adapters.lora import Lora
from edge.model.tensors import Source
from edge.types import AnyArray

_KEPT_IN = "F16"  # the type of quantized matrices that change, until they are quantized again


def merge_gguf(
    file: GGUFFile, target: Path, lora: Lora, progress: Callable[[float], None] | None = None
) -> None:  # fmt: skip
    """Write the model with its adapters merged, atomically.

    Raises InputError if it cannot be written, ModelFormatError for weights that are not finite.
    """
    planned = plan_merge(file, lora)
    data = (_data(file, file.tensors[each.name], each.type, lora) for each in planned)
    write_gguf(target, fields_of(file), planned, data, progress)


def plan_merge(file: GGUFFile, lora: Lora) -> list[Planned]:
    """The tensors that `merge_gguf` writes: changed matrices become floats, the others keep their type."""
    return [
        Planned(name, info.shape, _KEPT_IN if lora.changes(_whole(info)) and info.type not in FLOATS else info.type)
        for name, info in file.tensors.items()
    ]


def _data(file: GGUFFile, info: TensorInfo, kind: str, lora: Lora) -> AnyArray:
    data = file.tensor_bytes(info)
    if not lora.changes(_whole(info)):
        return data
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        stored = quantize(lora.merged(dequantize(data.reshape(info.shape[1], -1), info.type), _whole(info)), kind)
        check_finite(file, info.name, dequantize(stored, kind))
    return stored


def _whole(info: TensorInfo) -> Source:
    return Source(info.name, 0, info.shape[-1])

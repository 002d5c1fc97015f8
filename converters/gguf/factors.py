"""Multiply the factors of NVFP4 matrices into other blocks, for what reads matrices without them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from edge.converters.quantizers.rtn import quantize
from edge.formats.blocks import dequantize, nbytes
from edge.formats.gguf import GGUFFile, TensorInfo, factors_of, input_factor_name
from edge.formats.gguf_writer import Planned, fields_of, write_gguf
from edge.types import AnyArray

_KIND = "F16"  # which has the products to 2^−11
_ROWS = 256  # at a time


def write_folded(file: GGUFFile, target: Path) -> None:
    """Write a copy whose matrices have no factors: those that had one are float16."""
    factors = factors_of(file.tensors)
    gone = {scale.name for scale in factors.values()} | set(map(input_factor_name, factors))
    infos = [info for name, info in file.tensors.items() if name not in gone]
    kinds = [_KIND if info.name in factors else info.type for info in infos]
    planned = [Planned(info.name, info.shape, kind) for info, kind in zip(infos, kinds, strict=True)]

    def data() -> Iterator[AnyArray]:
        for info, kind in zip(infos, kinds, strict=True):
            yield file.tensor_bytes(info) if kind == info.type else _folded(file, info)

    write_gguf(target, fields_of(file), planned, data())


def _folded(file: GGUFFile, info: TensorInfo) -> AnyArray:
    columns, rows = info.shape[0], prod(info.shape[1:])
    raw = file.tensor_bytes(info).reshape(rows, -1)
    made = np.empty((rows, nbytes(_KIND, columns)), np.uint8)
    for first in range(0, rows, _ROWS):
        chosen = slice(first, first + _ROWS)
        made[chosen] = quantize(dequantize(raw[chosen], info.type) * np.float32(info.factor), _KIND)
    return made

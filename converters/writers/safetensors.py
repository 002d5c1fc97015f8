"""Write a safetensors file, tensor after tensor.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge.formats.blocks import nbytes
from edge.types import AnyArray

_ALIGNMENT = 8  # of the first tensor


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: F32, F16 or BF16, `shape` outermost first."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, prod(self.shape))


def write_safetensors(
    path: Path,
    tensors: Sequence[Planned],
    data: Iterable[AnyArray],
    progress: Callable[[float], None] | None = None,
) -> None:
    """data: every tensor in order, made when it is asked for, BF16 as uint16. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        place = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        done, arrays = 0, iter(data)
        for tensor in tensors:
            _write_tensor(out, tensor, next(arrays))  # nothing holds it while the next one is made
            done += tensor.nbytes
            if progress:
                progress(done / at)


def _write_tensor(out: BinaryIO, tensor: Planned, array: AnyArray) -> None:
    if array.nbytes != tensor.nbytes:
        raise ValueError(f"{tensor.name} has {array.nbytes} bytes, not {tensor.nbytes}")
    out.write(np.ascontiguousarray(array).data)

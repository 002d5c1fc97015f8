"""Aligned arrays whose addresses are passed to compiled code."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from edge.backends.tvm.packing.layout import ALIGNMENT
from edge.devices.memory import release_pages
from edge.records import dataclass
from edge.types import AnyArray


@dataclass(frozen=True)
class Array:
    """An array before it is allocated. Zeros at first, so that elements that nothing writes take no memory.

    kv, fixed, scratch, lora: the elements that are written, by the field of `Footprint` that counts them; the runtime's
    bytes, which are measured, cover all others.
    """

    shape: tuple[int, ...]
    dtype: str
    kv: int = 0
    fixed: int = 0  # of KV rows, but independent of the capacity
    scratch: int = 0
    lora: int = 0
    spare: int = 0  # elements behind the array that kernels may read

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    def bytes(self, part: str) -> int:
        """Written bytes of kv, fixed, scratch or lora."""
        count: int = getattr(self, part)
        return count * np.dtype(self.dtype).itemsize

    def zeros(self) -> AnyArray:
        """Allocate it, [size]."""
        return aligned_zeros(self.size + self.spare, self.dtype)[: self.size]


def aligned_zeros(count: int, dtype: str) -> AnyArray:
    """Zeros [count] at an address that is a multiple of 64. Pages are allocated on first write."""
    size = count * np.dtype(dtype).itemsize
    block = np.zeros(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].view(dtype)


def release(array: AnyArray) -> None:
    """Return the array's whole pages to the system, if it supports that. Their content is lost."""
    release_pages(array.ctypes.data, array.nbytes)


def pointer(array: AnyArray) -> Any:
    """The array as an argument of compiled code. The caller keeps the array alive."""
    return ctypes.c_void_p(array.ctypes.data)

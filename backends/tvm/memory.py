"""Arrays at addresses that compiled code may rely on."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edge.backends.tvm.packing.layout import ALIGNMENT
from edge.devices.memory import release_pages
from edge.types import AnyArray


def aligned_zeros(count: int, dtype: str) -> AnyArray:
    """[count] zeros whose address is a multiple of 64. The system hands out the pages as they are first written."""
    size = count * np.dtype(dtype).itemsize
    block = np.zeros(size + ALIGNMENT, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + size].view(dtype)


def release(array: AnyArray) -> None:
    """Give the array's whole pages back to the system, where it can; what is in them is lost."""
    release_pages(array.ctypes.data, array.nbytes)


def pointer(array: AnyArray) -> Any:
    """How the array is passed to compiled code. The caller keeps the array alive."""
    return ctypes.c_void_p(array.ctypes.data)

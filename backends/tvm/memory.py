"""Aligned arrays whose addresses are passed to compiled code."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edge.backends.tvm.packing.layout import ALIGNMENT
from edge.devices.memory import release_pages
from edge.types import AnyArray


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

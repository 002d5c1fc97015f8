"""`struct ggml_tensor`, the argument of evaluation callbacks, as this version of llama.cpp declares it."""

from __future__ import annotations

import ctypes
from typing import Any

from edge.errors import UnsupportedError


class Tensor(ctypes.Structure):
    """The fields up to the name."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),  # elements, the innermost dimension first
        ("nb", ctypes.c_size_t * 4),  # strides in bytes
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


NAME = Tensor.name.offset


class Reader:
    """llama.cpp's functions on tensor addresses."""

    def __init__(self, low_level: Any) -> None:
        self._name_of = _function(low_level, "ggml_get_name", ctypes.c_void_p)
        self._operation = _function(low_level, "ggml_op_desc", ctypes.c_char_p)
        self._checked = False

    def check(self, tensor: int) -> None:
        """Raise UnsupportedError if the struct differs from `Tensor`; checks once."""
        if not self._checked and self._name_of(tensor) != tensor + NAME:
            raise UnsupportedError("this llama.cpp lays out tensors in another way: use --kv-policy=streaming")
        self._checked = True

    def operation(self, tensor: int) -> bytes:
        """The operation, such as MUL_MAT."""
        return bytes(self._operation(tensor))


def _function(low_level: Any, name: str, result: type[Any]) -> Any:
    function = getattr(low_level._lib, name)
    function.argtypes, function.restype = [ctypes.c_void_p], result
    return function

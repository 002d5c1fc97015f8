"""Compiled passes as images: bytes that are copied into memory and run. `linker.py` makes them.

An image is the same on all systems but for the functions that it calls and, on Windows, how it calls.

`Image` loads an image and fills the slots, with Python and the system's libraries alone. An image is code that runs as
this user, so it is loaded only from a file that no other user can have written. Its header is checked: no offset may
lie outside the image.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge.devices.executable import Executable, system_function
from edge.devices.private import open_private
from edge.errors import EngineError

MAGIC, PAGE = b"EDGEIMG1", 4096  # the first bytes of an image, and the alignment of its code
MOST_BYTES = 64 << 20  # a pass has a few hundred KiB
_LENGTH, _SLOT = struct.Struct("<Q"), 8
_INTEGER, _POINTER = 1, 4  # type_index of TVM's calling convention


class _Any(ctypes.Structure):
    """An argument in TVM's calling convention, which passes arrays of them."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint64))


_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Any), ctypes.c_int32, ctypes.POINTER(_Any))
_Complaint = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int32)


class Call:
    """A compiled function with its arguments, ready to be called any number of times, from one thread at a time."""

    def __init__(self, image: Image, name: str, arguments: Sequence[int | ctypes.c_void_p]) -> None:
        self._image, self._name = image, name  # keeps the image in memory
        self._function = _Function(image.entry(name))
        self._arguments = (_Any * len(arguments))(*(_pack(each) for each in arguments))
        self._result = _Any()

    def __call__(self) -> None:
        """Raises EngineError if the function refuses its arguments."""
        if self._function(None, self._arguments, len(self._arguments), ctypes.byref(self._result)):
            raise EngineError(f"the compiled function {self._name} failed: {self._image.complaint}")


class Image:
    """An image in memory, whose slots have the addresses of outside functions."""

    def __init__(self, path: Path) -> None:
        """Raises EngineError for a file that is not an image, or if the system forbids executable memory."""
        try:
            with open_private(path) as file:
                size = os.fstat(file.fileno()).st_size  # read() allocates as much memory as it is asked to read
                self._entries, imports, body = parse(file.read(min(size, MOST_BYTES) + 1))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise EngineError(
                f"{path} is no compiled pass ({why}): edge cache clear --kind kernels removes it"
            ) from None
        self.complaint = ""
        self._complain = _Complaint(self._note)
        filled = bytearray(body)
        for name, slot in imports.items():
            struct.pack_into("<Q", filled, slot, self._outside(name))
        self._code = Executable(bytes(filled))

    def entry(self, name: str) -> int:
        """Raises EngineError if there is no such function."""
        if name not in self._entries:
            raise EngineError(f"the compiled pass has no function {name}: edge cache clear --kind kernels removes it")
        return self._code.address + self._entries[name]

    def _outside(self, name: str) -> int:
        if name == "TVMFFIErrorSetRaisedFromCStrParts":
            return int(ctypes.cast(self._complain, ctypes.c_void_p).value or 0)
        function = system_function(name)
        if function is None:
            raise EngineError(f"the compiled pass calls {name[:40]!r}, which this system does not have")
        return function

    def _note(self, kind: bytes, parts: Any, count: int) -> None:
        self.complaint = f"{kind.decode()}: {b''.join(parts[:count]).decode(errors='replace')}"


def parse(data: bytes) -> tuple[dict[str, int], dict[str, int], bytes]:
    """Offsets of functions, offsets of slots for outside functions, and the bytes that both count in.

    Raises ValueError unless `linker.join` could have written the header and every offset lies within the bytes.
    """
    start = len(MAGIC) + _LENGTH.size
    if len(data) > MOST_BYTES or len(data) < start or not data.startswith(MAGIC):
        raise ValueError("it does not begin as one, or is too long")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    body = data[-(-(start + length) // PAGE) * PAGE :]
    try:
        header = json.loads(data[start : start + length])
        entries, imports = header["entries"], header["imports"]
        places = [(at, 1) for at in entries.values()] + [(at, _SLOT) for at in imports.values()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError("its header is damaged") from None
    if not all(type(at) is int and 0 <= at <= len(body) - size for at, size in places):
        raise ValueError("a place in its header lies outside of it")
    return entries, imports, body


def _pack(argument: int | ctypes.c_void_p) -> _Any:
    if isinstance(argument, int):
        return _Any(_INTEGER, 0, argument)
    return _Any(_POINTER, 0, argument.value or 0)

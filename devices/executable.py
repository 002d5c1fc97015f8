"""Executable memory, and the addresses of the system's functions that code in it calls. One implementation per system.

Memory is written first and executable afterwards, never both at once. Code on Windows follows its calling convention,
and on Apple silicon leaves the register x18 alone: `backends/tvm/targets.py` asks the compiler for that.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable
from functools import partial

from edge.errors import EngineError, UnsupportedError

_READ, _WRITE, _EXECUTE = 1, 2, 4
_MAP_JIT = 0x800  # of macOS
_FAILED = ctypes.c_void_p(-1).value  # of mmap
_COMMIT, _RELEASE, _READ_WRITE, _EXECUTE_READ, _THIS_PROCESS = 0x3000, 0x8000, 0x04, 0x20, -1  # of Windows
_LIBRARIES = ("ntdll", "kernelbase", "ucrtbase")  # Windows' own: memory, waiting and clocks, C's functions


class Executable:
    """A copy of machine code, as long as this object lives. address: of its first byte, at the start of a page."""

    def __init__(self, code: bytes) -> None:
        """Raises UnsupportedError if the system forbids executable memory."""
        self.address, free = _load(code)
        weakref.finalize(self, free).atexit = False  # other threads may still run the code


def system_function(name: str) -> int | None:
    """The address of a function of the system's libraries; None if they have none of this name."""
    if sys.platform == "win32":
        libraries = [ctypes.WinDLL(each) for each in _LIBRARIES]
    else:
        libraries = [ctypes.CDLL(None)]
    found = next((getattr(each, name) for each in libraries if hasattr(each, name)), None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def _refused() -> UnsupportedError:
    return UnsupportedError("this system lets no program make its memory executable: use --backend=llamacpp")


if sys.platform == "win32":

    def _load(code: bytes) -> tuple[int, Callable[[], object]]:
        kernel, size, before = ctypes.WinDLL("kernel32"), ctypes.c_size_t(len(code)), ctypes.c_uint32()
        kernel.VirtualAlloc.restype = ctypes.c_void_p
        address = kernel.VirtualAlloc(None, size, _COMMIT, _READ_WRITE)
        if not address:
            raise EngineError(f"Windows has no {len(code)} bytes of memory for compiled code")
        memory = ctypes.c_void_p(address)
        ctypes.memmove(address, code, len(code))
        free = partial(kernel.VirtualFree, memory, ctypes.c_size_t(0), _RELEASE)
        if not kernel.VirtualProtect(memory, size, _EXECUTE_READ, ctypes.byref(before)):
            free()
            raise _refused()
        kernel.FlushInstructionCache(ctypes.c_void_p(_THIS_PROCESS), memory, size)
        return address, free

else:

    def _load(code: bytes) -> tuple[int, Callable[[], object]]:
        """On macOS, a program with a hardened runtime needs Apple's entitlement for MAP_JIT."""
        system, size, jit = ctypes.CDLL(None), ctypes.c_size_t(len(code)), sys.platform == "darwin"
        system.mmap.restype = ctypes.c_void_p
        system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        access, flags = _READ | _WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if jit:
            access, flags = access | _EXECUTE, flags | _MAP_JIT
        address = system.mmap(None, size, access, flags, -1, 0)
        if address == _FAILED:
            raise _refused()
        memory = ctypes.c_void_p(address)
        free = partial(system.munmap, memory, size)
        if jit:
            system.pthread_jit_write_protect_np(0)  # this thread may write such memory, and not execute it
        ctypes.memmove(address, code, len(code))
        if jit:
            system.pthread_jit_write_protect_np(1)
            system.sys_icache_invalidate(memory, size)
        elif system.mprotect(memory, size, _READ | _EXECUTE):
            free()
            raise _refused()
        return address, free

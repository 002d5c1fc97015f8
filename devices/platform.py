"""Differences between systems. Other modules ask here, rather than for a module that may be missing."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import sys
from typing import Literal, TextIO

_SYNCHRONIZE, _FOREVER = 0x100000, 0xFFFFFFFF  # of Windows
_THIS_THREAD, _POWER_THROTTLING = -2, 3  # of Windows, which refuses the second before version 10
_USER_INITIATED = 0x19  # of macOS's qos_class_t
_XDG = {"cache": ".cache", "config": ".config", "data": ".local/share"}  # of Linux, below the home folder


def system_folder(kind: Literal["cache", "config", "data"]) -> str:
    """The folder for edge's files of this kind, by platformdirs' rules. Linux does without its twenty imports."""
    home = os.environ.get("HOME", "")
    if sys.platform == "linux" and "ANDROID_DATA" not in os.environ and os.path.isabs(home):
        stated = os.environ.get(f"XDG_{kind.upper()}_HOME", "")
        return os.path.join(stated if os.path.isabs(stated) else os.path.join(home, _XDG[kind]), "edge")
    import platformdirs

    found: str = getattr(platformdirs, f"user_{kind}_dir")("edge")
    return found


def map_file(descriptor: int, length: int = 0, *, at_once: bool = True) -> mmap.mmap:
    """Map a file's first `length` bytes (0: all) read-only. at_once: make them resident, if the system can (Linux)."""
    if sys.platform == "win32":
        return mmap.mmap(descriptor, length, access=mmap.ACCESS_READ)
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if at_once else 0)
    return mmap.mmap(descriptor, length, flags, mmap.PROT_READ)


def has_input(file: TextIO, seconds: float) -> bool:
    """Whether a pipe has data, or ends, within `seconds`. Always True on Windows, which can wait for sockets only."""
    return sys.platform == "win32" or bool(select.select([file], [], [], seconds)[0])


def wait_for_end(process: int) -> None:
    """Return when the process with this number ends, or if there is none. Windows only: elsewhere at once."""
    if sys.platform == "win32":
        kernel = ctypes.WinDLL("kernel32")
        kernel.OpenProcess.restype = ctypes.c_void_p
        handle = kernel.OpenProcess(_SYNCHRONIZE, False, process)
        if handle:
            kernel.WaitForSingleObject(ctypes.c_void_p(handle), _FOREVER)


def peak_of_children() -> int:
    """The largest resident set, in bytes, of a child that has ended; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * maxrss_unit()


def maxrss_unit() -> int:
    """The unit in bytes of getrusage's ru_maxrss."""
    return 1 if sys.platform == "darwin" else 1024


def system_number(name: str) -> int:
    """A number of macOS's `sysctl`; 0 if it has none of this name, and on other systems."""
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    value = ctypes.c_int64(0)  # of 4 or 8 bytes, the lower ones first
    size = ctypes.c_size_t(ctypes.sizeof(value))
    if read is None or read(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0):
        return 0
    return value.value


def prefer_fast_cores() -> None:
    """Have macOS run this thread on fast cores, as work that a user waits for, and Windows at full speed also in the
    background (no EcoQoS). Does nothing on other systems."""
    if sys.platform == "win32":
        change = getattr(ctypes.WinDLL("kernel32"), "SetThreadInformation", None)  # Wine may have none
        speed = (ctypes.c_uint32 * 3)(1, 1, 0)  # version, EXECUTION_SPEED, off
        if change is not None:
            change(ctypes.c_void_p(_THIS_THREAD), _POWER_THROTTLING, speed, ctypes.sizeof(speed))
    if sys.platform == "darwin":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(_USER_INITIATED, 0)

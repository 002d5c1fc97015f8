"""Instructions that a process has run in user mode, counted by perf_event_open where the machine has counters."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from contextlib import suppress
from pathlib import Path

_CALLS = {"x86_64": 298, "aarch64": 241}  # numbers of perf_event_open
HARDWARE, INSTRUCTIONS = 0, 1  # PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS
_INHERIT, _USER_ONLY = 1 << 1, 1 << 5 | 1 << 6  # also threads that begin later; without kernel and hypervisor


class Counter:
    """Of all threads of a process, from now on. `read` is None where the machine or the system counts nothing."""

    def __init__(self, process: int, kind: int = HARDWARE, event: int = INSTRUCTIONS) -> None:
        attributes = struct.pack("=IIQQQQQIIQ", kind, 64, event, 0, 0, 0, _INHERIT | _USER_ONLY, 0, 0, 0)
        call, number = ctypes.CDLL(None, use_errno=True).syscall, _CALLS.get(platform.machine(), -1)
        threads: list[int] = []
        with suppress(OSError):
            threads = [int(each.name) for each in Path(f"/proc/{process}/task").iterdir()]
        self._files = [call(number, attributes, thread, -1, -1, 0) for thread in threads]

    def read(self) -> int | None:
        """The count; the counter ends."""
        found = [struct.unpack("=Q", os.read(each, 8))[0] for each in self._files if each >= 0]
        for each in self._files:
            if each >= 0:
                os.close(each)
        return sum(found) if found and len(found) == len(self._files) else None

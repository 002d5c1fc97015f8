"""The memory of a process and its children together, sampled (Linux)."""

from __future__ import annotations

import ctypes
import platform
import threading
from contextlib import suppress
from pathlib import Path

_EVERY_S = 0.004
_KCMP = {"x86_64": 312, "aarch64": 272}  # system calls
_KCMP_VM = 1  # whether two processes have one memory


class Together:
    """Samples the memory of a launcher's child and of its children. peak: bytes."""

    def __init__(self, launcher: int) -> None:
        self.peak = 0
        self._launcher, self._ended = launcher, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Together:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            for process in _children(self._launcher):
                descendants, held = list(_children(process)), _field(process, "status", "VmRSS")
                for each in descendants:
                    descendants += _children(each)
                    held += 0 if _have_one_memory(each, process) else _own(each, process)
                self.peak = max(self.peak, held)


def _own(child: int, process: int) -> int:
    """Bytes that a child adds to a process. Its program may begin meanwhile."""
    if _read(child, "cmdline") != _read(process, "cmdline"):
        return _field(child, "status", "VmHWM")
    rollup = _read(child, "smaps_rollup")
    return sum(_field_of(rollup, part) for part in ("Private_Clean", "Private_Dirty"))


def _have_one_memory(child: int, process: int) -> bool:
    """Of a child between vfork and exec, which a busy machine may leave there for long. Compilers are started so."""
    return ctypes.CDLL(None).syscall(_KCMP.get(platform.machine(), -1), child, process, _KCMP_VM, 0, 0) == 0


def _children(process: int) -> list[int]:
    """Those that run. Where the kernel does not list them, every process is asked for its parent, which comes second
    behind the name, which may hold anything, in parentheses."""
    lists = list[Path]()
    with suppress(OSError):  # it may end meanwhile
        lists = list(Path(f"/proc/{process}/task").glob("*/children"))
    if lists:
        return [int(each) for one in lists for each in _read_path(one).split()]
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    return [each for each in numbers if _read(each, "stat").rpartition(")")[2].split()[1:2] == [str(process)]]


def _read(process: int, name: str) -> str:
    return _read_path(Path(f"/proc/{process}/{name}"))


def _read_path(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _field(process: int, name: str, field: str) -> int:
    """Bytes; 0 of a process that has ended."""
    return _field_of(_read(process, name), field)


def _field_of(text: str, field: str) -> int:
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0

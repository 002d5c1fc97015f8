"""Memory use and limits of this process, in bytes, read from the operating system.

Every reader takes the root of the file system, so that it can be tested on a fake tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

from edge.devices.kernel import read_text, read_whole, whole
from edge.devices.platform import maxrss_unit
from edge.errors import EngineError
from edge.records import dataclass

_LONGEST_PATH = 4096  # PATH_MAX
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")  # of cgroups, versions 2 and 1


@dataclass(frozen=True)
class MemoryUse:
    """This process's memory now: resident set, its peak so far (VmHWM), its anonymous and file-backed parts, and
    swapped bytes."""

    rss: int
    peak: int
    anonymous: int | None  # None where the system does not say
    file: int | None
    swap: int | None = None


@dataclass(frozen=True)
class MemoryLimit:
    """The limit of this process's resident set, and its origin."""

    bytes: int
    source: str


def memory_use(root: Path = Path("/")) -> MemoryUse:
    """Resident memory of this process, measured. Raises EngineError if the system does not show it."""
    fields = _kib_fields(read_text(root / "proc/self/status"))
    if not fields.keys() >= {"VmRSS", "VmHWM"}:
        return _memory_use_elsewhere()
    return MemoryUse(fields["VmRSS"], fields["VmHWM"], *map(fields.get, ("RssAnon", "RssFile", "VmSwap")))


def _memory_use_elsewhere() -> MemoryUse:
    import psutil

    try:
        rss = int(psutil.Process().memory_info().rss)
    except psutil.Error:
        raise EngineError("the system shows no /proc, by which edge measures memory: mount it first") from None
    if sys.platform == "win32":
        return MemoryUse(rss, int(psutil.Process().memory_info().peak_wset), None, None)
    import resource

    return MemoryUse(rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * maxrss_unit(), None, None)


def memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The memory that the system grants: the least of free memory (plus our own) and the limits of our cgroups."""
    rss = memory_use(root).rss
    limits = [MemoryLimit(_available(root) + rss, "free memory")]
    for path in (folder / name for folder in cgroup_folders(root) for name in _LIMIT_FILES):
        limit = read_whole(path)
        if limit is not None and limit >= 0:  # there may be no such controller, or "max"
            limits.append(MemoryLimit(limit, "cgroup"))
    return min(limits, key=lambda limit: limit.bytes)


def release_free_memory() -> None:
    """Return malloc's unused memory to the system, if the C library can (glibc)."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_pages(address: int, nbytes: int) -> int:
    """Return whole pages of private memory to the system, if it can (Linux); they are zero afterwards. Returns the
    released bytes."""
    if sys.platform != "linux":
        return 0
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size <= 0:
        return 0
    failed = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    return 0 if failed else size


def release_code() -> None:
    """Evict the resident pages of programs and libraries (Linux); the system reads them again from their files on
    demand."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps.readlines():
            span, access, _, _, inode, *_ = line.split()
            if access == "r-xp" and inode != "0":  # never written to, and no pages of the kernel's
                first, end = (int(each, 16) for each in span.split("-"))
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def total_memory() -> int:
    """Installed memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the system could hand out without swapping (MemAvailable); None if it does not say."""
    return _kib_fields(read_text(root / "proc/meminfo")).get("MemAvailable")


def _available(root: Path) -> int:
    free = free_memory(root)
    if free is None:
        import psutil

        return int(psutil.virtual_memory().available)
    return free


def cgroup_folders(root: Path = Path("/"), controller: str = "memory") -> list[Path]:
    """The folders of all cgroups that may limit this process; a parent's limit applies to its children.

    controller: of version 1, where each may have a tree of its own.
    """
    folders: list[Path] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not path.startswith("/") or len(path) > _LONGEST_PATH:
            continue
        if controllers == "":
            base = root / "sys/fs/cgroup"
            base = base / "unified" if (base / "unified").is_dir() else base  # where version 1 is mounted, too
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = base / path.lstrip("/")
        folders += [folder for folder in (group, *group.parents) if folder == base or base in folder.parents]
    return list(dict.fromkeys(folders))


def _kib_fields(text: str) -> dict[str, int]:
    """Parse `Name:  123 kB` lines into bytes."""
    fields = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and (kib := whole(words[0])) is not None and kib >= 0:
            fields[name] = kib * 1024
    return fields

"""Readers of the device, on fake /proc and /sys trees and on the real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from edge.devices import load
from edge.devices.graphics import resident_memory
from edge.devices.host import granted_share, logical_cores, probe_host, usable_cores
from edge.devices.memory import MemoryLimit, MemoryUse, memory_limit, memory_use, release_free_memory, total_memory
from edge.errors import EngineError

STATUS = """Name:\tpython
VmPeak:\t  900000 kB
VmHWM:\t  300000 kB
VmRSS:\t  200000 kB
RssAnon:\t  150000 kB
RssFile:\t   50000 kB
VmSwap:\t   7000 kB
Threads:\t2
Cpus_allowed_list:\t0-1
"""
MEMINFO = (
    "MemTotal:        2000000 kB\nMemFree:          100000 kB\nMemAvailable:    1000000 kB\nHugePages_Total:       0\n"
)
KIB = 1024
FREE = MemoryLimit((1_000_000 + 200_000) * KIB, "free memory")  # what is available, and what we hold

CPUINFO_X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx avx2 avx512f avx512_vnni amx_int8
power management:

processor\t: 1
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx avx2 avx512f avx512_vnni amx_int8
"""
CPUINFO_ARM = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd crc32 asimddp i8mm\nCPU implementer\t: 0x41\n"


def tree(root: Path, **files: str) -> Path:
    """A file system with these files; double underscores are slashes."""
    for name, content in {"proc__self__status": STATUS, "proc__meminfo": MEMINFO, **files}.items():
        write(root, name.replace("__", "/"), content)
    return root


def write(root: Path, path: str, content: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def test_memory_use(tmp_path: Path) -> None:
    use = memory_use(tree(tmp_path))
    assert use == MemoryUse(
        rss=200_000 * KIB, peak=300_000 * KIB, anonymous=150_000 * KIB, file=50_000 * KIB, swap=7_000 * KIB
    )


@pytest.mark.parametrize("status", ["", "VmRSS:\t20 kB\n", "VmHWM 30\n"])
def test_memory_use_without_proc_status(tmp_path: Path, status: str) -> None:
    use = memory_use(tree(tmp_path, proc__self__status=status))
    assert 1 << 20 < use.rss < 1 << 40
    assert use.peak >= use.rss // 2
    assert (use.anonymous, use.file) == (None, None)


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("", {}, None),
        ("3:cpu,cpuacct:/x\n", {}, None),
        ("0::/\n", {"memory.max": "500000000"}, 500_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "500000000\n"}, 500_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "400000000\n"}, 400_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "300000000", "a/memory.max": "400000000"}, 300_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "500000000", "a/memory.max": "400000000"}, 400_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "nonsense", "memory.max": "200000000"}, 200_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "max"}, None),
        ("0::/a/b\n", {"a/b/memory.max": "9223372036854771712"}, None),
        ("0::/a b/c:d\n", {"a b/c:d/memory.max": "300000000"}, 300_000_000),
        ("0::/a\n", {"memory/a/memory.limit_in_bytes": "1"}, None),  # of another hierarchy
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": "300000000"}, 300_000_000),
        ("5:cpu,memory:/a/b\n", {"memory/a/memory.limit_in_bytes": "300000000"}, 300_000_000),
        ("5:memory:/a\n", {"memory/memory.limit_in_bytes": "300000000"}, 300_000_000),
        ("5:memory:/docker/1\n4:cpu:/x\n0::/y\n", {"memory/docker/1/memory.limit_in_bytes": "77"}, 77),
        ("5:memory:/a\n0::/b\n", {"memory/a/memory.limit_in_bytes": "99", "b/memory.max": "88"}, 88),
    ],
)  # fmt: skip
def test_limits_of_cgroups(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None) -> None:
    tree(tmp_path, proc__self__cgroup=cgroup)
    for name, content in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", content)
    assert memory_limit(tmp_path) == (FREE if limit is None else MemoryLimit(limit, "cgroup"))


def test_free_memory_is_a_limit(tmp_path: Path) -> None:
    guessed = memory_limit(tree(tmp_path, proc__meminfo="MemTotal: 1 kB\n"))  # without MemAvailable
    assert (guessed.source, 1 << 20 < guessed.bytes < 1 << 50) == ("free memory", True)
    tree(tmp_path, proc__self__cgroup="0::/\n", proc__meminfo="MemAvailable:    10 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "500000000")
    assert memory_limit(tmp_path) == MemoryLimit(200_010 * KIB, "free memory")


def test_host_on_x86(tmp_path: Path) -> None:
    tree(tmp_path, proc__cpuinfo=CPUINFO_X86)
    caches = (
        ("index0", "1", "Data", "48K"), ("index1", "1", "Instruction", "32K"), ("index2", "2", "Unified", "2048K"),
        ("index3", "3", "Unified", "266240K"), ("index4", "4", "Unified", "some"),
    )  # fmt: skip
    for index, level, kind, size in caches:
        for name, content in (("level", level), ("type", kind), ("size", size)):
            write(tmp_path, f"sys/devices/system/cpu/cpu0/cache/{index}/{name}", content + "\n")
    write(tmp_path, "sys/devices/system/cpu/cpu0/cache/index5/level", "5\n")  # and nothing else
    host = probe_host(tmp_path)
    assert host.processor == "Intel(R) Xeon(R) Processor"
    assert host.instruction_sets == ("avx2", "avx512f", "avx512_vnni", "amx_int8")
    assert host.caches == {"L1d": 48 * KIB, "L1i": 32 * KIB, "L2": 2048 * KIB, "L3": 266240 * KIB}
    assert host.limit == FREE


def test_host_on_arm(tmp_path: Path) -> None:
    host = probe_host(tree(tmp_path, proc__cpuinfo=CPUINFO_ARM))
    assert host.instruction_sets == ("asimd", "asimddp", "i8mm")
    assert host.processor  # the platform's own name for it
    assert host.caches == {}


def test_memory_use_of_this_process() -> None:
    use = memory_use()
    assert 1 << 20 < use.rss <= use.peak < total_memory()
    assert use.rss == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    if sys.platform == "linux":
        assert use.anonymous + use.file <= use.rss


def test_peak_counts_touched_pages() -> None:
    before = memory_use().peak
    block = bytearray(64 << 20)
    block[:: 4 << 10] = b"x" * len(block[:: 4 << 10])
    after = memory_use()
    assert after.peak >= before
    assert after.rss > 64 << 20
    del block
    release_free_memory()
    assert memory_use().peak >= after.rss - (1 << 20)
    assert memory_use().rss < after.rss - (32 << 20)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_cores_that_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cores_that_cgroups_grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of both versions, and groups in others: CGROUPS of tests/apps/test_platform.py."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert logical_cores(tmp_path) == 8
    write(tmp_path, "proc/self/cgroup", "0::/")
    for quota, cores in (("max 100000", 8), ("150000 100000", 2), ("3200000 100000", 8), ("nonsense", 8)):
        write(tmp_path, "sys/fs/cgroup/cpu.max", quota)
        assert logical_cores(tmp_path) == cores
        assert usable_cores(tmp_path) <= cores
        assert probe_host(tmp_path).usable_cores == usable_cores(tmp_path)


def test_half_a_core_granted_is_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    share = granted_share(tmp_path)
    assert share == 0.75
    monkeypatch.setattr(load, "granted_share", lambda: share)
    monkeypatch.setattr(load, "logical_cores", lambda: 2)
    for granted, expected in ((0.75, 0), (0.375, 2)):
        monkeypatch.setattr(load, "_granted", lambda _, granted=granted: granted)
        assert load.neighbours() == pytest.approx(expected)


FDINFO = """pos:\t0
flags:\t02100002
drm-driver:\tamdgpu
drm-client-id:\t{client}
drm-pdev:\t0000:03:00.0
drm-memory-vram:\t1 KiB
drm-resident-vram:\t{kib} KiB
drm-resident-gtt:\t2 MiB
drm-resident-cpu:\t512
"""


def test_buffers_of_gpus_count_once_for_each_client(tmp_path: Path) -> None:
    assert resident_memory(tmp_path) is None
    write(tmp_path, "proc/self/fdinfo/0", "pos:\t0\nflags:\t02\n")
    assert resident_memory(tmp_path) is None
    for descriptor, client, kib in ((5, 7, 300), (6, 7, 300), (7, 8, 40)):
        write(tmp_path, f"proc/self/fdinfo/{descriptor}", FDINFO.format(client=client, kib=kib))
    assert resident_memory(tmp_path) == 340 * KIB + 2 * (2 * KIB * KIB + 512)
    write(tmp_path, "proc/self/fdinfo/9", "drm-driver:\tpanfrost\ndrm-client-id:\t1\ndrm-memory-memory:\t8 KiB\n")
    assert resident_memory(tmp_path) == 348 * KIB + 2 * (2 * KIB * KIB + 512)


def test_without_proc_memory_use_is_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil, "Process", gone)
    with pytest.raises(EngineError, match="the system shows no /proc"):
        memory_use(tmp_path)

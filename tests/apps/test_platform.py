"""What the C runtime takes from the system: memory, files, clocks, threads that wait for each other, CPUs."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import exhaustive
from ctypes_bundle import _Error as Error
from ctypes_bundle import _Source as Source
from runtime_library import PLATFORM, build, load_runtime, said_by

from edge.backends.tvm.targets import TARGETS, _cpu_flags
from edge.devices.host import _granted_cores
from edge.devices.profiles import find_profile, profile_names
from edge.options import Options
from edge.plan.device import limits_of

PARTS = (*PLATFORM, "cpu.c", "error.c")
ON_ADDRESS = "-DEDGE_WAIT_ON_ADDRESS"  # as on Apple's systems
ADDRESSES = """
#include <linux/futex.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
long syscall(long, ...);
int os_sync_wait_on_address(void *, uint64_t, size_t, uint32_t);
int os_sync_wake_by_address_all(void *, size_t, uint32_t);
int os_sync_wait_on_address(void *address, uint64_t value, size_t size, uint32_t flags)
{
    return size == 4 && !flags ? (int)syscall(202, address, FUTEX_WAIT_PRIVATE, (int32_t)value, NULL) : -1;
}
int os_sync_wake_by_address_all(void *address, size_t size, uint32_t flags)
{
    return size == 4 && !flags ? (int)syscall(202, address, FUTEX_WAKE_PRIVATE, INT_MAX) : -1;
}
"""


class Mapping(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("size", ctypes.c_uint64), ("base", ctypes.c_void_p), ("mapped", ctypes.c_size_t),
        ("fd", ctypes.c_int32), ("end", ctypes.c_uint64),
    )  # fmt: skip


@pytest.fixture(scope="module")
def system() -> Any:
    library = load_runtime(*PARTS)
    for name in ("now_seconds", "cpu_seconds"):
        getattr(library, name).restype = ctypes.c_double
    for name in ("read_fd", "write_fd"):
        getattr(library, name).restype = ctypes.c_int64
    library.random_seed.restype = ctypes.c_uint64
    library.runs_isa.restype = ctypes.c_bool
    return library


def map_file(system: Any, source: Source) -> bytes | str:
    """The mapped bytes, or the message of the error."""
    found, error = Mapping(), Error()
    if system.map_file(ctypes.byref(source), ctypes.byref(found), ctypes.byref(error)):
        assert error.code == -2
        assert not found.base
        return bytes(error.message).decode()
    data = ctypes.string_at(found.data, found.size)
    system.unmap_file(ctypes.byref(found))
    return data


def test_files_are_mapped_whole_or_in_part(system: Any, tmp_path: Path) -> None:
    content, path = os.urandom(3 * mmap.PAGESIZE + 100), tmp_path / "model.edge"
    path.write_bytes(content)
    assert map_file(system, Source(path=bytes(path))) == content
    with open(path, "rb") as file:
        file.seek(7)
        assert map_file(system, Source(fd=file.fileno())) == content
        assert map_file(system, Source(fd=file.fileno(), offset=5000, length=4000)) == content[5000:9000]
        assert map_file(system, Source(fd=file.fileno(), offset=8192)) == content[8192:]
        assert file.tell() == 7


def test_files_that_cannot_be_mapped_are_refused(system: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.edge"
    assert map_file(system, Source(path=bytes(path))) == f"cannot open {path}: check that it is there and may be read"
    path.write_bytes(b"")
    assert map_file(system, Source(path=bytes(path))) == "model.edge is empty: copy it again"
    path.write_bytes(b"x" * 100)
    for offset, length in ((101, 0), (0, 101), (50, 51), (2**64 - 1, 2), (1, 2**64 - 1)):
        said = map_file(system, Source(path=bytes(path), offset=offset, length=length))
        assert said == "offset and length of model.edge reach beyond its file, which has 100 bytes"
    assert "must be a file on a disk" in map_file(system, Source(path=bytes(tmp_path)))
    os.mkfifo(tmp_path / "pipe")
    assert "must be a file on a disk" in map_file(system, Source(path=bytes(tmp_path / "pipe")))
    ends = os.pipe()
    assert "must be a file on a disk" in map_file(system, Source(fd=ends[0]))
    assert "must be a file on a disk" in map_file(system, Source(fd=9999))
    for end in ends:
        os.close(end)


def test_files_are_read_and_written_whole(system: Any) -> None:
    """A pipe takes and gives parts of what is written and read."""
    content = np.frombuffer(os.urandom(1 << 20), np.uint8)
    found = np.zeros(content.size + 1, np.uint8)
    out, into = os.pipe()

    def write() -> None:
        assert system.write_fd(into, content.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(content.size)) == 1 << 20
        os.close(into)

    writer = threading.Thread(target=write)
    writer.start()
    assert system.read_fd(out, ctypes.c_void_p(found.ctypes.data), ctypes.c_uint64(found.size)) == content.size
    writer.join()
    os.close(out)
    np.testing.assert_array_equal(found[:-1], content)
    assert system.read_fd(out, ctypes.c_void_p(found.ctypes.data), ctypes.c_uint64(1)) == -1
    assert system.write_fd(into, ctypes.c_void_p(found.ctypes.data), ctypes.c_uint64(1)) == -1


def test_instruction_sets_are_those_of_the_python_engine(system: Any) -> None:
    machine = platform.machine()
    for target in TARGETS:
        expected = target.machine == machine and target.name != "generic" and target.flags <= _cpu_flags()
        assert system.runs_isa(target.name.encode()) == expected, target.name
    assert not system.runs_isa(b"sve")


CORES = """
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include "system.h"
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *cpus);
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *cpus)
{
    *(uint64_t *)cpus = (1ull << atoi(getenv("COUNT"))) - 1;
    return (int)size + pid;
}
int main(void) { return printf("%d\\n", (int)fastest_cores()) < 0; }
"""


@pytest.fixture(scope="module")
def arm_cores(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """The answer of the C runtime on ARM, where CPUs have files of clocks, of capacities and of siblings."""
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no qemu-aarch64-static")
    folder = tmp_path_factory.mktemp("cores")
    (folder / "cores.c").write_text(CORES)
    cpus = folder / "sys/devices/system/cpu"
    flags = ["-static", '-DROOT="."', "-Wl,--wrap=sched_getaffinity"]
    program = build([*PARTS, folder / "cores.c"], flags, compiler="aarch64-linux-gnu-gcc")

    def count(clocks: Sequence[int | None], capacities: Sequence[int | None] = (), siblings: str = "") -> int:
        for cpu, clock in enumerate(clocks):
            shutil.rmtree(cpus / f"cpu{cpu}", ignore_errors=True)
            capacity = capacities[cpu] if capacities else None
            files = (("cpufreq/cpuinfo_max_freq", clock), ("topology/thread_siblings_list", siblings))
            for name, text in (*files, ("cpu_capacity", capacity)):
                if text:
                    path = cpus / f"cpu{cpu}" / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(f"{text}\n")
        return int(said_by("qemu-aarch64-static", "-E", f"COUNT={len(clocks)}", program, cwd=folder))

    return count


def test_fast_arm_cores_finish_equal_shares_first(arm_cores: Callable[..., int]) -> None:
    assert arm_cores([1_800_000, 1_800_000]) == 2
    assert arm_cores([1_800_000, 3_100_000]) == arm_cores([3_100_000, 1_800_000]) == 1
    assert arm_cores([None, None]) == 2  # a virtual machine
    assert arm_cores([None, 1_800_000]) == 1
    assert arm_cores([None, None], siblings="0-1") == 1
    assert arm_cores([1_800_000, 3_100_000], [900, 1024]) == 2  # the kernel knows better than the clocks
    assert arm_cores([1_800_000, 3_100_000], [1024, 1024]) == 1  # a kernel that was not told


CGROUPS = [  # of this process, files below /sys/fs/cgroup, cores
    ("", {}, 4),
    ("0::/\n", {"cpu.max": "150000 100000"}, 2),
    ("0::/\n", {"cpu.max": "max 100000"}, 4),
    ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "50000 100000", "a/b/cpu.max": "300000 100000"}, 1),
    ("0::/a\n", {"a/cpu.max": "300000 100000", "b/cpu.max": "100000 100000"}, 3),
    ("1:cpu,cpuacct:/a\n0::/\n", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
    ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ("2:cpuacct:/\n1:cpu:/\n0::/\n", {"unified/cpu.max": "200000 100000", "cpuacct/cpu.cfs_quota_us": "1"}, 2),
]


def test_quota_of_cgroups_limits_threads(tmp_path: Path) -> None:
    """The same as in Python."""
    (tmp_path / "cores.c").write_text(CORES)
    program = build([*PARTS, tmp_path / "cores.c"], ['-DROOT="."', "-Wl,--wrap=sched_getaffinity"])
    for number, (groups, files, cores) in enumerate(CGROUPS):
        root = tmp_path / str(number)
        for name, text in {
            "proc/self/cgroup": groups,
            **{f"sys/fs/cgroup/{name}": files[name] for name in files},
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        assert int(said_by(program, cwd=root, env={"COUNT": "4"})) == cores, (groups, files)
        assert min(4, *map(math.ceil, _granted_cores(root)), 4) == cores, (groups, files)


@pytest.mark.parametrize("name", profile_names()[1:])
def test_plans_have_the_threads_of_runs(name: str, arm_cores: Callable[..., int]) -> None:
    """Each device's cores as files, counted by the C runtime that apps and kits have."""
    profile = find_profile(name)
    _, threads = limits_of(profile, Options(memory=1 << 30))
    if profile.system in ("ios", "macos"):  # sysctl names the fast cores
        assert threads == profile.clusters[0].cores
    elif profile.arch == "aarch64" and profile.clusters:
        clocks = [each.ghz and round(each.ghz * 1e6) for each in profile.clusters for _ in range(each.cores)]
        for order in (clocks, clocks[::-1]):
            assert arm_cores(order) == threads
    else:
        assert threads == (profile.cores or 4)


@pytest.mark.parametrize("check", [(), exhaustive(("-fsanitize=thread",))])
@pytest.mark.parametrize("waiting", ["futex", "address", "condition"])
def test_threads_wait_for_each_other(tmp_path: Path, waiting: str, check: Sequence[str]) -> None:
    """The thread sanitizer watches the first of them in test_runtime_pass.py."""
    more: list[str | Path] = []
    flags = [] if waiting == "futex" else [ON_ADDRESS]
    more += [] if waiting == "futex" else ["apple.c"]
    if waiting == "address":
        more.append(tmp_path / "addresses.c")
        (tmp_path / "addresses.c").write_text(ADDRESSES)
        flags.append("-rdynamic")
    program = build([*PARTS, "barrier.c", *more], [*flags, *check])
    threads, rounds = 4, 500
    assert int(said_by(program, threads, rounds)) == rounds * threads * (threads + 1) // 2


@pytest.mark.wing("C on ARM, under QEMU")
def test_threads_wait_for_each_other_on_arm() -> None:
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no qemu-aarch64-static")
    program = build([*PARTS, "barrier.c"], ["-static"], compiler="aarch64-linux-gnu-gcc")
    assert said_by("qemu-aarch64-static", program, "3", "100") == "600\n"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends threads without their process")
def test_only_a_thread_that_is_not_there_has_ended(system: Any) -> None:
    """tgkill refuses the id -1 for another reason (EINVAL), as a sandbox may refuse any (EPERM)."""
    here: list[int] = []
    gone = threading.Thread(target=lambda: here.append(threading.get_native_id()))
    gone.start()
    gone.join()
    while Path(f"/proc/self/task/{here[0]}").exists():  # Python joins a thread shortly before it ends
        pass
    lines = {id_: (ctypes.c_int32 * 16)(0, 0, id_) for id_ in (-1, threading.get_native_id(), *here)}
    system.owner_ended.restype = ctypes.c_bool
    waiting = [threading.Thread(target=system.edge_doze, args=(line, 0)) for line in lines.values()]
    for each in waiting:
        each.start()
    for each in waiting:
        each.join()
    assert [system.owner_ended(line) for line in lines.values()] == [False, False, True]
    assert [line[0] for line in lines.values()] == [0, 0, 1 << 30]

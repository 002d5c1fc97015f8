"""This device as the system describes it: processor, cores, instruction sets, caches, memory. Read, never guessed."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from edge.devices.cores import own_fast_cores
from edge.devices.kernel import read_text, read_whole, whole
from edge.devices.memory import MemoryLimit, cgroup_folders, memory_limit, total_memory
from edge.devices.platform import system_number
from edge.records import dataclass

# Instruction sets that decide how fast quantized kernels run; `flags` on x86, `Features` on ARM.
_NOTABLE = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip
# macOS's names of instruction sets, below hw.optional.
_APPLE = {"asimd": "neon", "asimddp": "arm.FEAT_DotProd", "i8mm": "arm.FEAT_I8MM", "bf16": "arm.FEAT_BF16"}


@dataclass(frozen=True)
class Host:
    """This device. Sizes are bytes; `None` or empty where the system does not say."""

    system: str
    machine: str
    processor: str
    physical_cores: int
    logical_cores: int
    usable_cores: int
    instruction_sets: tuple[str, ...]
    caches: dict[str, int]
    memory: int
    limit: MemoryLimit


def probe_host(root: Path = Path("/")) -> Host:
    """Read the device that this process runs on."""
    import psutil  # here: it takes 8 ms, which a run does not need

    logical = psutil.cpu_count() or 1
    return Host(
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        processor=model_name(read_text(root / "proc/cpuinfo")) or platform.processor() or platform.machine(),
        physical_cores=psutil.cpu_count(logical=False) or logical,
        logical_cores=logical,
        usable_cores=usable_cores(root),
        instruction_sets=notable(cpu_flags(root)),
        caches=_caches(root),
        memory=total_memory(),
        limit=memory_limit(root),
    )


@dataclass(frozen=True)
class Processor:
    """A processor's display name, and a family that tells generations apart. Faster to read than the whole Host."""

    name: str
    family: str


def processor(root: Path = Path("/")) -> Processor:
    """The first core's processor. Names alone may say little (`AMD EPYC`), so the model's number is appended."""
    text, machine = read_text(root / "proc/cpuinfo"), platform.machine()
    # On Linux, platform.processor() starts a process.
    return processor_of(text, machine, "" if model_name(text) else platform.processor() or machine)


def processor_of(cpuinfo: str, machine: str, otherwise: str) -> Processor:
    """The processor that a /proc/cpuinfo describes. otherwise: its name, where that has none."""
    fields = _fields(cpuinfo)
    name = fields.get("model name") or otherwise
    vendor = fields.get("vendor_id") or fields.get("CPU implementer") or machine
    family = f"{vendor} {fields.get('cpu family', '')}".strip()
    model = fields.get("model") or fields.get("CPU part")
    return Processor(f"{name} ({family}, model {model})" if model else name, family)


def usable_cores(root: Path = Path("/")) -> int:
    """The number of physical cores that this process may run on and that are worth using: the default number of
    threads. root: of the cgroups."""
    allowed = logical_cores(root)
    fast = own_fast_cores() if sys.platform == "linux" and platform.machine() == "aarch64" else 0
    return max(1, min(allowed, fast or _physical_cores() or allowed))


def logical_cores(root: Path = Path("/")) -> int:
    """The number of logical cores that this process may run on, and whose time its cgroups grant; more threads than
    these only wait for each other. root: of the cgroups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([allowed, *map(math.ceil, _granted_cores(root))])


def granted_share(root: Path = Path("/")) -> float:
    """The share of the time of `logical_cores` that cgroups grant: below 1 for a limit that is no whole number."""
    cores = logical_cores(root)
    return min([1.0, *(each / cores for each in _granted_cores(root))])


def _granted_cores(root: Path) -> Iterator[float]:
    """Cores whose time each cgroup grants; nothing of cgroups without a limit."""
    for folder in cgroup_folders(root, "cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")  # version 2
        microseconds = whole(quota), whole(period)
        if not quota:
            microseconds = read_whole(folder / "cpu.cfs_quota_us"), read_whole(folder / "cpu.cfs_period_us")
        granted, of = microseconds
        if granted is not None and of is not None and granted > 0 and of > 0:  # no limit: "max", or -1
            yield granted / of


def _physical_cores() -> int | None:
    """The number of physical cores; None if the system does not say."""
    cores = set()
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        names = read_text(path / "physical_package_id"), read_text(path / "core_id")
        if all(names):  # a core that is off has none
            cores.add(names)
    if cores:
        return len(cores)
    if sys.platform == "darwin" and (fast := system_number("hw.perflevel0.physicalcpu")):
        return fast  # the others are slow, and all wait for the last
    import psutil

    return psutil.cpu_count(logical=False)


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Instruction sets of the first core, by Linux's names; on macOS and Windows those that engines use."""
    if sys.platform == "win32" and platform.machine() == "AMD64":
        from edge.devices.cpuid import windows_flags

        return windows_flags()
    if sys.platform == "darwin":
        return frozenset(flag for flag, name in _APPLE.items() if system_number(f"hw.optional.{name}"))
    return frozenset(flags_of(read_text(root / "proc/cpuinfo")))


def model_name(cpuinfo: str) -> str:
    """The processor's name in a /proc/cpuinfo; empty on ARM, which has none."""
    return _fields(cpuinfo).get("model name", "")


def flags_of(cpuinfo: str) -> set[str]:
    """Instruction sets that a /proc/cpuinfo lists."""
    fields = _fields(cpuinfo)
    return set((fields.get("flags") or fields.get("Features") or "").split())


def notable(flags: Collection[str]) -> tuple[str, ...]:
    """The flags that decide how fast quantized kernels run."""
    return tuple(name for name in _NOTABLE if name in flags)


def _fields(cpuinfo: str) -> dict[str, str]:
    lines = cpuinfo.splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _caches(root: Path) -> dict[str, int]:
    """Cache sizes of the first core in bytes: `{"L1d": 49152, "L2": …}`."""
    caches = {}
    for index in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (read_text(index / name) for name in ("level", "type", "size"))
        kib = whole(size.removesuffix("K")) if size.endswith("K") else None
        suffix = {"Data": "d", "Instruction": "i"}.get(kind, "") if level == "1" else ""
        if level and kib is not None and kib >= 0:
            caches[f"L{level}{suffix}"] = kib * 1024
    return caches

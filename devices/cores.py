"""Cores that are worth using: one rule for runs here, for the C runtime of apps (`linux.c`) and for plans elsewhere.

A pass gives each thread an equal share and waits for the slowest, so the n fastest cores together run n times as fast
as the slowest of them. Phones show it: a Snapdragon 8 Gen 2 is fastest with its five bigger cores (with 6 of its 8,
https://github.com/omnimind-ai/OmniInfer/pull/66 decodes 30 to 40 % slower), an RK3588 with its four bigger ones
(3.8 tok/s with all eight, 6.9 with four: https://github.com/ggml-org/llama.cpp/issues/7176).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from edge.devices.kernel import read_text
from edge.records import dataclass

_CPUS = Path("/sys/devices/system/cpu")


def worth_using(speeds: Iterable[int]) -> int:
    """The number of the fastest cores that together finish equal shares first; all of them if no speed is known (0)."""
    fastest = sorted(speeds, reverse=True)
    return max(range(1, len(fastest) + 1), key=lambda count: (count * fastest[count - 1], count), default=0)


def speed_of(mhz: int) -> int:
    """A core's speed by its highest clock, in a unit of its own: the cube, since a slower core is a smaller one, too.

    A Cortex-A520 of 2.3 GHz with 8 operations per cycle has 0.35 of the rate of a Cortex-X4 of 3.3 GHz with 16, a
    Cortex-A55 of 1.8 GHz 0.38 of that of a Cortex-A76 of 2.4 GHz (https://github.com/pigirons/cpufp); the cubes' ratios
    are 0.34 and 0.42.
    """
    return mhz**3


def physical_cores(cpus: Iterable[tuple[str, str, str]]) -> dict[str, tuple[int, int]]:
    """Capacity and highest clock in MHz, 0 where unknown, by core. cpus: core, capacity and clock in kHz of each
    logical CPU, as Linux writes them."""
    found = dict[str, tuple[int, int]]()
    for core, capacity, khz in cpus:
        found.setdefault(core, (_number(capacity), _number(khz) // 1000))
    return found


def speeds_of(cores: Iterable[tuple[int, int]]) -> list[int]:
    """The speeds of cores, by Linux's capacities if they tell cores apart, else by clocks in MHz; 0: unknown."""
    known = list(cores)
    capacities, mhz = [capacity for capacity, _ in known], [clock for _, clock in known]
    return capacities if len(set(capacities)) > 1 else list(map(speed_of, mhz))


def fast_cores(cores: Iterable[tuple[int, int]]) -> int:
    """The number of cores worth using. cores: capacity and clock in MHz of each; 0: unknown."""
    return worth_using(speeds_of(cores))


def own_fast_cores() -> int:
    """The number of physical cores worth using among those that this process may run on, for ARM under Linux."""
    cpus = []
    for cpu in sorted(os.sched_getaffinity(0)):
        path = _CPUS / f"cpu{cpu}"
        capacity, khz = (read_text(path / name).strip() for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"))
        cpus.append((_core(_CPUS, cpu), capacity, khz))
    return fast_cores(physical_cores(cpus).values())


@dataclass(frozen=True)
class CoreKind:
    """Cores of one kind of a processor with several."""

    cpus: tuple[int, ...]  # that this process may run on
    cores: int  # physical ones
    capacity: int  # by Linux; 0: unknown, as the clock
    mhz: int  # the highest
    midr: str = ""  # the register that names an ARM core, as Linux writes it
    hybrid: str = ""  # of Intel, as Linux names it: core, atom or lowpower

    @property
    def name(self) -> str:
        """Such as `Cortex-A76`."""
        return kind_name(self.midr, self.hybrid, self.mhz)


def kind_name(midr: str, hybrid: str, mhz: int) -> str:
    """The name of a kind of cores, as far as it is known. The arguments are those of CoreKind."""
    if hybrid in _HYBRIDS:
        return _HYBRIDS[hybrid]
    try:
        register = int(midr, 16)
    except ValueError:
        return f"cores of {mhz / 1000:.2f} GHz" if mhz else "cores"
    implementer, part = register >> 24 & 0xFF, register >> 4 & 0xFFF
    known = _ARM_PARTS.get(part) if implementer == _ARM else None
    return known or f"part {part:#x} of implementer {implementer:#x}"


def core_kinds(root: Path = Path("/")) -> list[CoreKind]:
    """The kinds of cores that this process may run on, the fastest first; none where Linux does not say. root: of
    /sys. Follows find_kinds in edge/lab/profiling/kit/program/cores.c: clocks count on ARM alone, since elsewhere they
    differ between identical cores."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed, devices = sorted(os.sched_getaffinity(0)), root / "sys/devices"
    cpus = devices / "system/cpu"
    hybrids = {cpu: name for name in _HYBRIDS for cpu in _listed(read_text(devices / f"cpu_{name}/cpus"))}
    found = dict[tuple[int, int, str, str], list[int]]()
    for cpu in allowed:
        path, key = cpus / f"cpu{cpu}", (0, 0, "", hybrids.get(cpu, ""))
        if platform.machine() == "aarch64":
            names = ("cpu_capacity", "cpufreq/cpuinfo_max_freq", "regs/identification/midr_el1")
            capacity, khz, midr = (read_text(path / name).strip() for name in names)
            key = _number(capacity), _number(khz) // 1000, midr, key[3]
        found.setdefault(key, []).append(cpu)
    order = list(_HYBRIDS)
    kinds = [
        CoreKind(tuple(own), len({_core(cpus, cpu) for cpu in own}), *key) for key, own in found.items()
    ]  # fmt: skip

    def rank(each: CoreKind) -> tuple[int, int, int, str]:
        return -each.capacity, -each.mhz, order.index(each.hybrid) if each.hybrid else len(order), each.midr

    return sorted(kinds, key=rank)


def _core(cpus: Path, cpu: int) -> str:
    """The physical core of a logical CPU, by the CPUs that share it."""
    return read_text(cpus / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)


def _listed(text: str) -> list[int]:
    """CPUs in a list such as 0-3,8."""
    ends = [[_number(end) for end in part.split("-")] for part in text.split(",") if part.strip()]
    return [cpu for each in ends for cpu in range(each[0], each[-1] + 1)]


_HYBRIDS = {
    "core": "performance cores", "atom": "efficient cores", "lowpower": "low-power efficient cores",
}  # fmt: skip
_ARM = 0x41
_ARM_PARTS = {  # https://github.com/torvalds/linux/blob/master/arch/arm64/include/asm/cputype.h
    0xD03: "Cortex-A53", 0xD05: "Cortex-A55", 0xD08: "Cortex-A72", 0xD09: "Cortex-A73", 0xD0A: "Cortex-A75",
    0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77", 0xD41: "Cortex-A78", 0xD44: "Cortex-X1",
    0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD48: "Cortex-X2", 0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3",
    0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4", 0xD85: "Cortex-X925", 0xD87: "Cortex-A725",
}  # fmt: skip


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0

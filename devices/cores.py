"""Cores that are worth using: one rule for runs here, for the C runtime of apps (`linux.c`) and for plans elsewhere.

A pass gives each thread an equal share and waits for the slowest, so n threads do n times what the slowest of the n
fastest cores does. Phones show it: a Snapdragon 8 Gen 2 is fastest with its five bigger cores (with 6 of its 8,
https://github.com/omnimind-ai/OmniInfer/pull/66 decodes 30 to 40 % slower), an RK3588 with its four bigger ones
(3.8 tok/s with all eight, 6.9 with four: https://github.com/ggml-org/llama.cpp/issues/7176).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from edge.devices.kernel import read_text

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
    """Capacity and highest clock in MHz, 0 where unknown, by core. cpus: of each logical CPU its core, and capacity and
    clock in kHz as Linux writes them."""
    found = dict[str, tuple[int, int]]()
    for core, capacity, khz in cpus:
        found.setdefault(core, (_number(capacity), _number(khz) // 1000))
    return found


def fast_cores(cores: Iterable[tuple[int, int]]) -> int:
    """The cores worth using, by Linux's capacities if they tell cores apart, else by clocks in MHz; 0: none."""
    known = list(cores)
    capacities, mhz = [capacity for capacity, _ in known], [clock for _, clock in known]
    return worth_using(capacities if len(set(capacities)) > 1 else map(speed_of, mhz))


def own_fast_cores() -> int:
    """The physical cores that this process may run on and that are worth using, of an ARM processor under Linux."""
    cpus = []
    for cpu in sorted(os.sched_getaffinity(0)):
        path = _CPUS / f"cpu{cpu}"
        capacity, khz = (read_text(path / name).strip() for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"))
        cpus.append((read_text(path / "topology/thread_siblings_list").strip() or str(cpu), capacity, khz))
    return fast_cores(physical_cores(cpus).values())


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0

"""Trees of /sys in which the CPUs of this process are of two kinds."""

from __future__ import annotations

import os
from pathlib import Path


def arm_cores(root: Path) -> int:
    """The first CPU a Cortex-A76, the others Cortex-A55; returns the number of these."""
    first, *others = sorted(os.sched_getaffinity(0))
    for cpu in (first, *others):
        capacity, kilohertz, midr = (1024, 2400000, "413fd0b1") if cpu == first else (385, 1800000, "412fd050")
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        for name in ("cpufreq", "topology", "regs/identification"):
            (folder / name).mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
        (folder / "cpufreq/cpuinfo_max_freq").write_text(f"{kilohertz}\n")
        (folder / "topology/thread_siblings_list").write_text(f"{cpu}\n")
        (folder / "regs/identification/midr_el1").write_text(f"0x00000000{midr}\n")
    return len(others)


def hybrid_cores(root: Path) -> int:
    """As of Intel: the first CPU is a performance core, the others are efficient ones; returns the number of these."""
    first, *others = sorted(os.sched_getaffinity(0))
    for name, cpus in (("core", [first]), ("atom", others)):
        folder = root / f"sys/devices/cpu_{name}"
        folder.mkdir(parents=True)
        (folder / "cpus").write_text(",".join(map(str, cpus)) + "\n")
    return len(others)

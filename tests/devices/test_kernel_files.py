"""Readers of the device on trees that hold other things than the kernel's files: no error but their own, no wait."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from edge.devices.graphics import resident_memory, seen_gpus
from edge.devices.host import probe_host, processor
from edge.devices.kernel import read_text, read_whole
from edge.devices.load import read_load
from edge.devices.memory import cgroup_folders, free_memory, memory_limit, memory_use
from edge.devices.memory.mappings import mapped_files
from edge.devices.memory.pressure import read_pressure
from edge.devices.power import find_meter, sensors
from edge.devices.profiles.npus import board, chips, seen_npus
from edge.devices.thermal import held_back, read_hertz, zones

READERS: list[Callable[[Path], Any]] = [
    memory_use, memory_limit, free_memory, cgroup_folders, read_pressure, read_load, mapped_files, seen_gpus,
    resident_memory, seen_npus, board, chips, zones, held_back, read_hertz, probe_host, processor, sensors,
    lambda root: find_meter(root).read(),
]  # fmt: skip

# All files that they read, with what the kernel shows there.
FILES = {
    "proc/self/status": "VmHWM:\t300 kB\nVmRSS:\t200 kB\n", "proc/self/cgroup": "0::/a/b\n",
    "proc/self/smaps": "7f00-7f01 r-xp 00000000 08:01 42   /lib/x.so\nSize:  8 kB\nRss:  4 kB\n",
    "proc/self/fdinfo/3": "drm-driver:\ti915\ndrm-client-id:\t7\ndrm-resident-system0:\t124 KiB\n",
    "proc/meminfo": "MemAvailable:  1000 kB\n", "proc/stat": "cpu  1 2 3 4 5 6 7 8 9 10\n",
    "proc/cpuinfo": "model name\t: X\nflags\t: avx2\ncpu MHz\t: 2000.5\n",
    "proc/pressure/memory": "some avg10=1.25 avg60=0.00 avg300=0.00 total=1\n",
    "proc/device-tree/model": "Raspberry Pi 5\0", "proc/device-tree/compatible": "raspberrypi,5\0brcm,bcm2712\0",
    "proc/driver/nvidia/version": "NVRM version: 1\n", "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/a/memory.high": "500000000\n",
    "sys/fs/cgroup/a/b/memory.pressure": "some avg10=2.50 avg60=0.00 avg300=0.00 total=1\n",
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n", "sys/class/thermal/thermal_zone0/temp": "45000\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "passive\n",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "85000\n", "sys/class/hwmon/hwmon0/name": "ina3221\n",
    "sys/class/hwmon/hwmon0/in1_label": "VDD_IN\n", "sys/class/hwmon/hwmon0/in1_input": "5000\n",
    "sys/class/hwmon/hwmon0/curr1_input": "900\n", "sys/class/hwmon/hwmon1/name": "ina226\n",
    "sys/class/hwmon/hwmon1/power1_input": "4000000\n", "sys/class/hwmon/hwmon2/name": "k10temp\n",
    "sys/class/hwmon/hwmon2/temp1_input": "40000\n", "sys/class/power_supply/BAT0/type": "Battery\n",
    "sys/class/power_supply/BAT0/status": "Discharging\n", "sys/class/power_supply/BAT0/power_now": "4000000\n",
    "sys/class/powercap/intel-rapl:0/energy_uj": "1000\n",
    "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850\n",
    "sys/class/accel/accel0/device/uevent": "DRIVER=intel_vpu\n", "sys/class/drm/renderD128/device/vendor": "0x8086\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1500000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3000000\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1200000\n",
    "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n", "sys/devices/system/cpu/cpu0/cache/index0/type": "Data\n",
    "sys/devices/system/cpu/cpu0/cache/index0/size": "32K\n",
}  # fmt: skip

ODD = [
    b"", b"x", b"\xff", b"\0", "²".encode(), b"9" * 5000, b"9" * 400, b"-1", b"nan", b"inf", b"1e999", b":", b"::",
    b"0::", b"0::/a\0b\n", b"0::/" + b"a/" * 9000, b"0::/../../x", b"some avg10= \nx", b"some avg10=nan", b"cpu",
    b"cpu MHz: nan", b"cpu x y z 1 2 3 4 5", b"VmRSS: x kB\nVmHWM: x kB\nMemAvailable: -1 kB\n",
    b"Size:\n7f00-7f01 r-xp 0 08:01 42 /x\nSize:\nRss: x", b"drm-resident-x: \xb2 KiB", b"DRIVER", b"K", "²K".encode(),
]  # fmt: skip


def place(path: Path, content: bytes | str) -> None:
    """A file of that content, or a thing that is no regular file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.exists():
        path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.symlink_to(content)


THINGS = ["fifo", "folder", "/dev/zero", "/nowhere", "/proc/self/mem"]


@pytest.fixture(autouse=True)
def never_waits() -> Iterator[None]:
    """A reader that waits for a FIFO fails instead of hanging the run."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read_all(root: Path) -> None:
    for reader in READERS:
        reader(root)
    for figure in (read_hertz(root), read_pressure(root).stalled, held_back(root)):
        assert figure is None or math.isfinite(figure)


def test_kernel_files_are_read(tmp_path: Path) -> None:
    for name, content in FILES.items():
        place(tmp_path / name, content.encode())
    assert (memory_use(tmp_path).rss, free_memory(tmp_path)) == (200 << 10, 1000 << 10)
    pressure = read_pressure(tmp_path)
    assert (pressure.limit, pressure.stalled) == (500_000_000, 2.5)
    assert [zone.celsius for zone in zones(tmp_path)] == [45.0, 40.0]
    assert held_back(tmp_path) == 0.5
    assert read_hertz(tmp_path) == 1.2e9
    assert probe_host(tmp_path).caches == {"L1d": 32 << 10}
    assert mapped_files(tmp_path)["/lib/x.so"].resident == 4 << 10
    assert resident_memory(tmp_path) == 124 << 10
    assert board(tmp_path) == "Raspberry Pi 5"
    available = {each.name for each in sensors(tmp_path) if each.available}
    assert {"ina", "rapl", "battery", "estimate"} <= available


@pytest.mark.parametrize("content", [*ODD, *THINGS], ids=range(len(ODD) + len(THINGS)))
def test_one_kind_of_other_content_everywhere(tmp_path: Path, content: bytes | str) -> None:
    for name in FILES:
        place(tmp_path / name, content)
    read_all(tmp_path)


def test_long_files_are_read_in_part(tmp_path: Path) -> None:
    with open(tmp_path / "long", "wb") as out:
        out.truncate(1 << 40)
    assert len(read_text(tmp_path / "long")) <= 16 << 20
    assert read_whole(tmp_path / "long") is None
    assert read_text(Path("a\0b")) == ""

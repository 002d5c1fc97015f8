"""Energy and heat sensors on fake trees of /sys and /proc, and what is counted where there is none."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_devices import write

from edge.devices.power import app_meter, battery, find_meter, ina, measure_card, nvml, pmic, rapl, sensors
from edge.devices.power.base import Reading, Unavailable
from edge.devices.power.estimate import Estimate
from edge.devices.power.guarded import Guarded
from edge.devices.power.integrate import Integrated
from edge.devices.profiles.profile import Power

RANGE = 262_143_328_850
PMIC = """      3V7_WL_SW_A current(0)=0.10000000A
       3V3_SYS_A current(1)=0.20000000A
     3V7_WL_SW_V volt(8)=3.70000000V
       3V3_SYS_V volt(9)=3.30000000V
         EXT5V_V volt(24)=5.10000000V
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rapl_tree(root: Path, *counters: int) -> Path:
    for number, counter in enumerate(counters):
        for zone in (f"intel-rapl:{number}", f"intel-rapl:{number}:0"):  # the core is a part of its package
            write(root, f"sys/class/powercap/{zone}/energy_uj", f"{counter}\n")
            write(root, f"sys/class/powercap/{zone}/max_energy_range_uj", f"{RANGE}\n")
    return root


def supply(root: Path, name: str, **files: str) -> None:
    for file, content in files.items():
        write(root, f"sys/class/power_supply/{name}/{file}", content + "\n")


# NVML: NVIDIA's library needs its hardware, so this stands in for it.


class Cards:
    """pynvml with two cards, whose counters are set by hand."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.names, self.buses = ["GeForce RTX 3080", "Tesla T4"], ["00000000:01:00.0", "00000000:02:00.0"]
        self.millijoules, self.processes = [5000, 70_000], [[], [(os.getpid(), 300 << 20), (1, 1 << 30)]]
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetCount = lambda: len(self.names)
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetName = lambda index: self.names[index].encode()
        self.nvmlDeviceGetGraphicsRunningProcesses = lambda index: []

    def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> int:  # noqa: N802
        if bus.decode() not in self.buses:
            raise self.NVMLError("Not Found")
        return self.buses.index(bus.decode())

    def nvmlDeviceGetTotalEnergyConsumption(self, index: int) -> int:  # noqa: N802
        if self.millijoules[index] < 0:
            raise self.NVMLError("Not Supported")
        return self.millijoules[index]

    def nvmlDeviceGetComputeRunningProcesses(self, index: int) -> list[object]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes[index]]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    library = Cards()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_card_is_found_by_its_name_or_address(tmp_path: Path, cards: Cards) -> None:
    for card in (nvml.Card("Tesla T4"), nvml.Card("whatever", "00000000:02:00.0")):
        cards.millijoules = [5000, 70_000]
        meter = nvml.find(tmp_path, card)
        cards.millijoules = [9000, 72_500]
        assert meter.read() == Reading(2.5, None, "NVML", "counter", "package", 1)
        assert nvml.used_memory(card) == 300 << 20
    for card in (nvml.Card("Radeon"), nvml.Card("Tesla T4", "00000000:09:00.0")):
        with pytest.raises(Unavailable, match="NVML"):
            nvml.find(tmp_path, card)
        assert nvml.used_memory(card) is None


def test_run_on_card_goes_on_with_its_counter(tmp_path: Path, cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SENSORS", str(rapl_tree(tmp_path, 0)))
    meter = find_meter()
    rapl_tree(tmp_path, 4_000_000)
    cards.millijoules[1] = -1
    assert not measure_card(meter, nvml.Card("Tesla T4"))  # an old card has no counter
    assert meter.read().source == "RAPL"
    cards.millijoules[1] = 10_000_000
    assert measure_card(meter, nvml.Card("Tesla T4"))
    assert meter.read().joules == 4
    rapl_tree(tmp_path, 99_000_000)
    cards.millijoules[1] = 10_001_500
    assert meter.read() == Reading(5.5, None, "NVML", "counter", "package", 1)
    cards.millijoules[1] = -1
    reading = meter.read()
    assert reading.kind == "estimate"
    assert 5.5 <= reading.joules < 9000  # without the 10 kJ again
    own = app_meter(lambda: 7.0)
    assert not measure_card(own, nvml.Card("GeForce RTX 3080"))
    assert own.read().source == "app"


# RAPL


def test_packages_are_added_and_cores_are_not(tmp_path: Path) -> None:
    meter = rapl.find(rapl_tree(tmp_path, 5_000_000, 1_000_000))
    assert meter.read().joules == 0
    rapl_tree(tmp_path, 7_000_000, 1_500_000)
    reading = meter.read()
    assert reading.joules == pytest.approx(2.5)
    assert (reading.kind, reading.scope, reading.samples) == ("counter", "package", 1)
    assert meter.read().samples == 1  # nothing new was shown


@given(steps=st.lists(st.integers(0, RANGE), min_size=1, max_size=30))
def test_counter_that_wraps_loses_nothing(steps: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    root, total = tmp_path_factory.mktemp("rapl"), 12_345
    meter = rapl.find(rapl_tree(root, total))
    for step in steps:
        total += step
        rapl_tree(root, total % (RANGE + 1))
        meter.read()
    assert meter.read().joules == pytest.approx(sum(steps) / 1e6)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counter_for_root_names_the_permission(tmp_path: Path) -> None:
    rapl_tree(tmp_path, 1)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    with pytest.raises(Unavailable, match="root only: sudo chmod"):
        rapl.find(tmp_path)


@pytest.mark.parametrize("content", ["", "no number\n", "\xff"])
def test_unreadable_counter_is_unavailable(tmp_path: Path, content: str) -> None:
    rapl_tree(tmp_path, 1)
    write(tmp_path, "sys/class/powercap/intel-rapl:0/energy_uj", content)
    with pytest.raises(Unavailable):
        rapl.find(tmp_path)


# Batteries


def test_discharging_battery_tells_watts(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no battery"):
        battery.find(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="0")
    supply(tmp_path, "mouse", type="Battery", scope="Device", status="Discharging", power_now="9000000")
    for status in ("Charging", "Full", "Not charging"):
        supply(tmp_path, "BAT0", type="Battery", status=status, voltage_now="3900000")
        with pytest.raises(Unavailable, match=status.lower()):
            battery.find(tmp_path)
    for files, watts in (
        ({"current_now": "-800000"}, 3.12), ({"current_now": "800000"}, 3.12),  # some makers count down
        ({"power_now": "4500000"}, 4.5),
    ):  # fmt: skip
        supply(tmp_path, "BAT0", type="Battery", status="Discharging", **files)
        reading = battery.find(tmp_path).read()
        assert (reading.watts, reading.kind, reading.scope) == (pytest.approx(watts), "integrated", "device")


# Rails


def test_jetson_counts_input_rail_alone(tmp_path: Path) -> None:
    for channel, (label, millivolts, milliamperes) in enumerate(
        [("VDD_IN", 5000, 1200), ("VDD_CPU_GPU_CV", 5000, 700), ("VDD_SOC", 5000, 300)], start=1
    ):
        for file, content in {f"in{channel}_label": label, f"in{channel}_input": str(millivolts),
                              f"curr{channel}_input": str(milliamperes)}.items():  # fmt: skip
            write(tmp_path, f"sys/class/hwmon/hwmon3/{file}", content)
    write(tmp_path, "sys/class/hwmon/hwmon3/name", "ina3221\n")
    assert ina.find(tmp_path).read().watts == pytest.approx(6.0)


def test_only_one_ina226_is_the_input(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/hwmon/hwmon0/name", "ina226\n")
    write(tmp_path, "sys/class/hwmon/hwmon0/power1_input", "2500000\n")
    assert ina.find(tmp_path).read().watts == pytest.approx(2.5)
    write(tmp_path, "sys/class/hwmon/hwmon1/name", "ina226\n")
    with pytest.raises(Unavailable):
        ina.find(tmp_path)


def test_raspberry_pi_adds_its_rails(tmp_path: Path) -> None:
    assert pmic.watts(PMIC) == pytest.approx(0.1 * 3.7 + 0.2 * 3.3)
    for answer in ("", "EXT5V_V volt(24)=5.1V", "error=1"):
        with pytest.raises(Unavailable, match="no rails"):
            pmic.watts(answer)
    with pytest.raises(Unavailable, match="not a Raspberry Pi 5"):
        pmic.find(tmp_path)


# Watts over time


@given(points=st.lists(st.tuples(st.floats(0, 9), st.floats(0, 50)), min_size=1, max_size=20))
def test_watts_are_summed_by_trapezoids(points: list[tuple[float, float]]) -> None:
    clock, shown = Clock(), [3.0]
    meter = Integrated("fake", "device", lambda: shown[-1], clock)
    joules = 0.0
    for seconds, watts in points:
        joules += seconds * (shown[-1] + watts) / 2
        clock.now += seconds
        shown.append(watts)
        reading = meter.read()
    assert reading.joules == pytest.approx(joules)
    assert reading.samples == 1 + sum(a != b for a, b in pairwise(shown))


# The estimate


def test_estimate_adds_work_time_and_traffic() -> None:
    clock, busy = Clock(), Clock()
    meter = Estimate(Power(core_watts=4.0, idle_watts=1.5, dram_pj_per_byte=100, profile="x"), busy, clock)
    clock.now, busy.now = 10.0, 3.0
    meter.add_bytes(2e10)
    reading = meter.read()
    assert reading.joules == pytest.approx(3 * 4 + 10 * 1.5 + 2)
    assert (reading.kind, reading.samples, reading.watts) == ("estimate", 0, pytest.approx(2.9))


# Which is used


def test_device_without_sensors_estimates(tmp_path: Path) -> None:
    reading = find_meter(tmp_path).read()
    assert (reading.kind, reading.scope) == ("estimate", "process")
    assert [each.name for each in sensors(tmp_path) if each.available] == ["estimate"]
    assert all(each.about for each in sensors(tmp_path))


def test_whole_device_goes_before_processor(tmp_path: Path) -> None:
    rapl_tree(tmp_path, 1)
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", power_now="4500000")
    assert find_meter(tmp_path).read().source == "RAPL"  # counts, where a battery's gauge is slow
    write(tmp_path, "sys/class/hwmon/hwmon0/name", "ina226\n")
    write(tmp_path, "sys/class/hwmon/hwmon0/power1_input", "2500000\n")
    assert find_meter(tmp_path).read().source == "INA226"


def test_sensor_that_vanishes_is_continued_by_estimate(tmp_path: Path) -> None:
    meter = find_meter(rapl_tree(tmp_path, 0))
    rapl_tree(tmp_path, 2_000_000)
    assert meter.read().joules == pytest.approx(2.0)
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").unlink()
    first = meter.read()
    sum(number * number for number in range(300_000))
    second = meter.read()
    assert 2.0 <= first.joules < second.joules
    assert (second.kind, second.source) == ("estimate", "RAPL, then " + second.source.rpartition("then ")[2])
    rapl_tree(tmp_path, 50_000_000_000)  # it comes back, but nobody knows what it counted in between
    assert meter.read().joules < 40_000


def test_counter_that_stands_still_while_work_is_done(tmp_path: Path) -> None:
    now, busy = [0.0], [0.0]
    estimate = Estimate(Power(core_watts=2.0, profile="a test"), lambda: busy[0], lambda: now[0])
    meter = Guarded(rapl.find(rapl_tree(tmp_path, 0)), estimate, lambda: now[0])

    def after(seconds: float, work: float) -> Reading:
        now[0], busy[0] = now[0] + seconds, busy[0] + work
        return meter.read()

    rapl_tree(tmp_path, 3_000_000)
    assert after(1, 1).joules == pytest.approx(3)
    assert after(60, 0.1).kind == "counter"  # nothing was done
    assert after(4, 4).kind == "estimate"
    assert after(1, 1).joules == pytest.approx(3 + 2 * 5.1)

"""The sensors of a kit, in C, beside those of edge, in Python, on the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_power import PMIC, RANGE, Clock, rapl_tree, supply, write

import edge
from edge.devices.power import battery, ina, pmic, rapl
from edge.devices.power.base import Meter
from edge.devices.power.integrate import Integrated

if shutil.which("cc") is None:
    pytest.skip("no C compiler cc", allow_module_level=True)

KIT = Path(edge.__file__).parent / "apps" / "c" / "sensors"
HARNESS = Path(__file__).with_name("energy_harness.c")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("energy") / "harness"
    sources = [HARNESS, KIT / "energy.c", KIT / "files.c"]
    subprocess.run(["cc", "-std=gnu11", "-O1", "-Wall", "-Werror", f"-I{KIT}", *sources, "-lm", "-pthread", "-o", made],
                   check=True)  # fmt: skip
    return made


class Kit:
    """Readings at moments: the sensor's name, joules since the one before and the first (None: not all were measured),
    and watts of a battery."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self, at: float) -> tuple[str, float | None, float | None, float | None]:
        print(at, file=self._process.stdin, flush=True)
        name, *figures = self._process.stdout.readline().rsplit(" ", 3)
        since, total, watts = (None if float(each) < 0 else float(each) for each in figures)
        return name, since, total, watts


@contextmanager
def kit_on(program: Path, root: Path) -> Iterator[Kit]:
    path = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"EDGE_SENSORS": str(root), "PATH": path}
    with subprocess.Popen([program], stdin=-1, stdout=-1, text=True, env=variables) as process:
        yield Kit(process)
        process.stdin.close()


def compare(program: Path, root: Path, find: Callable[[Path], Meter], change: Callable[[int], None]) -> None:
    """Both read at uneven moments; before each, `change` sets the files."""
    clock, total = Clock(), 0.0
    change(0)
    with kit_on(program, root) as kit:
        meter = find(root)
        if isinstance(meter, Integrated):
            meter._clock, meter._at = clock, 0.0
        kit.read(0.0)
        for step in range(1, 6):
            clock.now += step / 4
            change(step)
            name, since, joules, _ = kit.read(clock.now)
            expected = meter.read()
            assert (name, joules) == (meter.source, pytest.approx(expected.joules, rel=1e-6, abs=1e-6))
            assert since == pytest.approx(expected.joules - total, rel=1e-6, abs=1e-6)
            total = expected.joules
        assert total > 0


def rail(root: Path, channel: int, label: str, millivolts: int, milliamperes: int) -> None:
    for file, content in (
        ("label", label), ("input", str(millivolts)),
    ):  # fmt: skip
        write(root, f"sys/class/hwmon/hwmon3/in{channel}_{file}", content + "\n")
    write(root, f"sys/class/hwmon/hwmon3/curr{channel}_input", f"{milliamperes}\n")
    write(root, "sys/class/hwmon/hwmon3/name", "ina3221\n")


def test_counters_of_packages_go_on_behind_their_range(program: Path, tmp_path: Path) -> None:
    def change(step: int) -> None:
        rapl_tree(tmp_path, (RANGE - 3_000_000 + 1_250_000 * step) % (RANGE + 1), 7_000_000 * step)

    compare(program, tmp_path, rapl.find, change)


def test_input_rails(program: Path, tmp_path: Path) -> None:
    def change(step: int) -> None:
        rail(tmp_path, 1, "VDD_IN", 5000 - 10 * step, 1200 + 300 * step)
        rail(tmp_path, 2, "VDD_CPU_GPU_CV", 5000, 700 + step)
        rapl_tree(tmp_path, 100 * step)  # which is a part of it

    compare(program, tmp_path, ina.find, change)


def test_one_monitor_of_input(program: Path, tmp_path: Path) -> None:
    def change(step: int) -> None:
        write(tmp_path, "sys/class/hwmon/hwmon0/name", "ina219\n")
        write(tmp_path, "sys/class/hwmon/hwmon0/power1_input", f"{2_500_000 + 100_000 * step}\n")

    compare(program, tmp_path, ina.find, change)


def test_of_two_monitors_none_is_input(program: Path, tmp_path: Path) -> None:
    for number in (0, 1):
        write(tmp_path, f"sys/class/hwmon/hwmon{number}/name", "ina226\n")
        write(tmp_path, f"sys/class/hwmon/hwmon{number}/power1_input", "2500000\n")
    with kit_on(program, tmp_path) as kit:
        kit.read(0.0)
        assert kit.read(1.0) == ("none", None, None, None)


def test_raspberry_pi_s_power_controller(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/device-tree/model", "Raspberry Pi 5 Model B Rev 1.0\0")
    write(tmp_path, "bin/vcgencmd", f'#!/bin/sh\n[ "$1" = pmic_read_adc ] && cat {tmp_path}/adc\n')
    (tmp_path / "bin" / "vcgencmd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)

    def change(step: int) -> None:
        write(tmp_path, "adc", PMIC.replace("0.20000000A", f"0.{20 + step}000000A"))

    compare(program, tmp_path, pmic.find, change)


def test_discharging_battery(program: Path, tmp_path: Path) -> None:
    def change(step: int) -> None:
        supply(tmp_path, "BAT0", type="Battery", status="Discharging", current_now=f"-{400_000 + 50_000 * step}",
               voltage_now="7600000")  # fmt: skip
        supply(tmp_path, "BAT1", type="Battery", status="Unknown", power_now="1500000")
        supply(tmp_path, "mouse", type="Battery", scope="Device", status="Discharging", power_now="9000000")

    compare(program, tmp_path, battery.find, change)


def test_charger_hides_battery_power_only(program: Path, tmp_path: Path) -> None:
    """Joules are measured between readings at which the battery discharged: neither the first nor the last decides."""

    def plugged(*, on: bool) -> None:
        status = "Charging" if on else "Discharging"
        supply(tmp_path, "BAT0", type="Battery", status=status, power_now="2000000")

    plugged(on=True)
    with kit_on(program, tmp_path) as kit:
        assert kit.read(0.0)[0] == "none"
        assert kit.read(1.0) == ("none", None, None, None)
        plugged(on=False)
        assert kit.read(2.0) == ("none", None, None, 2.0)
        assert kit.read(4.0) == ("battery", pytest.approx(4.0), None, 2.0)
        plugged(on=True)
        assert kit.read(5.0) == ("battery", None, None, None)
        assert kit.read(6.0) == ("battery", None, None, None)
    plugged(on=False)
    with kit_on(program, tmp_path) as kit:
        kit.read(0.0)
        assert kit.read(3.0) == ("battery", pytest.approx(6.0), pytest.approx(6.0), 2.0)
        plugged(on=True)
        assert kit.read(4.0) == ("battery", None, None, None)


def test_machine_without_sensor(program: Path, tmp_path: Path) -> None:
    with kit_on(program, tmp_path) as kit:
        kit.read(0.0)
        assert kit.read(1.0) == ("none", None, None, None)

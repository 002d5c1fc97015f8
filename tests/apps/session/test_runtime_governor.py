"""The C runtime's budgets: its watch stops, pauses and counts joules as that of edge/run/budgets."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import examples
from ctypes_bundle import _Options as Options
from ctypes_bundle import _Readings as Readings
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_library import load_runtime

from edge.apps.sections.model_file import CONFIG
from edge.devices.power.base import Reading
from edge.devices.power.estimate import Estimate
from edge.devices.profiles.profile import Power
from edge.run.budgets import meters
from edge.run.budgets.governor import RunLimits
from edge.run.budgets.meters import Watch

STOPS = {6: "time", 7: "energy", 8: "power", 9: "thermal", 10: "memory"}  # edge_finish
MIB = 1 << 20


def library() -> ctypes.CDLL:
    lib = load_runtime("watch_harness.c", "budgets.c")
    lib.watch_affordable.restype = ctypes.c_int64
    for name in ("watch_paused", "watch_joules"):
        getattr(lib, name).restype = ctypes.c_double
    lib.watch_size.restype = ctypes.c_size_t
    lib.watch_measured.restype = ctypes.c_bool
    return lib


@dataclass
class App:
    """What an app does: it works, and tells what it has read. It owns a watch in C and its twin in Python."""

    options: dict[str, float]
    measured: bool
    power: Power
    celsius: float = 30.0
    headroom: float = 0.5
    available: int = -1
    joules: float = 100.0

    def __post_init__(self) -> None:
        self.config = np.zeros((), CONFIG)
        self.config["core_watts"], self.config["idle_watts"] = self.power.core_watts, self.power.idle_watts
        self.config["joules_per_byte"] = self.power.dram_pj_per_byte * 1e-12
        self.lib, self.c = library(), ctypes.create_string_buffer(library().watch_size())
        self.now = ctypes.c_double.in_dll(self.lib, "watch_now")
        self.cpu = ctypes.c_double.in_dll(self.lib, "watch_cpu")
        self.now.value, self.cpu.value = 1000.0, 5.0
        self.python_now = 1000.0

    def start(self) -> None:
        readings = self.readings()
        self.lib.watch_read(self.c, ctypes.byref(readings), False)
        options = Options(**self.options)
        config = ctypes.c_void_p(self.config.ctypes.data)
        self.lib.watch_start(self.c, config, ctypes.byref(options), ctypes.byref(readings))
        limits = RunLimits(
            deadline=1000.0 + self.options["time"] if "time" in self.options else None,
            energy=self.options.get("energy"), power=self.options.get("power"),
            max_temp=0.0 if "headroom" in self.options else self.options.get("max_temp"),
        )  # fmt: skip
        estimate = Estimate(self.power, lambda: self.cpu.value, lambda: self.python_now)
        self.meter = self if self.measured else estimate
        self.twin = Watch(
            limits, self.meter, Path("zone"), clock=lambda: self.python_now, sleep=self.sleep_python,
        )  # fmt: skip

    def sleep_python(self, seconds: float) -> None:
        self.python_now += seconds

    def read(self) -> Reading:
        return Reading(self.joules, None, "app", "counter", "device", 1)

    def add_bytes(self, count: float) -> None:
        """Measured joules have them."""

    def work(self, seconds: float, joules: float, nbytes: int) -> None:
        self.now.value = self.python_now = self.python_now + seconds
        self.cpu.value += 0.0 if self.measured else 2 * seconds
        self.joules += joules
        self.meter.add_bytes(nbytes)
        self.lib.watch_bytes(self.c, ctypes.c_double(nbytes))
        self.lib.watch_read(self.c, ctypes.byref(self.readings()), True)

    def readings(self) -> Any:
        return Readings(self.joules if self.measured else -1.0, self.celsius, self.headroom, self.available)

    def heat(self) -> float:
        """On the scale of the limit: 30 °C from a headroom of 0 to 1, where it is about one."""
        limit = self.options.get("headroom")
        above = self.celsius - self.options.get("max_temp", math.inf)
        return self.celsius if limit is None else max(above, 30 * (self.headroom - limit))

    def c_look(self, tokens: int, spare: float = 0.0, cancelled: int = 0) -> tuple[str | None, float]:
        """Why it stops, and bytes to return."""
        give = ctypes.c_double()
        stop = self.lib.watch_look(
            self.c, ctypes.c_int64(tokens), ctypes.byref(ctypes.c_int32(cancelled)), ctypes.c_double(200 * MIB),
            ctypes.c_double(spare), ctypes.byref(give),
        )  # fmt: skip
        return STOPS.get(stop), give.value

    def pay(self, cancelled: int = 0) -> None:
        """Both pay at the end of an answer."""
        self.lib.watch_pay(
            self.c, ctypes.byref(ctypes.c_int32(cancelled)), ctypes.c_double(200 * MIB), ctypes.c_double(0.0),
            ctypes.byref(ctypes.c_double()),
        )  # fmt: skip
        if not cancelled:
            self.twin.pay()
            assert self.lib.watch_paused(self.c) == pytest.approx(self.twin.paused, abs=1e-9)

    def look(self, tokens: int) -> str | None:
        """Why both stop."""
        (stop, _), expected = self.c_look(tokens), self.twin.stop_reason(tokens)
        assert stop == expected
        assert self.lib.watch_paused(self.c) == pytest.approx(self.twin.paused, abs=1e-9)
        return expected


# seconds, joules, °C and headroom above their limits, tokens
WORK = st.tuples(
    st.floats(0.001, 0.5), st.floats(0, 1), st.floats(-3, 2), st.floats(-0.1, 0.06), st.sampled_from([1, 1, 16])
)


@settings(max_examples=examples(100), deadline=None)
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "time": st.floats(2, 40), "energy": st.floats(1, 20),
            "power": st.floats(0.6, 5),  # idle watts of 0.5 would be more or less by rounding
            "max_temp": st.floats(25, 60), "headroom": st.floats(0.3, 1.2),
        },
    ),
    measured=st.booleans(),
    steps=st.lists(WORK, min_size=1, max_size=20),
)  # fmt: skip
def test_watch_stops_and_pauses_as_its_python_twin(
    options: dict[str, float], measured: bool, steps: list[tuple[float, float, float, float, int]]
) -> None:
    """An app that reads after every pass. The device's own costs are 0 where it measures."""
    app = App(options, measured, Power() if measured else Power(3.0, 0.5, 200.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meters, "read_celsius", lambda _: app.heat())
        app.start()
        for seconds, joules, warmer, nearer, tokens in steps:
            app.celsius = options.get("max_temp", 40.0) + warmer
            app.headroom = options.get("headroom", 0.5) + nearer
            app.work(seconds, joules, 10**8)
            if app.look(tokens):
                break
            assert app.lib.watch_affordable(app.c, ctypes.c_int64(300)) == app.twin.affordable(300)
            assert app.lib.watch_joules(app.c) == pytest.approx(app.twin.joules(), abs=1e-6)
        else:
            app.pay()
        assert app.lib.watch_measured(app.c) == measured


@pytest.mark.parametrize(("options", "reason"), [
    ({"max_temp": 40.0}, "thermal"), ({"power": 0.25, "time": 10_000}, "power"),
])  # fmt: skip
def test_device_that_pauses_do_not_help_ends_the_answer(options: dict[str, float], reason: str) -> None:
    """It stays hot, or draws more than the limit at rest."""
    app = App(options, reason == "thermal", Power(3.0, 0.5, 0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meters, "read_celsius", lambda _: app.heat())
        app.start()
        app.celsius = 45.0
        for _ in range(100):
            app.work(2.0, 0.0, 0)
            if stop := app.look(1):
                break
    assert stop == reason


def test_joules_are_estimated_until_the_app_reads_them() -> None:
    app = App({"energy": 30.0}, False, Power(3.0, 0.5, 200.0))
    app.start()
    app.work(1.0, 50.0, 10**9)
    estimate = 2 * 3.0 + 0.5 + 0.2
    assert app.lib.watch_joules(app.c) == pytest.approx(estimate)
    app.measured = True
    app.work(0.0, 0.0, 0)  # the first reading
    assert app.lib.watch_joules(app.c) == pytest.approx(estimate)
    app.work(1.0, 2.5, 10**9)
    assert app.lib.watch_joules(app.c) == pytest.approx(estimate + 2.5)
    assert app.lib.watch_measured(app.c)
    app.cpu.value += 0.25
    assert app.lib.watch_joules(app.c) == pytest.approx(estimate + 2.5 + 0.75)  # since the last reading
    assert app.c_look(1)[0] is None
    app.work(1.0, 12.0, 0)
    assert app.c_look(1)[0] == "energy"


def test_gpus_work_costs_as_that_of_all_cores() -> None:
    """CPU time of the process that is part of the GPU's work is not counted twice."""
    app = App({"energy": 30.0}, False, Power(3.0, 0.5, 200.0))
    app.start()
    app.work(1.0, 0.0, 0)
    app.lib.watch_gpu(app.c, ctypes.c_double(8.0), ctypes.c_double(2.0))
    assert app.lib.watch_joules(app.c) == pytest.approx(8 * 3.0 + 0.5)
    app.lib.watch_gpu(app.c, ctypes.c_double(1.0), ctypes.c_double(2.0))  # a driver that computes on all cores
    assert app.lib.watch_joules(app.c) == pytest.approx(8 * 3.0 + 0.5)
    app.work(1.0, 0.0, 0)
    assert app.c_look(1)[0] == "energy"


def test_confirmed_drafts_end_at_deadline_or_beyond_energy() -> None:
    app = App({"time": 2.0, "energy": 8.0}, True, Power())
    app.start()
    for seconds, joules, end in ((1.0, 8.0, None), (0.0, 1.0, "energy"), (1.0, 0.0, "time")):
        app.work(seconds, joules, 0)
        assert STOPS.get(app.lib.watch_spent(app.c)) == end


@pytest.mark.parametrize("spare", [0, 3 * MIB, 50 * MIB])
def test_memory_is_returned_until_none_is_left(spare: int) -> None:
    """Two consecutive readings of less than 6 MiB; 0 is what iOS says where there is no limit."""
    app = App({}, False, Power())
    app.start()
    for app.available in (0, 1 * MIB, 20 * MIB, 1 * MIB):
        app.work(0.6, 0.0, 0)
        assert app.c_look(1, spare) == (None, 0.0)
    app.work(0.6, 0.0, 0)
    assert app.c_look(1, spare) == ((None, min(spare, 11 * MIB)) if spare else ("memory", 0.0))
    app.now.value += 0.6
    assert app.c_look(1, 3 * MIB) == (None, 0.0)  # not again before the app has read it again

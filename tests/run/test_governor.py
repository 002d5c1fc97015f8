"""The governor's decisions on simulated devices; nothing is run. Its twin in apps, whose
stops, pauses and passes `tests/apps/session/test_runtime_governor.py` compares with its own, holds the details."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from edge.run.budgets.governor import RunLimits, Sample, State, Stop, decide


@dataclass
class Device:
    """Heat flows to the surroundings through `resistance` (K/W) from `capacity` (J/K); a step takes `step` seconds."""

    resistance: float
    capacity: float
    working: float  # watts
    idle: float
    step: float = 0.02
    noise: float = 0.0
    surroundings: float = 25.0

    def __post_init__(self) -> None:
        self.time, self.joules, self.celsius, self.steps, self.hottest = 0.0, 0.0, self.surroundings, 0, 0.0

    def spend(self, seconds: float, watts: float) -> None:
        slices = max(1, int(seconds / 0.05))
        for _ in range(slices):
            flow = watts - (self.celsius - self.surroundings) / self.resistance
            self.celsius += flow / self.capacity * seconds / slices
        self.time += seconds
        self.joules += seconds * watts
        self.hottest = max(self.hottest, self.celsius)

    def sample(self, random: random.Random) -> Sample:
        shown = round(self.celsius + random.gauss(0, self.noise))  # whole degrees, as most sensors
        return Sample(self.time, self.joules * random.uniform(1 - self.noise / 10, 1), None, float(shown))


def run(device: Device, limits: RunLimits, seconds: float, seed: int = 0) -> Stop | None:
    """Steps and pauses as they are decided. Why it stopped, None if it did not."""
    chance, state = random.Random(seed), State(Sample(0.0, 0.0))
    while device.time < seconds:
        device.spend(device.step, device.working)
        device.steps += 1
        tokens = 1
        while True:
            decision, state = decide(limits, state, device.sample(chance), tokens)
            if decision.stop:
                return decision.stop
            if not decision.pause:
                break
            device.spend(decision.pause, device.idle)
            tokens = 0
    return None


PHONES = [
    pytest.param(70, Device(8, 10, 8, 1), id="phone"), pytest.param(45, Device(6, 15, 6, 0.5), id="in-the-hand"),
    pytest.param(42, Device(8, 40, 5, 0.5), id="slow-to-warm"), pytest.param(60, Device(3, 20, 15, 2), id="laptop"),
    pytest.param(70, Device(8, 5, 8, 1), id="small-board"),
]  # fmt: skip


@pytest.mark.parametrize("step", [0.02, 0.3])
@pytest.mark.parametrize(("limit", "device"), PHONES)
def test_heat_holds_at_nine_tenths_of_speed(limit: float, device: Device, step: float) -> None:
    """The best: full speed until the limit is reached, then just what holds it."""
    device = Device(device.resistance, device.capacity, device.working, device.idle, step, noise=0.3)
    assert run(device, RunLimits(max_temp=limit), 300) is None
    assert device.hottest <= limit + 0.5  # half of what a sensor shows
    at_last = device.surroundings + device.working * device.resistance
    alone = math.log((at_last - device.surroundings) / (at_last - limit)) * device.resistance * device.capacity
    held = ((limit - device.surroundings) / device.resistance - device.idle) / (device.working - device.idle)
    best = (alone + (300 - alone) * held) / step
    assert device.steps >= 0.9 * best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("power", "idle"), [(2.0, 0.2), (4.0, 1.0), (7.5, 1.0)])
def test_power_holds_at_nine_tenths_of_speed(power: float, idle: float, seed: int) -> None:
    device = Device(1, 100, 8.0, idle)
    assert run(device, RunLimits(power=power), 60, seed) is None
    assert device.joules <= power * (device.time + 1)
    best = 60 * (power - idle) / (device.working - idle) / device.step
    assert device.steps >= 0.9 * best


def test_device_that_draws_more_at_rest_stops() -> None:
    assert run(Device(1, 100, 8.0, 3.0), RunLimits(power=2.0), 60) == "power"

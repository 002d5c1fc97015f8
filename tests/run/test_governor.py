"""The governor's decisions, on made-up readings and on simulated devices; nothing is run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from edge.run.budgets.governor import RunLimits, Sample, State, Stop, affordable, decide


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
    device = Device(1, 100, 8.0, 3.0)
    assert run(device, RunLimits(power=2.0), 60) == "power"
    assert device.time < 12


def test_device_that_is_too_hot_at_rest_stops() -> None:
    device = Device(10, 2, 8.0, 5.0)
    assert run(device, RunLimits(max_temp=50), 600) == "thermal"
    assert device.time < 120


@pytest.mark.parametrize("seed", range(20))
def test_energy_is_never_passed_by_more_than_token(seed: int) -> None:
    chance, state, joules, time = random.Random(seed), State(Sample(0.0, 0.0)), 0.0, 0.0
    dearest = 0.0
    while True:
        token = chance.uniform(0.5, 1.5) * 0.03
        joules, time, dearest = joules + token, time + 0.01, max(dearest, token)
        decision, state = decide(RunLimits(energy=2.0), state, Sample(time, joules), 1)
        if decision.stop:
            break
    assert decision.stop == "energy"
    assert 2.0 - 2 * dearest <= joules <= 2.0 + dearest


@pytest.mark.parametrize("seed", range(20))
def test_prompt_passes_its_time_by_little(seed: int) -> None:
    """By a token or the first pass, though other programs may halve the speed at any moment."""
    chance = random.Random(seed)
    pace, deadline = chance.uniform(0.001, 1.0), chance.uniform(0.1, 60.0)
    limits, state, time, ran = RunLimits(deadline=deadline), State(Sample(0.0)), 0.0, 0
    while not decide(limits, state, Sample(time), 0)[0].stop:
        count = affordable(limits, state, 512, time, 0.0)
        time, ran = time + count * pace * chance.uniform(1.0, 2.0), ran + count
        _, state = decide(limits, state, Sample(time), count)
    assert time <= max(deadline, 32 * pace * 2) + pace * 2
    assert ran >= min(32, (deadline - pace * 2) / pace / 2)


@pytest.mark.parametrize("seed", range(40))
def test_prompt_exceeds_energy_by_a_token_at_most(seed: int) -> None:
    """A pass costs something for the weights and something for each token; either may be disturbed up to two times."""
    chance = random.Random(seed)
    fixed, each = chance.uniform(0.0, 0.2), chance.uniform(0.001, 0.05)
    limits = RunLimits(energy=chance.uniform(0.05, 20.0))
    assert limits.energy is not None
    state, time, spent, ran, passes, token = State(Sample(0.0, 0.0)), 0.0, 0.0, 0, 0, 0.0
    while count := affordable(limits, state, 512, time, spent):
        cost = (fixed + each * count) * chance.uniform(1.0, 2.0)
        token = max(token, (fixed + each) * 2)
        time, spent, ran, passes = time + 1, spent + cost, ran + count, passes + 1
        decision, state = decide(limits, state, Sample(time, spent), count)
        if decision.stop:
            break
    assert spent <= limits.energy + token
    assert spent > limits.energy - 2 * token  # and little is left unused
    if limits.energy > 40 * token:
        assert ran / passes > 10  # most of it was run in passes that are worth their weights


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("every", [3, 25])
def test_stepped_gauge_is_exceeded_by_one_step(every: int, seed: int) -> None:
    """As those of batteries: the same for many tokens, then all at once."""
    chance, state, shown, spent = random.Random(seed), State(Sample(0.0, 0.0)), 0.0, 0.0
    for number in range(1, 10_000):
        spent += chance.uniform(0.5, 1.5) * 0.01
        if number % every == 0:
            step, shown = spent - shown, spent
        decision, state = decide(RunLimits(energy=2.0), state, Sample(number * 0.01, shown), 1)
        if decision.stop:
            break
    assert decision.stop == "energy"
    assert 2.0 - 3 * step <= shown <= 2.0 + step


def test_vanished_meter_keeps_spent_joules() -> None:
    """Nothing is known of what comes after; what is near the end already stops."""
    state = State(Sample(0.0, 0.0))
    for number in range(1, 100):
        joules = number * 0.02 if number <= 50 else None
        decision, state = decide(RunLimits(energy=2.0, power=5.0), state, Sample(number * 0.01, joules), 1)
        assert decision.stop is None
    assert (state.last.joules, state.token) == (1.0, pytest.approx(0.02))

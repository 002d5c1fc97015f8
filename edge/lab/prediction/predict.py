"""Prediction of a plan's speed and energy on a device, before anything runs.

A pass takes as long as memory needs for its bytes or the cores for its arithmetic, whichever is longer, plus a fixed
time (the roofline model, Williams et al. 2009), with the shares of the ceilings that our engines reach. On this device,
earlier runs of the same setting take precedence: their seconds per token against their context. Where other programs
want the cores now, both are scaled by what a run keeps beside them (`crowd.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from edge.backends.counts import Footprint
from edge.backends.efficiency import Efficiency, Shares
from edge.backends.tvm import ENGINE
from edge.devices.power.base import certainty
from edge.devices.profiles import HOST
from edge.devices.profiles.profile import DeviceProfile, Power
from edge.lab.prediction import npu
from edge.lab.prediction.basis import basis, unknown
from edge.lab.prediction.crowd import Crowd, Left, left_by
from edge.lab.prediction.efficiency import efficiency_of, weight_shares
from edge.lab.prediction.errors import Correction, correction, worded
from edge.lab.prediction.learning import learn
from edge.lab.prediction.roofline import counting_s, reading_s
from edge.lab.prediction.sustained import Kept, kept_by
from edge.lab.prediction.work import Work, work_of
from edge.model.structure.spec import ModelSpec, model_key
from edge.plan.plan import Plan
from edge.run.history import Phase, Run

_ENOUGH_TOKENS = 8  # runs with fewer decoded tokens are mostly noise
_ENOUGH_PROMPT = 32  # tokens: shorter prompts read weights as decoding does, and say nothing about longer ones
_APART = 256  # rows by which contexts must differ to show the cost of a row
_LINES = 3  # least pairs of such runs for a slope
_SLOPE_BOUNDS = (0.25, 4.0)  # × the roofline's slope: noise makes slopes that no memory has


@dataclass(frozen=True)
class Wanted:
    """The figures to predict, and limits; None: no limit."""

    prompt: int = 512  # tokens
    contexts: tuple[int, ...] = (128,)  # rows in the cache at which decode is predicted
    energy: float | None = None  # joules
    power: float | None = None  # watts
    time: float | None = None  # seconds
    spent: float = 0.0  # joules of the energy that loading takes


@dataclass(frozen=True)
class Guess:
    """A predicted figure and its source."""

    value: float
    source: str
    error: float | None = None  # factor by which nine in ten such estimates are off at most; None: unknown, or measured

    @property
    def known(self) -> str:
        """Its error in words; empty if it was measured."""
        return worded(self.error) if self.source.startswith("estimated") else ""


@dataclass(frozen=True)
class Sustained:
    """Decode speed at the end of a long run on a device that throttles."""

    seconds: float  # of the run
    when: str  # in words
    tok_s: Guess
    joules: Guess | None  # per token


@dataclass(frozen=True)
class Decode:
    """Decode speed with `context` rows in the cache."""

    context: int
    tok_s: Guess
    joules: Guess | None  # per token
    sustained: Sustained | None = None  # used for ranking where the device throttles


@dataclass(frozen=True)
class Prediction:
    """Predicted figures; None: unknown."""

    device: str
    prompt: int
    prefill_tok_s: Guess | None
    ttft_s: Guess | None
    prompt_joules: Guess | None
    decode: tuple[Decode, ...]
    watts: Guess | None
    energy_tokens: Guess | None  # tokens that the energy allows after the prompt
    time_tokens: Guess | None  # tokens that the time allows after the prompt
    limited_tok_s: Guess | None  # decode speed under the limit of watts
    basis: tuple[str, ...]  # the device's figures that estimates rest on
    unknown: tuple[str, ...]  # figures that the device's profile lacks


_ALL = Left(1.0, 1.0)  # of a quiet device
_Cost = Callable[[float], Guess]
"""Joules of a token at a context."""


@dataclass(frozen=True)
class _Line:
    """Seconds per token as a linear function of context."""

    start: float
    slope: float
    source: str
    error: float | None = None

    def at(self, context: float) -> float:
        return self.start + self.slope * context

    def beside(self, left: Left) -> _Line:
        return (
            self
            if left == _ALL
            else _Line(self.start / left.speed, self.slope / left.speed, _now(self.source), self.error)
        )


def predict(
    spec: ModelSpec, plan: Plan, device: DeviceProfile, wanted: Wanted, runs: Sequence[Run] = (),
    power: Power | None = None, streaming_s: float | None = 0.0, meter: str | None = None, *,
    crowd: Crowd | None = None, corrected: bool = True,
) -> Prediction:  # fmt: skip
    """Predict a plan's speed and energy.

    runs: measured ones of the same setting on `device`. power: replaces the profile's. streaming_s: seconds that
    streamed weights add to a pass (`edge.lab.prediction.work`); None: unknown, and so is the speed. meter: the energy
    source that a run will have; joules of earlier runs count only if they are from the same source. crowd: other
    programs on `device` now, unless they want little. corrected: whether to correct by published or learned speeds
    (`edge.lab.prediction.errors`, `edge.lab.prediction.learning`).
    """
    roof = _Roof.of(spec, plan, device, streaming_s or 0.0, corrected=corrected)
    long = [run for run in runs if run.prefill and run.prefill.tokens >= min(_ENOUGH_PROMPT, wanted.prompt)]
    crowd = crowd if npu.is_on_cpu(plan) else None
    (runs, crowd), (prompts, crowd_of_prompts) = _comparable(runs, crowd), _comparable(long, crowd)
    line, prefill = _decode_line(roof, runs), _prefill_seconds(roof, prompts, wanted.prompt)
    if streaming_s is None:
        line = prefill = None
    metered = [run for run in runs if run.energy_source == meter]
    decode_watts, prompt_watts = (_watts(metered, phase) or roof.watts for phase in ("decode", "prefill"))
    power = power or device.power if npu.is_on_cpu(plan) else None
    steps, chunks = _left(roof, device, crowd, 0), _left(roof, device, crowd_of_prompts, wanted.prompt)
    line, prefill = line and line.beside(steps), _beside(prefill, chunks, 1 / chunks.speed)
    decode_watts, prompt_watts = (
        _beside(watts, left, left.cores) for watts, left in ((decode_watts, steps), (prompt_watts, chunks))
    )
    cost = None if line is None else _token_cost(roof, line, decode_watts, _of_cores(power, steps))
    config, capacity = plan.config, plan.config.capacity
    kept = kept_by(device, model_key(spec), config.kv_dtype, config.threads) if npu.is_on_cpu(plan) else None

    def point(context: int, line: _Line) -> Decode:
        speed, joules = Guess(1 / line.at(context), line.source, line.error), None if cost is None else cost(context)
        return Decode(context, speed, joules, None if kept is None else _sustained(kept, plan, speed, joules))

    points = tuple(
        point(context, line)
        for context in sorted({min(each, capacity) for each in wanted.contexts})
        if line is not None
    )
    estimated = any(each and each.source.startswith("estimated") for each in (line, prefill))
    known = {"decode": line is not None, "prompts": prefill is not None, "joules": cost is not None}
    prompt_joules = _prompt_joules(roof, prefill, prompt_watts, _of_cores(power, chunks), wanted.prompt)
    return Prediction(
        device=device.name,
        prompt=wanted.prompt,
        prefill_tok_s=None if prefill is None else replace(prefill, value=wanted.prompt / prefill.value),
        ttft_s=prefill,
        prompt_joules=prompt_joules,
        decode=points,
        watts=_draw(points),
        energy_tokens=_bought(wanted, cost, prompt_joules, capacity),
        time_tokens=_in_time(wanted, line, prefill, capacity),
        limited_tok_s=_limited(wanted, points, power),
        basis=tuple(basis(device, plan, roof.decoding, roof.prompts, crowd) if estimated else ()),
        unknown=tuple(unknown(device, plan, streams=streaming_s is None, **known)),
    )


@dataclass(frozen=True)
class _Roof:
    """The ceilings that this engine reaches on the device's memory and cores, or its NPU; None: unknown."""

    spec: ModelSpec
    plan: Plan
    reach: Efficiency
    shares: Shares  # by kind of weights
    bandwidth: float | None
    flops: float | None
    int8_ops: float | None
    source: str
    streaming_s: float
    watts: Guess | None = None  # drawn at work
    static: bool = False  # every pass has the full number of tokens, and reads the full number of rows
    measured: str | None = None  # the source of earlier runs' speeds; None: runs on this device
    decoding: Correction | None = None  # of estimates without earlier runs
    prompts: Correction | None = None

    @classmethod
    def of(
        cls, spec: ModelSpec, plan: Plan, device: DeviceProfile, streaming_s: float, *, corrected: bool = True
    ) -> _Roof:
        threads, shares = plan.config.threads, weight_shares(spec, plan.backend, plan.config)
        here = device.name == HOST
        source = "estimated from measured ceilings" if here else f"estimated from the profile of {device.name}"
        source = source if device.measured_by is None else "estimated from ceilings measured on this device"
        measured = None if here else "speeds measured on this device"
        on_npu, on_cpu = npu.is_on_npu(plan, device), npu.is_on_cpu(plan)
        decoding = prompts = None
        others = not here and device.measured_by is None and not (device.is_apple and on_cpu)  # Apple: none published
        if corrected and others and (on_npu or on_cpu):
            decoding = correction(plan.backend, device.arch, "decode", npu=on_npu)
            prompts = correction(plan.backend, device.arch, "prompt", npu=on_npu)
        if on_npu:
            rate, watts = device.value("npu_read_bandwidth"), device.value("npu_watts")
            drawn = None if watts is None else Guess(watts, f"estimated from the profile of {device.name}")
            source = "estimated from figures of its NPU" if here else source
            return cls(
                spec, plan, npu.EFFICIENCY, shares, rate, device.npu_flops, None, source, streaming_s, drawn, True,
                None, decoding, prompts,
            )  # fmt: skip
        reach = efficiency_of(plan.backend, device.isa)
        if corrected and on_cpu and plan.backend == ENGINE.NAME and device.speeds:
            decoding, prompts = (learn(device, reach, plan.backend, threads, what) for what in ("decode", "prompt"))
            source = "estimated from speeds of other models measured on this device" if decoding else source
        bandwidth = device.bandwidth(threads) if on_cpu else None
        rate = None if bandwidth is None else bandwidth.bytes_per_s
        flops, int8_ops = (device.flops(threads), device.int8_ops(threads)) if on_cpu else (None, None)
        return cls(
            spec, plan, reach, shares, rate, flops, int8_ops, source, streaming_s, None, False, measured, decoding,
            prompts,
        )  # fmt: skip

    def work(self, tokens: int, context: int) -> Work:
        if self.static:
            context = self.plan.config.capacity
        count = self.plan.bytes
        weights, on_disk = (self.spec.weight_bytes, 0) if count.streamed else (count.weights, count.on_disk)
        footprint = Footprint(weights, count.kv, count.scratch, runtime=0, fixed_kv=count.fixed_kv, on_disk=on_disk)
        return work_of(self.spec, self.plan.config, footprint, tokens, context)

    def seconds(self, tokens: int, context: int, bandwidth: float, flops: float | None) -> float:
        """Seconds of a pass; arithmetic of unknown rate counts as free."""
        work = self.work(tokens, context)
        reading = self._reading(work, bandwidth)
        if flops is not None:
            # One token's arithmetic overlaps with reading; that of the other tokens follows.
            one = self._counting(self.work(1, context), flops)
            reading = max(reading, one) + self._counting(work, flops) - one
        return reading + self.reach.step_s + self.streaming_s

    def reading_share(self) -> float:
        """The share of the bandwidth reached while weights are read."""
        return self.reach.together(self.shares, lambda each: each.reading)

    def _reading(self, work: Work, bandwidth: float) -> float:
        return reading_s(work, self.reach, self.shares, self.plan.config.kv_dtype, bandwidth)

    def _counting(self, work: Work, flops: float) -> float:
        return counting_s(work, self.reach, self.shares, self.plan.config.kv_dtype, flops, self.int8_ops)

    def prompt_seconds(self, prompt: int, start: int, bandwidth: float, flops: float) -> float:
        """Seconds to prefill a prompt in chunks, after `start` rows."""
        chunk, last = self.plan.config.chunk, max(0, self.plan.config.capacity - self.plan.config.chunk)
        if self.static:
            return math.ceil(prompt / chunk) * self.seconds(chunk, last, bandwidth, flops)
        total, done = 0.0, 0
        while done < prompt:
            context, tokens = min(start + done, last), min(chunk, prompt - done)
            # Once the cache is full, all chunks cost the same: count them at once, since prompts may be very long.
            alike = (prompt - done) // tokens if context == last else 1
            total += alike * self.seconds(tokens, context, bandwidth, flops)
            done += alike * tokens
        return total

    def slope(self, bandwidth: float) -> float:
        """Seconds that a row of the cache adds to a token."""
        capacity = max(2, self.plan.config.capacity)
        ends = [self.seconds(1, context, bandwidth, None) for context in (0, capacity - 1)]
        return (ends[1] - ends[0]) / (capacity - 1)


def _comparable(runs: Sequence[Run], crowd: Crowd | None) -> tuple[Sequence[Run], Crowd | None]:
    """Runs on the quiet device, if there are any; else all, which knew other programs already."""
    quiet = [run for run in runs if not run.busy]
    return (quiet, crowd) if quiet or not runs else (runs, None)


def _left(roof: _Roof, device: DeviceProfile, crowd: Crowd | None, prompt: int) -> Left:
    """What other programs leave to chunks of a prompt, or to steps (0)."""

    def speed(threads: int) -> float:
        bandwidth, flops = device.bandwidth(threads), device.flops(threads)
        if bandwidth is None or flops is None:
            return float(threads)
        there, rate = replace(roof, int8_ops=device.int8_ops(threads)), bandwidth.bytes_per_s
        return 1 / (there.prompt_seconds(prompt, 0, rate, flops) if prompt else there.seconds(1, 0, rate, flops))

    if crowd is None:
        return _ALL
    gives_way = roof.plan.backend == ENGINE.NAME
    return left_by(crowd, roof.plan.config.threads, speed, steps=not prompt, gives_way=gives_way)


def _now(source: str) -> str:
    what = source.removeprefix("estimated from ")
    return f"estimated for the load measured now, from {what if what != source else f'speeds {source}'}"


def _beside(quiet: Guess | None, left: Left, factor: float) -> Guess | None:
    return quiet if quiet is None or left == _ALL else Guess(quiet.value * factor, _now(quiet.source), quiet.error)


def _of_cores(power: Power | None, left: Left) -> Power | None:
    """The power of cores that the threads have for a part of the time."""
    return power and replace(power, core_watts=power.core_watts * left.cores)


def _decode_line(roof: _Roof, runs: Sequence[Run]) -> _Line | None:
    phases = [run.decode for run in runs if run.decode and run.decode.tokens >= _ENOUGH_TOKENS]
    if not phases:
        if roof.bandwidth is None:
            return None
        start, slope = roof.seconds(1, 0, roof.bandwidth, roof.flops), roof.slope(roof.bandwidth)
        if roof.decoding is None:
            return _Line(start, slope, roof.source)
        factor, added = roof.decoding.factor, roof.streaming_s  # the disk's delay is measured: not corrected
        return _Line((start - added) / factor + added, slope / factor, roof.source, roof.decoding.error)
    # The cost of a row follows from the speed of reading weights, unless runs at distant contexts show it.
    quickest = min(phases, key=lambda phase: phase.context)
    bandwidth = roof.bandwidth or roof.work(1, 0).weight_bytes / (quickest.token_s * roof.reading_share())
    slope = fit_slope(phases, roof.slope(bandwidth))
    start = median(phase.token_s - slope * phase.context for phase in phases)
    # A negative start would be noise: a token takes at least half the time of the quickest measured one.
    source = roof.measured or earlier(len(phases), _how(runs))
    return _Line(max(start, 0.5 * min(phase.token_s for phase in phases)), slope, source)


def fit_slope(phases: Sequence[Phase], expected: float) -> float:
    """Seconds per token and row: the median over pairs of runs at different contexts (Theil–Sen), within
    `_SLOPE_BOUNDS` of `expected`; `expected` if there are fewer than `_LINES` pairs."""
    pairs = [(one, other) for one in phases for other in phases if other.context - one.context >= _APART]
    if len(pairs) < _LINES:
        return expected
    found = median((other.token_s - one.token_s) / (other.context - one.context) for one, other in pairs)
    low, high = _SLOPE_BOUNDS
    return min(max(found, low * expected), high * expected)


def _prefill_seconds(roof: _Roof, runs: Sequence[Run], prompt: int) -> Guess | None:
    """The roofline's estimate, scaled by earlier prompts' ratio to it, preferably prompts of similar length."""
    phases = [run.prefill for run in runs if run.prefill]
    if roof.bandwidth is not None and roof.flops is not None and not phases:
        seconds = roof.prompt_seconds(prompt, 0, roof.bandwidth, roof.flops)
        if roof.prompts is None:
            return Guess(seconds, roof.source)
        return Guess(seconds / roof.prompts.factor, roof.source, roof.prompts.error)
    if not phases:
        return None
    alike = [phase for phase in phases if 0.5 <= phase.tokens / prompt <= 2] or phases
    # Unknown ceilings are replaced by typical ones, which give the shape; their scale cancels out.
    bandwidth, flops = roof.bandwidth or 20e9, roof.flops or 100e9

    def ratio(phase: Phase) -> float:
        start = max(0, round(phase.context - phase.tokens / 2))
        return phase.seconds / roof.prompt_seconds(phase.tokens, start, bandwidth, flops)

    seconds = roof.prompt_seconds(prompt, 0, bandwidth, flops) * median(map(ratio, alike))
    return Guess(seconds, roof.measured or earlier(len(alike), _how(runs)))


def earlier(runs: int, how: str = "measured") -> str:
    return f"{how} earlier ({runs} {'run' if runs == 1 else 'runs'})"


def _how(runs: Sequence[Run]) -> str:
    return "measured beside other programs" if any(run.busy for run in runs) else "measured"


def _watts(runs: Sequence[Run], name: str) -> Guess | None:
    """Watts that earlier runs drew in a phase; None if none was metered."""
    phases: list[Phase] = [phase for run in runs if (phase := getattr(run, name)) and phase.joules]
    if not phases:
        return None
    watts = median((phase.joules or 0.0) / phase.seconds for phase in phases)
    return Guess(watts, earlier(len(phases), certainty(*(run.energy_kind for run in runs))))


def _spent(power: Power, threads: int, seconds: float, read: float) -> float:
    """Joules, by the formula of edge.devices.power.estimate."""
    return seconds * (threads * power.core_watts + power.idle_watts) + read * power.dram_pj_per_byte * 1e-12


def _token_cost(roof: _Roof, line: _Line, watts: Guess | None, power: Power | None) -> _Cost | None:
    """A function from context to joules per token."""
    if watts is not None:
        drawn, source = watts.value, watts.source
        return lambda context: Guess(drawn * line.at(context), source)
    if power is None:
        return None

    def cost(context: float) -> Guess:
        read = roof.spec.weight_bytes + roof.work(1, int(context)).kv_bytes
        joules = _spent(power, roof.plan.config.threads, line.at(context), read)
        return Guess(joules, f"estimated from the profile of {power.profile}")

    return cost


def _prompt_joules(
    roof: _Roof, prefill: Guess | None, watts: Guess | None, power: Power | None, prompt: int
) -> Guess | None:
    if prefill is None:
        return None
    if watts is not None:
        return Guess(watts.value * prefill.value, watts.source)
    if power is None:
        return None
    passes = math.ceil(prompt / roof.plan.config.chunk)
    joules = _spent(power, roof.plan.config.threads, prefill.value, passes * roof.spec.weight_bytes)
    return Guess(joules, f"estimated from the profile of {power.profile}")


def _sustained(kept: Kept, plan: Plan, speed: Guess, joules: Guess | None) -> Sustained:
    measured = kept.measured and plan.backend == ENGINE.NAME
    source = f"measured {kept.when}" if measured else kept.source
    if joules is not None and kept.joules is None:
        joules = Guess(joules.value, f"{joules.source}, as at first: no sensor counted them in the long run")
    elif joules is not None and kept.joules is not None:
        times = f"{kept.joules:.2f} × as many as at first, by its sensor"
        joules = Guess(joules.value * kept.joules, f"{joules.source}, {times}")
    return Sustained(kept.seconds, kept.when, Guess(speed.value * kept.speed, source), joules)


def _draw(points: Sequence[Decode]) -> Guess | None:
    if not points or points[0].joules is None:
        return None
    return Guess(points[0].joules.value * points[0].tok_s.value, points[0].joules.source)


def _bought(wanted: Wanted, cost: _Cost | None, prompt: Guess | None, capacity: int) -> Guess | None:
    """Tokens of an answer that the energy pays for after the prompt."""
    if wanted.energy is None or cost is None or prompt is None:
        return None
    left = wanted.energy - wanted.spent - prompt.value
    return Guess(_count(left, lambda context: cost(context).value, wanted.prompt, capacity), cost(0).source)


def _in_time(wanted: Wanted, line: _Line | None, prefill: Guess | None, capacity: int) -> Guess | None:
    if wanted.time is None or line is None or prefill is None:
        return None
    return Guess(_count(wanted.time - prefill.value, line.at, wanted.prompt, capacity), line.source)


def _count(budget: float, cost: Callable[[float], float], start: int, capacity: int) -> int:
    """The number of tokens that a budget pays for, at rising costs, until the cache is full."""
    if budget <= 0:
        return 0
    start = min(start, capacity)
    first, last, room = cost(start), cost(capacity), capacity - start
    slope = (last - first) / room if room else 0.0
    if room and budget < room * (first + last) / 2:
        if slope <= 0:
            return int(budget / first)
        return int((math.sqrt(first * first + 2 * slope * budget) - first) / slope)
    return room + int((budget - room * (first + last) / 2) / last)


def _limited(wanted: Wanted, points: Sequence[Decode], power: Power | None) -> Guess | None:
    """Decode speed with pauses that keep the average at the limit; pauses cost idle watts."""
    drawn = _draw(points)
    if wanted.power is None or drawn is None:
        return None
    idle = power.idle_watts if power else 0.0
    share = 1.0 if drawn.value <= wanted.power else (wanted.power - idle) / max(1e-9, drawn.value - idle)
    speed = points[0].tok_s
    return Guess(speed.value * max(0.0, share), drawn.source, speed.error)  # 0: it draws more even while it waits

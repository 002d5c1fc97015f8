"""A kit's result as a profile, with the same figures, pages and comparisons as a local `edge profile`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from edge.backends.tvm import ENGINE as CPU
from edge.devices.cores import kind_name
from edge.devices.host import flags_of, model_name, notable, processor_of
from edge.devices.profiles.profile import Power
from edge.devices.regular import read_bounded
from edge.errors import InputError
from edge.lab.prediction.work import Work
from edge.lab.profiling.kit.make import KIND as KIT_KIND
from edge.lab.profiling.kit.make import SCHEMA as KIT_SCHEMA
from edge.lab.profiling.kit.make import Kit
from edge.lab.profiling.profile import (
    Climate,
    DeviceFacts,
    Energy,
    EngineProfile,
    KindCeilings,
    Mark,
    MemoryBase,
    MemorySample,
    Phase,
    Point,
    Profile,
    Roofs,
    ThreadsPoint,
    Timeline,
    Trim,
    Verdict,
    beyond_power,
)
from edge.lab.profiling.sustained import Spread, Sustained, Window
from edge.lab.profiling.verdict import evidence_of, judge
from edge.values import Rule, parse

KIND, SCHEMA = "edge kit result", 1
_COUNTERS = ("RAPL", "intel-rapl")  # of processor packages; the second in results of older kits
_ANYWHERE = ("edge quantize ", "edge run ")  # advice that does not measure the machine that runs edge
WASM = "wasm32"  # the machine of pages
_MOST_BYTES = 16 << 20  # a result of an hour has less than a tenth

_Rate = Annotated[float, Rule("a rate", lambda number: 1 < number < 1e18)]
_Count = Annotated[int, Rule("a whole number from 1 to 4096", lambda count: 1 <= count <= 4096)]
_Seconds = Annotated[float, Rule("seconds", lambda number: 0 <= number < 1e9)]


@dataclass(frozen=True)
class Kind:
    """Rates of the cores of one kind, with a thread on each; None: they could not be measured alone."""

    cores: _Count
    capacity: Annotated[int, Rule("a capacity of Linux", lambda capacity: 0 <= capacity <= 4096)]  # 0: unknown
    kilohertz: Annotated[int, Rule("a clock", lambda clock: 0 <= clock < 10**8)]  # 0: unknown
    midr: str
    hybrid: str
    read: _Rate | None
    f32: _Rate | None
    int8: _Rate | None

    @property
    def mhz(self) -> int:
        return self.kilohertz // 1000

    @property
    def name(self) -> str:
        return kind_name(self.midr, self.hybrid, self.mhz)


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of the machine: bytes and operations per second."""

    threads: _Count
    read: _Rate
    read_one_core: _Rate
    f32: _Rate
    int8: _Rate | None
    kinds: list[Kind] = field(default_factory=list)  # the fastest first; none if all cores are alike


@dataclass(frozen=True)
class _Window:
    start: _Seconds
    seconds: float
    joules: float | None  # None: not all of it was measured
    cpu_s: float
    others: float | None
    celsius: float | None
    hertz: float | None
    per_token: Spread
    paused: _Seconds = 0.0  # of its seconds


@dataclass(frozen=True)
class _Sustained:
    length: float
    windows: list[_Window]
    hopeless: bool = False  # whether it ended early, since pauses did not lower the power enough


@dataclass(frozen=True)
class Result:
    """A result, as the kit's program prints it."""

    kit: Kit
    time: int  # seconds since 1970, by the machine's clock
    system: str
    machine: str
    board: str  # the device tree's name; "" where there is none
    cpuinfo: str
    caches: dict[str, int]
    memory: int
    fastest_cores: _Count
    cores: _Count
    first_load_s: _Seconds
    load_s: _Seconds
    isa: str
    threads: _Count
    prompts: int
    tokens: int
    answering_s: float
    others: float | None  # of all cores' time; None: a page cannot know
    prompt_joules: float | None  # None: not all joules were measured
    prompt_cpu_s: float  # core-seconds
    answer_joules: float | None
    answer_cpu_s: float
    ttft: Spread
    token: Spread
    curve: list[Point]
    curve_end: str | None
    by_threads: list[ThreadsPoint]
    sustained: _Sustained | None
    energy: str | None  # the sensor of joules; None: no sensor
    peak: int
    peak_anonymous: int | None
    peak_swap: int
    sensor: str
    trip: float | None
    samples: list[MemorySample]
    marks: list[Mark]
    climate: list[Climate]
    ceilings: Ceilings
    seconds: float
    trim: Trim | None = None
    schema: int = field(default=SCHEMA)

    @property
    def device_name(self) -> str:
        """The board, or its processor."""
        unnamed = processor_of(self.cpuinfo, self.machine, self.machine).name
        name = self.board or model_name(self.cpuinfo) or unnamed
        return name if name.isprintable() else self.machine

    @property
    def android(self) -> bool:
        return self.system.startswith("Android ")

    @property
    def in_page(self) -> bool:
        return self.machine == WASM

    @property
    def date(self) -> str:
        return datetime.fromtimestamp(self.time, timezone.utc).isoformat(timespec="seconds")


def read_result(path: Path) -> Result:
    """Read a result. Raises InputError for a file that is no result, or one of another schema."""
    return parse_result(read_bounded(path, _MOST_BYTES, "a result of a kit"), str(path))


def parse_result(text: bytes, where: str) -> Result:
    """The result in a file's bytes. where: its name, for errors. Raises as `read_result`."""
    try:
        data = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        said = "cut short: the program did not end" if text.lstrip().startswith(b'{"kind"') else "no JSON"
        raise InputError(f"{where}: {said}; give what ./edge-profile of a kit printed") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"{where}: no result of a kit: give what ./edge-profile of a kit printed")
    kit = data.get("kit")
    for found, expected in ((data, SCHEMA), (kit if isinstance(kit, dict) else {}, KIT_SCHEMA)):
        if type(found.get("schema")) is not int or found["schema"] != expected:
            raise InputError(f"{where}: of schema {str(found.get('schema'))[:20]}, this edge reads {expected}")
    try:
        _check_numbers(data)
        result = parse(Result, data)
        _check(result)
        profile_of(result)
        return result
    except (ArithmeticError, ValueError, OSError) as error:
        raise InputError(f"{where}: a damaged result ({error})") from None


def _check_numbers(data: object) -> None:
    """Raise ValueError for a number out of the range of all figures: bytes, seconds and rates."""
    if isinstance(data, dict | list):
        for each in data.values() if isinstance(data, dict) else data:
            _check_numbers(each)
    elif isinstance(data, int | float) and data and not 1e-12 < abs(data) < 1e19:
        raise ValueError("a number out of range")


def _check(result: Result) -> None:
    """Raise ValueError for a result that is not a kit's, and for figures that must be greater than 0 and are not."""
    kit, long_run = result.kit, result.sustained
    if kit.kind != KIT_KIND or kit.plan.backend != CPU.NAME or not result.marks:
        raise ValueError("not of a kit")
    figures = [
        result.prompts, result.tokens, kit.prompt, kit.settings.answer, kit.plan.config.capacity,
        *(figure for work in (kit.prefill, kit.decode) for figure in (work.bytes, work.flops)),
        *(figure for each in result.curve for figure in (each.context, each.prefill)),
        *(each.prefill for each in result.by_threads), 1.0 if long_run is None else long_run.length,
    ]  # fmt: skip
    if min(figures) <= 0:
        raise ValueError("a figure that must be greater than 0 is not")
    if long_run is not None and long_run.hopeless and not kit.settings.watts:
        raise ValueError("a long run that ended for a power that it was not held to")


def profile_of(result: Result, again: str = "") -> Profile:
    """The profile of the machine that a kit ran on. again: the command for the same measurement."""
    kit, ceilings = result.kit, result.ceilings
    profile = Profile(
        date=result.date,
        seconds=result.seconds,
        quick=kit.quick,
        settings=kit.settings,
        device=DeviceFacts(
            name=result.device_name,
            system=result.system,
            machine=result.machine,
            physical_cores=result.fastest_cores,
            usable_cores=result.fastest_cores,
            instruction_sets=list(notable(flags_of(result.cpuinfo))),
            caches=result.caches,
            memory=result.memory,
        ),
        model=kit.model,
        roofs=Roofs(ceilings.read, ceilings.f32, ceilings.int8, ceilings.threads, kinds=_kinds(ceilings)),
        engines=[_engine(result)],
        missing={},
        verdict=Verdict("unknown", "", []),
        versions=kit.versions,
    )
    verdict = judge(evidence_of(profile, again))
    elsewhere = [each for each in verdict.advice if each[1] == again or each[1].startswith(_ANYWHERE)]
    return replace(profile, verdict=replace(verdict, advice=elsewhere))


def sustained_of(result: Result) -> Sustained | None:
    """The long run of a result, in the terms of a profile."""
    found, spend = result.sustained, _Joules(result)
    if found is None or not found.windows:
        return None

    def joules(each: _Window) -> float | None:
        count = max(1, each.per_token.count)
        return spend.of(result.kit.decode, each.seconds, each.cpu_s, each.joules, count)

    windows = [
        Window(
            each.start, each.seconds, each.per_token, joules(each), each.celsius, each.hertz, each.others, each.paused
        )
        for each in found.windows
    ]
    return Sustained(found.length, windows)


def _kinds(ceilings: Ceilings) -> list[KindCeilings]:
    return [
        KindCeilings(each.name, each.cores, each.mhz, each.read, each.f32, each.int8)
        for each in ceilings.kinds
        if each.read is not None and each.f32 is not None
    ]


def _engine(result: Result) -> EngineProfile:
    kit, settings = result.kit, result.kit.settings
    plan = replace(kit.plan, config=replace(kit.plan.config, threads=result.threads))
    per_prompt_token = _scaled(result.ttft, 1 / kit.prompt)
    spend = _Joules(result)
    spent = spend.of(
        kit.decode, result.answering_s, result.answer_cpu_s, result.answer_joules, result.tokens
    )  # fmt: skip
    per_prompt = spend.of(
        kit.prefill, result.ttft.p50 * result.prompts, result.prompt_cpu_s, result.prompt_joules, result.prompts
    )  # fmt: skip
    first = result.samples[0] if result.samples else None
    known = first is not None and first.anonymous is not None and first.file is not None
    return EngineProfile(
        engine=plan.backend,
        versions={},
        plan=plan,
        integers=kit.integers,
        first_load_s=result.first_load_s,
        load_s=result.load_s,
        ttft=result.ttft,
        prefill=Phase(
            name="prefill",
            tokens=kit.prompt,
            context=0,
            at_once=min(plan.config.chunk, kit.prompt),
            per_token=per_prompt_token,
            joules_per_token=None if per_prompt is None else per_prompt / kit.prompt,
            bytes_per_s=kit.prefill.bytes / result.ttft.p50,
            flops_per_s=kit.prefill.flops / result.ttft.p50,
        ),
        decode=Phase(
            name="decode",
            tokens=settings.answer,
            context=kit.prompt,
            at_once=1,
            per_token=result.token,
            joules_per_token=spent,
            bytes_per_s=kit.decode.bytes / result.token.p50,
            flops_per_s=kit.decode.flops / result.token.p50,
            watts=spent * result.tokens / result.answering_s if spent is not None and result.answering_s > 0 else None,
        ),
        curve=result.curve,
        curve_end=result.curve_end or kit.curve_end,
        timeline=Timeline(
            peak=result.peak,
            base=MemoryBase(
                first.anonymous or 0, first.file or 0, True, False, plan.bytes.weights, plan.bytes.kv,
                plan.config.capacity,
            ) if first is not None and known else None,
            samples=result.samples,
            marks=result.marks,
            climate=result.climate,
            sensor=result.sensor or None,
            trip=result.trip,
            peak_anonymous=result.peak_anonymous,
            peak_swap=result.peak_swap,
        ),
        energy=spend.source,
        kv_dtypes=[plan.config.kv_dtype],
        others=result.others,
        operators_reason="a kit has no instruments in its passes",
        by_threads=result.by_threads,
        sustained=sustained_of(result),
        trim=result.trim,
        notes=[*kit.notes, *_hopeless(result), _how(result)],
    )  # fmt: skip


def _hopeless(result: Result) -> list[str]:
    ended = result.sustained is not None and result.sustained.hopeless
    return [beyond_power(result.kit.settings)] if ended else []


def _how(result: Result) -> str:
    edge = f"edge {result.kit.versions.get('edge', '?')} ({result.isa})"
    if not result.in_page:
        return f"measured by a kit of {edge}, without Python"
    return (
        f"measured in a page, by WebAssembly of {edge}: an app is faster. The peak is the engine's memory, without the "
        "browser's; the first load has the download"
    )


@dataclass(frozen=True)
class _Joules:
    """Joules from the machine's sensor, else estimated from a profile's power."""

    result: Result

    @property
    def _power(self) -> Power:
        return self.result.kit.power

    @property
    def source(self) -> Energy:
        sensor = self.result.energy
        if sensor is None:
            return Energy(f"{self._power.profile} profile", "estimate", "process", 0.0)
        counts = sensor in _COUNTERS
        return Energy(sensor, "counter" if counts else "integrated", "package" if counts else "device", 0.0)

    def of(self, work: Work, seconds: float, cpu_s: float, measured: float | None, times: int) -> float | None:
        """Joules of one of `times` equal pieces of work, which together took `seconds`, `cpu_s` core-seconds and
        `measured` joules; None if the sensor missed some, as a battery's does while it charges. The estimate uses the
        formula of edge.devices.power.estimate."""
        if self.result.energy is not None:
            return None if measured is None else measured / times
        spent = cpu_s * self._power.core_watts + seconds * self._power.idle_watts
        return spent / times + work.bytes * self._power.dram_pj_per_byte * 1e-12


def _scaled(spread: Spread, by: float) -> Spread:
    return Spread(spread.p10 * by, spread.p50 * by, spread.p90 * by, spread.count)

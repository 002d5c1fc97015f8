"""Made-up device profiles for tests of readers and reports: every optional part is there, or none is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.backends.base import EngineConfig
from edge.lab.profiling.profile import (
    Climate,
    DeviceFacts,
    Energy,
    EngineProfile,
    Mark,
    MemoryBase,
    MemorySample,
    ModelFacts,
    OperatorTime,
    Phase,
    PhaseOperators,
    Point,
    Profile,
    Roofs,
    Settings,
    Timeline,
    Verdict,
)
from edge.lab.profiling.sustained import Spread, Sustained, Window
from edge.plan.plan import Plan, PlanBytes

MIB = 1 << 20
HOSTILE = '<script>alert("x")</script>|`rm`*[a](b)\n# x & y'


def spread(middle: float) -> Spread:
    return Spread(0.9 * middle, middle, 1.2 * middle, 40)


def make_plan(**changes: Any) -> Plan:
    plan = Plan(
        backend="cpu",
        kv_policy="streaming",
        sinks=4,
        config=EngineConfig(capacity=1024, chunk=256, kv_dtype="f16", threads=2, tuning={"tile": 8}),
        evict_step=128,
        bytes=PlanBytes(60 * MIB, 90 * MIB, 20 * MIB, 5 * MIB),
        predicted_peak=180 * MIB,
        limit=256 * MIB,
        limit_source="budget",
    )
    return replace(plan, **changes)


def make_timeline() -> Timeline:
    samples = [
        MemorySample(0.1 * step, (50 + 3 * step) * MIB, (30 + step) * MIB, (20 + 2 * step) * MIB, 20 * step)
        for step in range(45)
    ]
    return Timeline(
        peak=185 * MIB,
        base=MemoryBase(30 * MIB, 20 * MIB, True, False, 90 * MIB, 20 * MIB, 1024),
        samples=samples,
        marks=[
            Mark(0.0, "start"), Mark(0.1, "load"), Mark(0.5, "prompt"), Mark(1.0, "answer"), Mark(2.0, "context 512"),
        ],
        climate=[Climate(1.0 * second, 50.0 + second, 2e9 - 1e8 * second, 1.0) for second in range(5)],
        sensor="cpu-thermal",
        trip=80.0,
    )  # fmt: skip


def make_engine(name: str = "cpu", **changes: Any) -> EngineProfile:
    prefill = Phase("prefill", 512, 0, 256, spread(0.0005), 0.004, 8e8, 4e11)
    decode = Phase("decode", 48, 512, 1, spread(0.0025), 0.044, 1.6e10, 4.5e10, 17.6)
    operators = [
        OperatorTime("qkv", "qkv", 30, 0.001, 0.4, 1 << 20, 1 << 21, 0.1),
        OperatorTime(HOSTILE, "down", 30, 0.0015, 0.6, None, None, None),
    ]
    engine = EngineProfile(
        engine=name,
        versions={"apache-tvm": "0.27"},
        plan=make_plan(),
        first_load_s=9.5,
        load_s=0.04,
        ttft=spread(0.13),
        prefill=prefill,
        decode=decode,
        curve=[Point(128, spread(0.0024), 0.0004), Point(512, spread(0.0026), 0.0005)],
        curve_end="context 1024 would have taken longer than 20 s",
        timeline=make_timeline(),
        energy=Energy("generic-x86 profile", "estimate", "process", 0.5),
        kv_dtypes=["f16", "int8"],
        others=0.02,
        operators=[PhaseOperators("prefill", 128, 0, operators), PhaseOperators("decode", 1, 512, operators)],
    )
    return replace(engine, **changes)


def make_sustained(last: float = 0.0025, **changes: Any) -> Sustained:
    """Five windows; all but the last at 2.5 ms a token, by the median and by the clock."""
    seconds = [0.0025] * 4 + [last]
    windows = [
        Window(12.0 * each, 40 * per, spread(per), 0.044, 60.0 + each, 2e9, 0.02) for each, per in enumerate(seconds)
    ]
    return replace(Sustained(12.0, windows), **changes)


def make_profile(**changes: Any) -> Profile:
    settings = Settings(512, 48, [128, 512], 5, 10.0, 20.0, 60.0, 6.0, memory=256 * MIB)
    profile = Profile(
        date="2026-11-22T01:00:00+00:00",
        seconds=61.0,
        quick=False,
        settings=settings,
        device=DeviceFacts("A processor", "Linux 6.1", "x86_64", 2, 2, ["avx2"], {"L1d": 49152, "L2": MIB}, 8 << 30),
        model=ModelFacts("model.gguf", "llama 135M Q4_1", 135_000_000, 92 * MIB, "Q4_1", 8192),
        roofs=Roofs(2e10, 1e11, None, 2),
        engines=[
            make_engine(sustained=make_sustained(), operators_peak=190 * MIB),
            make_engine("llamacpp", operators=[], operators_reason="it cannot tell", sustained=make_sustained(0.003)),
        ],
        missing={"onnx": "onnxruntime is not installed"},
        verdict=Verdict(
            "memory bandwidth", "Memory bandwidth limits answers on this device.", [("try", "edge tune m")]
        ),
        versions={"edge": "0.1.0"},
    )
    return replace(profile, **changes)


def make_bare_profile() -> Profile:
    """Of a device that tells nothing, with one engine."""
    timeline = Timeline(10 * MIB, None, [MemorySample(0.0, 10 * MIB, None, None, 0)], [], [], None, None)
    engine = make_engine(
        curve=[], timeline=timeline, operators=[], others=None,
        decode=Phase("decode", 16, 16, 1, spread(0.01)), prefill=Phase("prefill", 16, 0, 16, spread(0.001)),
    )  # fmt: skip
    return make_profile(roofs=None, engines=[engine], missing={}, verdict=Verdict("unknown", "?", []))

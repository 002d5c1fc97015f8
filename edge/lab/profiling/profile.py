"""The schema of a device profile: measurements of one model on one device. Names are an interface, see docs/profile.md.

Times are seconds, sizes bytes, energy joules. None: not measured, or unknown on this device.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from edge.budget import parse_bytes
from edge.devices.power.base import Certainty, MeterKind, Scope, certainty
from edge.devices.regular import read_bounded
from edge.errors import InputError
from edge.lab.profiling.sustained import Spread, Sustained, Window
from edge.model.model import Model
from edge.options import Options
from edge.plan.plan import Plan
from edge.values import parse

SCHEMA = 1
_MOST_BYTES = 64 << 20  # a profile of an hour has less than a tenth
KIND = "edge profile"  # distinguishes its JSON from other JSON
LOAD_S = 5.0  # approximate time of a first load; compiling takes longer


@dataclass(frozen=True)
class Settings:
    """The measurements to make; the fields below `memory` are as in `edge run`."""

    prompt: int  # tokens
    answer: int  # tokens
    contexts: list[int]  # rows at the points of the curve, ascending
    repetitions: int
    speed_s: float  # approximate seconds for prompts and answers
    curve_s: float  # approximate seconds for the curve
    sustained_s: float  # seconds of the long run; 0: none
    operators_s: float  # approximate seconds for operators
    memory: int | None = None
    kv_policy: str = "streaming"
    sinks: int = 4
    max_kv_size: int | None = None
    kv_memory: str | None = None
    kv_dtype: str | None = None
    prefill_step_size: int | None = None
    threads: int | None = None
    provider: str | None = None
    watts: float | None = None  # to which pauses hold the long run; not `power`, which is an option of all passes

    @property
    def engine_s(self) -> float:
        """Approximate seconds for one engine."""
        return LOAD_S + sum(self.stages_s) + self.operators_s

    @property
    def stages_s(self) -> tuple[float, float, float]:
        """Approximate seconds for prompts and answers, for the curve, and for the long run."""
        return self.speed_s, self.curve_s, self.sustained_s

    @property
    def rows(self) -> int:
        """KV rows that the longest measurement needs."""
        return max([self.prompt, *self.contexts]) + self.answer

    def options(self) -> Options:
        """The options of every engine's plan."""
        shared = {name: getattr(self, name) for name in _SHARED}
        size = None if self.kv_memory is None else parse_bytes(self.kv_memory, "--kv-memory")
        return Options(**shared | {"kv_memory": size, "expected_tokens": self.rows})


def beyond_power(settings: Settings) -> str:
    """Why a long run ended early."""
    return f"the long run ended early: pauses cannot hold {settings.watts:g} W, which the device draws without work"


def recorded(options: Options) -> dict[str, Any]:
    """The options that Settings record."""
    size = options.kv_memory
    return {name: getattr(options, name) for name in _SHARED} | {"kv_memory": None if size is None else f"{size}B"}


_SHARED = {each.name for each in fields(Options)} & {each.name for each in fields(Settings)}


@dataclass(frozen=True)
class Phase:
    """A prompt ("prefill") or an answer ("decode"), measured repeatedly.

    bytes_per_s, flops_per_s: counted reads and operations of its passes / their measured median time.
    """

    name: Literal["prefill", "decode"]
    tokens: int
    context: int  # rows in the cache before it
    at_once: int  # tokens of a pass
    per_token: Spread  # seconds, over passes
    joules_per_token: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    watts: float | None = None  # joules of all answers / their seconds

    @property
    def tok_s(self) -> float:
        """Tokens per second at the median."""
        return 1 / self.per_token.p50

    @property
    def intensity(self) -> float | None:
        """Operations per byte read."""
        return self.flops_per_s / self.bytes_per_s if self.bytes_per_s and self.flops_per_s else None


@dataclass(frozen=True)
class Point:
    """Speed with `context` rows in the cache."""

    context: int
    decode: Spread  # seconds per token
    prefill: float  # seconds per token of the prefill that led there


@dataclass(frozen=True)
class ThreadsPoint:
    """Speed with `threads` threads, fewer than the plan has."""

    threads: int
    decode: Spread  # seconds per token
    prefill: float  # seconds per token of a prompt


@dataclass(frozen=True)
class MemorySample:
    """Memory of this process at a moment, measured."""

    seconds: float
    rss: int
    anonymous: int | None
    file: int | None
    rows: int  # peak number of KV rows in use so far
    swap: int | None = None


@dataclass(frozen=True)
class MemoryBase:
    """The basis for splitting samples."""

    anonymous: int  # before the engine was loaded
    libraries: int  # file pages that are not weights
    mapped: bool  # weights are file pages
    kv_at_once: bool  # whether the whole cache takes memory at its first use
    weights: int
    kv: int
    capacity: int


@dataclass(frozen=True)
class Mark:
    """The moment from which the run did `what`."""

    seconds: float
    what: str


@dataclass(frozen=True)
class Climate:
    """Temperature and clock at a moment."""

    seconds: float
    celsius: float | None  # of the processor
    hertz: float | None  # of its fastest core
    allowed: float | None  # clock limit / top clock
    battery_watts: float | None = None  # drawn from a battery


@dataclass(frozen=True)
class Timeline:
    """Samples over an engine's run."""

    peak: int  # of the resident set
    base: MemoryBase | None  # None: the system does not distinguish anonymous pages from file pages
    samples: list[MemorySample]
    marks: list[Mark]
    climate: list[Climate]
    sensor: str | None  # of the temperatures
    trip: float | None  # °C, where the kernel slows the device down
    peak_anonymous: int | None = None  # of RssAnon
    peak_swap: int | None = None  # of VmSwap


@dataclass(frozen=True)
class Energy:
    """The source of joules."""

    source: str
    kind: MeterKind  # "estimate": nothing was measured
    scope: Scope
    load: float  # joules of loading

    @property
    def certainty(self) -> Certainty:
        return certainty(self.kind)


@dataclass(frozen=True)
class OperatorTime:
    """An operator's time, all layers together, per pass."""

    name: str
    phase: str  # part of the model's step, named alike in every engine
    calls: int
    seconds: float
    share: float  # of all operators' seconds
    bytes: int | None
    flops: int | None
    waited: float | None  # share of all threads' time spent waiting for each other


@dataclass(frozen=True)
class PhaseOperators:
    """Operator times of passes of `tokens` tokens with `context` rows in the cache, in an instrumented engine."""

    name: Literal["prefill", "decode"]
    tokens: int
    context: int
    operators: list[OperatorTime]


@dataclass(frozen=True)
class Trim:
    """The C library's return of memory to the system, as an app requests it in onTrimMemory."""

    rows: int  # in the cache before
    soft: Spread  # seconds of edge_trim(EDGE_TRIM_SOFT)
    all: Spread  # seconds of edge_trim(EDGE_TRIM_ALL) after it
    freed: int  # bytes by which both reduced RssAnon


@dataclass(frozen=True)
class EngineProfile:
    """Measurements of one engine, in a process of its own."""

    engine: str
    versions: dict[str, str]
    plan: Plan
    first_load_s: float  # including one-time compiling and converting
    load_s: float
    ttft: Spread  # time to first token, without loading
    prefill: Phase
    decode: Phase
    curve: list[Point]
    curve_end: str | None  # why the curve lacks some of the requested contexts
    timeline: Timeline
    energy: Energy
    kv_dtypes: list[str]  # that the engine has
    others: float | None  # share of all cores' time of other processes during prompts and answers
    integers: float = 0.0  # share of the weights' bytes that its best kernels multiply as integers
    operators: list[PhaseOperators] = field(default_factory=list)
    operators_reason: str | None = None  # why there are none
    operators_peak: int | None = None  # resident bytes of the instrumented engine's process
    by_threads: list[ThreadsPoint] = field(default_factory=list)
    sustained: Sustained | None = None
    trim: Trim | None = None
    notes: list[str] = field(default_factory=list)  # other departures from the request
    on_gpu: bool = False

    def __post_init__(self) -> None:
        if self.plan.config.capacity < 1:
            raise ValueError("a plan has KV rows")

    @property
    def threads(self) -> int:
        return self.plan.config.threads

    @property
    def throttled(self) -> Window | None:
        """The last window of the long run, whose speed and joules rank if the device throttles; None if it does not, or
        if the run had pauses, which slow it down, too."""
        run = self.sustained
        return run.last if run and run.throttles and not run.paused else None

    @property
    def ranking_tok_s(self) -> float:
        """Tokens per second of answers; at the end of the long run if the device throttles."""
        return self.throttled.tok_s if self.throttled else self.decode.tok_s


@dataclass(frozen=True)
class GPUCeiling:
    """Measured memory bandwidth of a GPU."""

    name: str
    host: str  # the driver that ran the kernel
    read_bytes_per_s: float  # from the memory that holds its buffers


@dataclass(frozen=True)
class KindCeilings:
    """Measured ceilings of the cores of one kind, with a thread on each."""

    name: str
    cores: int
    mhz: int  # the highest clock; 0: unknown
    read_bytes_per_s: float
    f32_flops: float
    int8_ops: float | None


@dataclass(frozen=True)
class Roofs:
    """Measured ceilings of this device: bytes and operations per second."""

    read_bytes_per_s: float
    f32_flops: float
    int8_ops: float | None
    threads: int
    gpu: GPUCeiling | None = None  # None: no engine ran on a GPU, or it could not be measured
    kinds: list[KindCeilings] = field(default_factory=list)  # the fastest first; none if all cores are alike

    def reading(self, engine: EngineProfile) -> float | None:
        """The ceiling of bytes per second for an engine; None if unknown."""
        if engine.on_gpu:
            return self.gpu.read_bytes_per_s if self.gpu else None
        return self.read_bytes_per_s

    def computing(self, engine: EngineProfile) -> float | None:
        """The ceiling of operations per second for an engine, int8 if it multiplies most weights as integers; None if
        unknown, as for GPUs."""
        if engine.on_gpu:
            return None
        return self.int8_ops if self.int8_ops and engine.integers > 0.5 else self.f32_flops

    def lacks_int8(self, engine: EngineProfile) -> bool:
        """Whether an engine that multiplies most weights as integers is measured against the ceiling of float32."""
        return not self.int8_ops and engine.integers > 0.5 and not engine.on_gpu


@dataclass(frozen=True)
class ModelFacts:
    name: str
    label: str
    parameters: int
    weight_bytes: int
    weight_type: str
    context: int


def model_facts(model: Model, called: str) -> ModelFacts:
    """called: the user's name for the model."""
    spec = model.spec
    return ModelFacts(called, spec.label, spec.parameters, spec.weight_bytes, spec.weight_type, spec.context)


@dataclass(frozen=True)
class DeviceFacts:
    name: str
    system: str
    machine: str
    physical_cores: int
    usable_cores: int
    instruction_sets: list[str]
    caches: dict[str, int]
    memory: int


Limit = Literal[
    "memory bandwidth", "compute", "heat", "memory budget", "streaming", "other programs", "overhead", "unknown"
]


@dataclass(frozen=True)
class Verdict:
    """The conclusion."""

    limit: Limit
    sentence: str  # the limit in words, with its figures
    advice: list[tuple[str, str]]  # (reason, command) pairs


@dataclass(frozen=True)
class Profile:
    """A device profile."""

    date: str
    seconds: float
    quick: bool
    settings: Settings
    device: DeviceFacts
    model: ModelFacts
    roofs: Roofs | None
    engines: list[EngineProfile]  # the choice of `auto` first
    missing: dict[str, str]  # why engines were not measured, by name
    verdict: Verdict
    versions: dict[str, str]
    kind: str = KIND
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON data."""
        return asdict(self)


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises InputError for a file that is no profile, or one of another schema."""
    text = read_bounded(path, _MOST_BYTES, "a profile of edge")
    try:
        data = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise InputError(f"{path}: no JSON: give files that edge profile -o FILE.json wrote") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise InputError(f"{path}: no profile: give files that edge profile -o FILE.json wrote")
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        raise InputError(f"{path}: a profile of schema {str(data.get('schema'))[:20]}, this edge reads {SCHEMA}")
    try:
        profile = parse(Profile, data)
        if not profile.engines:
            raise ValueError("engines: none")
        return profile
    except ValueError as error:
        raise InputError(f"{path}: a damaged profile ({error})") from None

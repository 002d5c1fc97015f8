"""A device profile: measurements of one model on one device. The names are an interface, see docs/profile.md.

Times are seconds, sizes bytes, energy joules. None: not measured, or unknown on this device.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from edge.budget import parse_bytes
from edge.devices.power.base import Certainty, MeterKind, Scope, certainty
from edge.devices.regular import read_regular
from edge.errors import InputError
from edge.options import Options
from edge.plan.plan import Plan
from edge.values import parse

SCHEMA = 1
_MOST_BYTES = 64 << 20  # a profile of an hour has less than a tenth
KIND = "edge profile"  # tells its JSON from other JSON
LOAD_S = 5.0  # approximate time of a first load; compiling takes longer
_LEAST = 1e-12  # seconds: nothing takes less


@dataclass(frozen=True)
class Settings:
    """What to measure. prompt, answer: tokens. contexts: rows of the curve, growing. speed_s, curve_s, operators_s:
    approximate seconds for prompts and answers, the curve, and operators. sustained_s: of the long run; 0: none.
    The rest as in `edge run`."""

    prompt: int
    answer: int
    contexts: list[int]
    repetitions: int
    speed_s: float
    curve_s: float
    sustained_s: float
    operators_s: float
    memory: int | None = None
    kv_policy: str = "streaming"
    sinks: int = 4
    max_kv_size: int | None = None
    kv_memory: str | None = None
    kv_dtype: str | None = None
    prefill_step_size: int | None = None
    threads: int | None = None
    provider: str | None = None

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
        """Those of every engine's plan."""
        shared = {name: getattr(self, name) for name in _SHARED}
        size = None if self.kv_memory is None else parse_bytes(self.kv_memory, "--kv-memory")
        return Options(**shared | {"kv_memory": size, "expected_tokens": self.rows})


def recorded(options: Options) -> dict[str, Any]:
    """The options that Settings record."""
    size = options.kv_memory
    return {name: getattr(options, name) for name in _SHARED} | {"kv_memory": None if size is None else f"{size}B"}


_SHARED = {each.name for each in fields(Options)} & {each.name for each in fields(Settings)}


@dataclass(frozen=True)
class Spread:
    """Of `count` measurements: the values that 10, 50 and 90 % of them do not pass."""

    p10: float
    p50: float
    p90: float
    count: int

    def __post_init__(self) -> None:
        if not _LEAST <= self.p10 <= self.p50 <= self.p90 <= 1 / _LEAST:
            raise ValueError("p10, p50 and p90 are out of order or out of range")

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        found = list(values)
        if len(found) == 1:
            return cls(found[0], found[0], found[0], 1)
        tenths = statistics.quantiles(found, n=10, method="inclusive")
        return cls(tenths[0], tenths[4], tenths[8], len(found))


@dataclass(frozen=True)
class Phase:
    """A prompt ("prefill") or an answer ("decode"), several times over. watts: joules of all answers / their seconds.

    context: rows in the cache before it. at_once: tokens of a pass. per_token: seconds, over passes. bytes_per_s,
    flops_per_s: what such passes must read and compute (counted) over the median time they took (measured).
    intensity: flops per byte.
    """

    name: Literal["prefill", "decode"]
    tokens: int
    context: int
    at_once: int
    per_token: Spread
    joules_per_token: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    watts: float | None = None

    @property
    def tok_s(self) -> float:
        """The median."""
        return 1 / self.per_token.p50

    @property
    def intensity(self) -> float | None:
        return self.flops_per_s / self.bytes_per_s if self.bytes_per_s and self.flops_per_s else None


@dataclass(frozen=True)
class Point:
    """With `context` rows in the cache: seconds per token of the answer; and of the prompt's part that led there."""

    context: int
    decode: Spread
    prefill: float


@dataclass(frozen=True)
class MemorySample:
    """This process at a moment, measured. rows: of the KV cache, the most that have been in use so far."""

    seconds: float
    rss: int
    anonymous: int | None
    file: int | None
    rows: int


@dataclass(frozen=True)
class MemoryBase:
    """What samples are split by. anonymous, file: before the engine was loaded. libraries: file pages that are not
    weights; mapped: whether weights are file pages. kv_at_once: the whole cache takes memory as soon as it is used."""

    anonymous: int
    libraries: int
    mapped: bool
    kv_at_once: bool
    weights: int
    kv: int
    capacity: int


@dataclass(frozen=True)
class Mark:
    """From this moment on, the run did `what`."""

    seconds: float
    what: str


@dataclass(frozen=True)
class Climate:
    """celsius: of the processor. hertz: of its fastest core. allowed: share of the top clock that it may use."""

    seconds: float
    celsius: float | None
    hertz: float | None
    allowed: float | None


@dataclass(frozen=True)
class Timeline:
    """peak: of the resident set. base: None where the system does not tell anonymous pages from file pages."""

    peak: int
    base: MemoryBase | None
    samples: list[MemorySample]
    marks: list[Mark]
    climate: list[Climate]
    sensor: str | None  # what the temperatures are of
    trip: float | None  # °C, where the kernel slows the device down


@dataclass(frozen=True)
class Energy:
    """Where joules come from; kind "estimate": nothing was measured. load: joules of loading."""

    source: str
    kind: MeterKind
    scope: Scope
    load: float

    @property
    def certainty(self) -> Certainty:
        return certainty(self.kind)


@dataclass(frozen=True)
class OperatorTime:
    """All layers together. phase: which part of the model's step it belongs to, the same words in every engine.
    calls, seconds, bytes, flops: of a pass; share: of all operators' seconds. waited: share of all threads' time that
    went by in waiting for each other."""

    name: str
    phase: str
    calls: int
    seconds: float
    share: float
    bytes: int | None
    flops: int | None
    waited: float | None


@dataclass(frozen=True)
class PhaseOperators:
    """Passes of `tokens` tokens with `context` rows in the cache, in an instrumented engine."""

    name: Literal["prefill", "decode"]
    tokens: int
    context: int
    operators: list[OperatorTime]


@dataclass(frozen=True)
class Window:
    """A part of a long run. start: seconds since it began. seconds: that it took. others: as in EngineProfile."""

    start: float
    seconds: float
    per_token: Spread
    joules_per_token: float | None
    celsius: float | None
    hertz: float | None
    others: float | None

    def __post_init__(self) -> None:
        if not _LEAST <= self.seconds <= 1 / _LEAST or not 0 < self.per_token.count <= 1 / _LEAST:
            raise ValueError("a window has tokens and takes time")

    @property
    def tok_s(self) -> float:
        """Tokens by time: a median would not see the slow ones."""
        return self.per_token.count / self.seconds


@dataclass(frozen=True)
class Sustained:
    """A long answer, window after window of `length` seconds."""

    length: float
    windows: list[Window]

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("a long run has windows")

    @property
    def first(self) -> Window:
        return self.windows[0]

    @property
    def last(self) -> Window:
        return self.windows[-1]

    @property
    def ratio(self) -> float:
        """Speed of the last window / speed of the first."""
        return self.last.tok_s / self.first.tok_s

    @property
    def others(self) -> float:
        """The most of all cores' time that other programs took in one of the windows."""
        return max(each.others or 0.0 for each in self.windows)


@dataclass(frozen=True)
class EngineProfile:
    """One engine, in a process of its own. first_load_s: when all was new, with what had
    to be compiled or converted. ttft: seconds from a prompt to its first token, loading left out. curve_end: why the
    curve ends before the contexts that were asked for. notes: what else is not as it was asked for. operators_peak: of
    the instrumented engine's process, bytes resident."""

    engine: str
    versions: dict[str, str]
    plan: Plan
    first_load_s: float
    load_s: float
    ttft: Spread
    prefill: Phase
    decode: Phase
    curve: list[Point]
    curve_end: str | None
    timeline: Timeline
    energy: Energy
    kv_dtypes: list[str]  # that the engine has
    others: float | None  # share of all cores' time that other programs took while prompts and answers were timed
    integers: float = 0.0  # of the weights' bytes, the share that it multiplies as integers, by its best kernels
    operators: list[PhaseOperators] = field(default_factory=list)
    operators_reason: str | None = None  # why there are none
    operators_peak: int | None = None
    sustained: Sustained | None = None
    notes: list[str] = field(default_factory=list)
    on_gpu: bool = False

    def __post_init__(self) -> None:
        if self.plan.config.capacity < 1:
            raise ValueError("a plan has KV rows")

    @property
    def threads(self) -> int:
        return self.plan.config.threads


@dataclass(frozen=True)
class GPUCeiling:
    """read_bytes_per_s: of the GPU from the memory that its buffers are in. host: the driver that ran the kernel."""

    name: str
    host: str
    read_bytes_per_s: float


@dataclass(frozen=True)
class Roofs:
    """What this device can do, measured: bytes read per second, and operations per second. gpu: None where no engine of
    the profile ran on a GPU, or it could not be measured."""

    read_bytes_per_s: float
    f32_flops: float
    int8_ops: float | None
    threads: int
    gpu: GPUCeiling | None = None

    def reading(self, engine: EngineProfile) -> float | None:
        """Bytes per second that the engine may reach; None if unknown."""
        if engine.on_gpu:
            return self.gpu.read_bytes_per_s if self.gpu else None
        return self.read_bytes_per_s

    def computing(self, engine: EngineProfile) -> float | None:
        """Operations per second that the engine may reach, on bytes if it multiplies most weights as integers; None if
        unknown, as of GPUs."""
        if engine.on_gpu:
            return None
        return self.int8_ops if self.int8_ops and engine.integers > 0.5 else self.f32_flops


@dataclass(frozen=True)
class ModelFacts:
    name: str
    label: str
    parameters: int
    weight_bytes: int
    weight_type: str
    context: int


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
    """sentence: the limit for people, with its figures. advice: (why, command) pairs."""

    limit: Limit
    sentence: str
    advice: list[tuple[str, str]]


@dataclass(frozen=True)
class Profile:
    """engines: what `auto` would take is the first. missing: engines that were not measured, and why."""

    date: str
    seconds: float
    quick: bool
    settings: Settings
    device: DeviceFacts
    model: ModelFacts
    roofs: Roofs | None
    engines: list[EngineProfile]
    missing: dict[str, str]
    verdict: Verdict
    versions: dict[str, str]
    kind: str = KIND
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def read_profile(path: Path) -> Profile:
    """Raises InputError for a file that is no profile, or one of another schema."""
    try:
        text = read_regular(path, _MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise InputError(f"{path}: too long for a profile of edge")
        data = json.loads(text.decode("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
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

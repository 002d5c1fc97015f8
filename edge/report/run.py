"""RunReport: what a run did and what it cost. The names are an interface: `schema` 1, see docs/report.md."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1

StopReason = Literal["eos", "length", "stop", "capacity", "interrupted", "time", "memory", "energy", "power", "thermal"]


@dataclass(frozen=True)
class Tokens:
    prompt: int
    generated: int
    reused: int = 0  # of the prompt, whose rows came from the prompt cache


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens per second, measured. None where nothing was measured (no second token, say)."""

    load_s: float
    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    paused_s: float = 0.0  # waited, to hold --power or --max-temp


@dataclass(frozen=True)
class Memory:
    """Bytes. peak_rss, anonymous and file are measured on this process; the others are counted by the plan.

    weights: resident at a time; streamed: read anew from the file by every pass, where they are more than that.
    """

    peak_rss: int
    budget: int | None
    weights: int
    kv: int
    scratch: int
    interpreter: int
    anonymous: int | None
    file: int | None
    streamed: int = 0
    measured: tuple[str, ...] = ("peak_rss", "anonymous", "file")


@dataclass(frozen=True)
class KVUse:
    """The cache at the end of the run. evicted: rows given up so far."""

    policy: str
    capacity: int
    rows: int
    dtype: str
    evicted: int


@dataclass(frozen=True)
class Energy:
    """Joules of this generation: in all, of the prompt, of the answer, and of each of its tokens.

    kind: "counter" (the device counts joules), "integrated" (it tells watts) or "estimate" (nothing is measured).
    samples: distinct values that the sensor showed.
    """

    joules: float
    budget: float | None
    prefill: float | None
    decode: float | None
    per_token: float | None
    source: str
    kind: Literal["counter", "integrated", "estimate"]
    scope: Literal["device", "package", "process"]
    samples: int


@dataclass(frozen=True)
class Heat:
    """highest, limit: °C, measured at `sensor` during this generation."""

    sensor: str
    highest: float | None
    limit: float | None


@dataclass(frozen=True)
class RunReport:
    """One run. `text` is None if the caller asked not to keep it, `heat` where the device shows no temperature."""

    text: str | None
    tokens: Tokens
    timings: Timings
    stop_reason: StopReason
    memory: Memory
    kv: KVUse
    plan: dict[str, Any]
    versions: dict[str, str]
    energy: Energy
    heat: Heat | None = None
    seed: int | None = None
    schema: int = field(default=SCHEMA)

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)

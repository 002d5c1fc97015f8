"""The report of a transcript: what it cost, by the second of sound."""

from __future__ import annotations

from dataclasses import asdict, field
from typing import Any

from edge.errors import IncompleteError, ShortMemoryError
from edge.records import dataclass
from edge.run.report import BUDGETS, SCHEMA, Energy, Heat, Memory, StopReason
from edge.run.speech.segments import clock_of


@dataclass(frozen=True)
class Spoken:
    """Seconds of sound that were heard, and those of them that silence took; seconds of the whole sound, None if it did
    not end. cut: it ended before the length that its header states, or an OGG without its last page."""

    heard_s: float
    silent_s: float
    whole_s: float | None
    cut: bool = False


@dataclass(frozen=True)
class SpeechTimings:
    """Seconds, measured. first_s: until the first text. real_time: seconds of work for a second of sound, without
    pauses and without waiting for a pipe. waited_s: for the sound."""

    load_s: float
    total_s: float
    first_s: float | None
    real_time: float | None
    paused_s: float = 0.0
    waited_s: float = 0.0
    before_s: float = 0.0
    budget_s: float | None = None


@dataclass(frozen=True)
class SpeechReport:
    """The report of a transcript. stop_reason: "eos" at the end of the sound. language: as stated or detected, then
    with its probability. again: windows that were decoded at a higher temperature. joules_per_minute: of sound."""

    text: str | None
    language: str | None
    certainty: float | None
    sound: Spoken
    segments: int
    windows: int
    tokens: int
    again: int
    timings: SpeechTimings
    stop_reason: StopReason
    memory: Memory
    energy: Energy
    joules_per_minute: float | None
    plan: dict[str, Any]
    versions: dict[str, str]
    heat: Heat | None = None
    schema: int = field(default=SCHEMA)

    @property
    def cut(self) -> bool:
        """Whether a budget ended it before the sound did."""
        return self.stop_reason in BUDGETS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_whole(report: SpeechReport, *, kept: bool) -> None:
    """Raise ShortMemoryError or IncompleteError for a transcript that a budget cut. kept: whether the same command goes
    on from there."""
    if not report.cut:
        return
    place, more = clock_of(report.sound.heard_s), "the same command goes on from there" if kept else "state more"
    if report.stop_reason == "memory":
        raise ShortMemoryError(f"the transcript ends at {place}, since memory is short: {more}")
    flag = {"time": "--time is over", "energy": "--energy is spent", "power": "--power cannot be held"}
    why = flag.get(report.stop_reason, "--max-temp cannot be held")
    raise IncompleteError(f"the transcript ends at {place}: {why}, {more}", report.stop_reason, report.text or "")

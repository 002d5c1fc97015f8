"""What a child of `edge profile` is asked to do, and what it answers: one engine, one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge.profiling.profile import EngineProfile, PhaseOperators
from edge.profiling.settings import Settings


@dataclass(frozen=True)
class Job:
    """stage: "load" loads and closes the engine, so that what is made once is there; "measure" is the profile of an
    engine; "operators" uses an instrumented one. measured: before, by "measure"; "operators" goes by it."""

    stage: Literal["load", "measure", "operators"]
    model: str
    engine: str
    settings: Settings
    measured: EngineProfile | None = None


@dataclass(frozen=True)
class Loaded:
    seconds: float


@dataclass(frozen=True)
class Operators:
    """peak: bytes that the process had resident, at most."""

    phases: list[PhaseOperators]
    peak: int

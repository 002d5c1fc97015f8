"""What a child of `edge profile` is asked to do, and what it answers: one engine, one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge.plan import Plan
from edge.profiling.profile import PhaseOperators
from edge.profiling.settings import Settings


@dataclass(frozen=True)
class Job:
    """stage: "load" loads and closes the engine, so that what is made once is there; "measure" is the profile of an
    engine; "operators" uses an instrumented one. plan: of "operators", what was measured."""

    stage: Literal["load", "measure", "operators"]
    model: str
    engine: str
    settings: Settings
    sustained: bool = False
    plan: Plan | None = None


@dataclass(frozen=True)
class Loaded:
    seconds: float


@dataclass(frozen=True)
class Operators:
    phases: list[PhaseOperators]

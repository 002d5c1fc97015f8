"""What a child of `edge profile` is asked to do, and what it answers: one engine, one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edge.plan import PlanRequest
from edge.profiling.profile import PhaseOperators


@dataclass(frozen=True)
class Settings:
    """What is measured. prompt, answer: tokens. contexts: rows of the curve, growing. curve_s: seconds for it.
    sustained_s: seconds, 0: not at all. The rest as in `edge run`."""

    prompt: int
    answer: int
    contexts: list[int]
    repetitions: int
    curve_s: float
    sustained_s: float
    operator_passes: int
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
    def rows(self) -> int:
        """KV rows that all of it needs."""
        return max([self.prompt, *self.contexts]) + self.answer

    def request(self) -> PlanRequest:
        return PlanRequest(
            kv_policy=self.kv_policy,
            sinks=self.sinks,
            max_kv_size=self.max_kv_size,
            kv_memory=self.kv_memory,
            kv_dtype=self.kv_dtype,
            prefill_step_size=self.prefill_step_size,
            threads=self.threads,
            expected_tokens=self.rows,
            provider=self.provider,
        )


@dataclass(frozen=True)
class Job:
    """stage: "load" loads and closes the engine, so that what is made once is there; "measure" is the profile of an
    engine; "operators" uses an instrumented one. plan: of "operators", what was measured."""

    stage: Literal["load", "measure", "operators"]
    model: str
    engine: str
    settings: Settings
    sustained: bool = False
    plan: dict[str, Any] | None = None


@dataclass(frozen=True)
class Loaded:
    seconds: float


@dataclass(frozen=True)
class Operators:
    phases: list[PhaseOperators]

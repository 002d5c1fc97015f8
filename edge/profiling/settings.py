"""What `edge profile` measures, and within which limits."""

from __future__ import annotations

from dataclasses import dataclass

from edge.plan import PlanRequest

LOAD_S = 5.0  # what loading takes the first time, about; compiling takes longer


@dataclass(frozen=True)
class Settings:
    """What is measured. prompt, answer: tokens. contexts: rows of the curve, growing. speed_s, curve_s, operators_s:
    about so many seconds for prompts and answers, the curve, and operators. sustained_s: seconds, 0: not at all.
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
        """About so many seconds for one engine, all in all."""
        return LOAD_S + sum(self.stages_s) + self.operators_s

    @property
    def stages_s(self) -> tuple[float, float, float]:
        """About so many for prompts and answers, for the curve, and for the long run."""
        return self.speed_s, self.curve_s, self.sustained_s

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

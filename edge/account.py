"""The account of one generation while it lasts, and what its report says of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from edge.devices.memory import memory_use
from edge.meters import Watch
from edge.plan import Plan
from edge.report.run import Energy, Memory, StopReason, Timings, Tokens


@dataclass
class Run:
    """Times are seconds on `time.perf_counter`, None until they have come. budget: joules, `before` of them
    spent when it began; time_budget, time_before: seconds likewise."""

    prompt: int
    started: float
    watch: Watch
    budget: float | None = None
    before: float = 0.0
    time_budget: float | None = None
    time_before: float = 0.0
    reused: int = 0
    ran: int = 0  # tokens of the prompt, the last of them at `ran_at`
    generated: int = 0
    prefill_joules: float | None = None
    restored_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ran_at: float | None = None
    text: list[str] | None = field(default_factory=list)
    stop_reason: StopReason = "interrupted"  # what it is if nothing else ends it

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.prompt, self.generated, self.reused, self.ran)

    def timings(self, load_s: float) -> Timings:
        return Timings(
            load_s=load_s,
            ttft_s=_span(self.started, self.first_token_at),
            prefill_tok_s=_rate(self.ran, self.restored_at, self.ran_at),
            decode_tok_s=_rate(self.generated - 1, self.first_token_at, self.last_token_at),
            paused_s=self.watch.paused,
            total_s=time.perf_counter() - self.started,
            before_s=self.time_before,
            budget_s=self.time_budget,
        )

    def energy(self) -> Energy:
        joules, reading = self.watch.joules(), self.watch.reading
        decode = None if self.prefill_joules is None else joules - self.prefill_joules
        return Energy(
            joules=joules,
            budget=self.budget,
            before=self.before,
            prefill=joules if self.prefill_joules is None else self.prefill_joules,
            decode=decode,
            per_token=None if decode is None or not self.generated else decode / self.generated,
            source=reading.source,
            kind=reading.kind,
            scope=reading.scope,
            samples=reading.samples - self.watch.first.samples,
            watts=joules / (time.perf_counter() - self.started),
            watts_limit=self.watch.watts_limit,
        )


def memory_of(plan: Plan, kv_bytes: int, budget: int | None) -> Memory:
    """What this process has now, and what was counted."""
    use, counted = memory_use(), plan.bytes
    return Memory(
        peak_rss=use.peak,
        budget=budget,
        weights=counted.weights,
        kv=kv_bytes,
        scratch=counted.scratch,
        interpreter=counted.interpreter,
        anonymous=use.anonymous,
        file=use.file,
        streamed=counted.streamed,
    )


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    seconds = _span(start, end)
    return count / seconds if seconds and count > 0 else None

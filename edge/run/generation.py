"""One generation: what watches it and makes its text, what it has used so far, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import StringIO
from math import ceil, floor, log10

from edge.backends.base import Engine
from edge.backends.counts import ExpertCounts
from edge.budget import format_joules
from edge.devices.memory import memory_use
from edge.model.prompt import Prompt
from edge.options import Options
from edge.plan.plan import Plan
from edge.run.meters import Watch
from edge.run.report import Energy, ExpertUse, Memory, RunReport, StopReason, Timings, Tokens
from edge.run.sampler import Sampler
from edge.run.stop_strings import StopStrings
from edge.run.thoughts import Thinking
from edge.storage.making import Made

_MOST_AHEAD = 256  # tokens that an engine is asked to choose at once
_IN_VAIN = 4  # one token in this many may be run behind the end of the answer
_MOST_HELD = 0.1  # of the time of decoding; more, and its speed is the caller's rather than the model's
_AMPLE = 1.5  # × the expected cost suffices


@dataclass
class Generation:
    """Times are seconds on `time.perf_counter`, None before the event. budget: joules, of which `before` were spent
    when the generation began; time_budget, time_before: likewise in seconds. prepared: what was made once before."""

    prompt: Prompt
    started: float
    watch: Watch
    sample: Sampler
    thinking: Thinking
    stops: StopStrings
    max_tokens: int | None  # of the answer
    budget: float | None = None
    before: float = 0.0
    time_budget: float | None = None
    time_before: float = 0.0
    prepared: Made = field(default_factory=Made)
    reused: int = 0
    ran: int = 0  # tokens of the prompt, the last of them at `ran_at`
    generated: int = 0
    prefill_joules: float | None = None
    restored_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ran_at: float | None = None
    held: float = 0.0  # seconds that pieces of text stayed with the caller before it asked for the next
    experts: ExpertCounts | None = None  # when it began
    text: StringIO | None = None  # a list of pieces would take ten times the memory
    stop_reason: StopReason = "interrupted"  # unless something else ends it

    def count_prompt(self, count: int) -> None:
        """Tokens of the prompt have been run."""
        self.ran, self.ran_at = self.ran + count, time.perf_counter()

    def time_token(self) -> None:
        """A token of the answer has been chosen."""
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at

    def most_ahead(self) -> int:
        """Tokens that the engine may choose before budgets are asked."""
        left = _MOST_AHEAD if self.max_tokens is None else min(_MOST_AHEAD, self.max_tokens - self.generated)
        return min(self.watch.affordable(left), 1 + self.generated // _IN_VAIN)

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.prompt.known, self.generated, self.reused, self.ran, not self.prompt.ended)

    @property
    def is_typical(self) -> bool:
        """Whether the speed of decoding says something of other runs: a caller that is slow to ask slows it down."""
        decoded = _span(self.first_token_at, self.last_token_at)
        return not decoded or self.held + self.thinking.held <= _MOST_HELD * decoded

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
            prepared_s=self.prepared.seconds,
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
            watts_limit=self.watch.limits.power,
            prepared=self.prepared.joules,
        )


def why_unanswered(report: RunReport, options: Options) -> str:
    """Why a budget left no answer, and an estimate of the budget that would suffice."""
    tokens, timings, energy, reason = report.tokens, report.timings, report.energy, report.stop_reason
    if reason == "time" and timings.budget_s is not None:
        took = timings.before_s + timings.total_s
        why = f"--time {_seconds(timings.budget_s)} was over after {_seconds(took)}"
        why += _needed(report, timings.before_s, timings.prepared_s, timings.total_s, _seconds)
    elif reason == "energy" and energy.budget is not None:
        why = f"--energy {format_joules(energy.budget)} is spent ({energy.certainty})"
        why += _needed(report, energy.before, 0.0, energy.joules, format_joules)
    elif reason == "power":
        why = f"--power {options.power:g}W cannot be held: the device draws {energy.watts:.2g} W ({energy.certainty})"
    elif reason == "thermal" and report.heat and report.heat.highest is not None:
        why = f"--max-temp {options.max_temp:g}C cannot be held: {report.heat.highest:.0f} °C (measured)"
    else:
        why = "memory is short: close other programs, or state a smaller --max-kv-size"
    if tokens.cut:
        return f"stopped in the prompt ({tokens.ran + tokens.reused} of {tokens.prompt_words} tokens): no answer; {why}"
    if report.thoughts is not None:
        return f"stopped after {report.thoughts.tokens} tokens of thoughts: no answer (--think N limits them); {why}"
    return f"stopped before the first token of the answer; {why}"


def _needed(report: RunReport, before: float, once: float, spent: float, words: Callable[[float], str]) -> str:
    """The cost of the start, and a budget that suffices for prompt and answer in the next run: by the prompt's tokens
    that ran, the first of which cost most. once: of `before`, what no later run takes.

    Half as much is added: the last tokens of a budget run one at a time, and no two runs cost the same.
    """
    tokens, start = report.tokens, f", {words(before)} of it by the start" if before else ""
    if report.thoughts:
        return start  # nothing tells how long the model would have thought
    if not tokens.ran:
        least = words(_rounded_up(_AMPLE * (before - once + spent)))
        return f"{start}: state {least} and what the prompt's {tokens.prompt_words} tokens take"
    needed = _AMPLE * (before - once + spent * (tokens.prompt + 1) / tokens.ran)
    beginning = f"for the first {tokens.prompt} tokens " if tokens.unread else ""
    return f"{start}: {beginning}state {words(_rounded_up(needed))} or more (estimated)"


def _rounded_up(value: float) -> float:
    """To two digits, so that no other rounding makes it less."""
    step = 10.0 ** (floor(log10(max(value, 1e-9))) - 1)
    return ceil(value / step) * step


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.2g}s" if seconds >= 0.1 else f"{seconds * 1e3:.2g}ms"


def expert_counts(engine: Engine) -> ExpertCounts | None:
    """A copy of those so far, of an engine that holds some of the experts at a time."""
    found: ExpertCounts | None = getattr(engine, "experts", None)
    return found and replace(found)


def memory_of(
    plan: Plan, kv_bytes: int, options: Options, gpu_used: int | None, with_children: int, experts: ExpertCounts | None
) -> Memory:
    """The measured memory of this process beside the plan's figures. gpu_used: bytes, by the system's word.
    with_children: bytes that this process and a child held together while the model was loaded. experts: of this
    generation."""
    use, counted = memory_use(), plan.bytes
    return Memory(
        peak_rss=max(use.peak, with_children),
        budget=options.memory,
        weights=counted.weights,
        kv=kv_bytes,
        scratch=counted.scratch,
        interpreter=counted.interpreter,
        anonymous=use.anonymous,
        file=use.file,
        streamed=counted.streamed,
        experts=_use_of(experts) if experts else None,
        lora=counted.lora,
        gpu=counted.gpu,
        on_card=counted.on_card,
        gpu_used=gpu_used,
        gpu_budget=options.gpu_memory if counted.gpu else None,
    )


def _use_of(counts: ExpertCounts) -> ExpertUse:
    read = counts.read + counts.read_in_chunks
    return ExpertUse(counts.slots, counts.experts, counts.hit_rate, counts.read_per_token, read)


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    seconds = _span(start, end)
    return count / seconds if seconds and count > 0 else None

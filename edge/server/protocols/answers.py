"""Whole answers, gathered from events, and the figures that go with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any, Literal

from edge.records import dataclass
from edge.run.report import BUDGETS, RunReport, TokenLogprob, ToolCall
from edge.server.events import Ended, Event, Likely, Piece, Scored

Reason = Literal["stop", "length", "tool_calls"]


@dataclass
class Answer:
    """One choice, gathered so far."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    scored: Scored | None = None
    tokens: list[TokenLogprob] = field(default_factory=list)  # of the text
    ended: Ended | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thought(self) -> str:
        return "".join(self.thoughts)

    @property
    def reason(self) -> Reason:
        return reason_of(self.ended)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Complete calls of tools."""
        return self.ended.report.tool_calls if self.ended and self.ended.report else ()


def gather(answers: dict[int, Answer], event: Event) -> None:
    """Add an event to the answer that it belongs to."""
    answer = answers.setdefault(event.choice, Answer())
    if isinstance(event, Piece):
        (answer.thoughts if event.thought else answer.texts).append(event.text)
    elif isinstance(event, Scored):
        answer.scored = event
    elif isinstance(event, Likely):
        if not event.token.thought:
            answer.tokens.append(event.token)
    elif isinstance(event, Ended):
        answer.ended = event


def follow(answers: dict[int, Answer], event: Event) -> None:
    """Add an event that is being sent, of which neither text nor tokens are needed any more."""
    gather(answers, event)
    answer = answers[event.choice]
    for sent in (answer.texts, answer.thoughts, answer.tokens):
        sent.clear()


def reason_of(ended: Ended | None) -> Reason:
    """Why an answer ended, in OpenAI's words: a spent budget is `length`; `usage.edge.stop_reason` tells more."""
    if ended is None or ended.report is None:
        return "stop"
    if ended.report.stop_reason not in ("eos", "stop", "tool_calls"):
        return "length"
    return "tool_calls" if ended.report.tool_calls else "stop"


def reports_of(answers: Iterable[Answer]) -> list[RunReport]:
    """The reports of the answers that have ended with one."""
    return [each.ended.report for each in answers if each.ended and each.ended.report]


def usage_of(answers: Iterable[Answer]) -> dict[str, Any]:
    """Tokens as OpenAI's API counts them, the prompt once for all choices; and their cost, in `edge`."""
    answers = list(answers)
    reports = reports_of(answers)
    prompt = max((each.tokens.prompt - each.tokens.prefix for each in reports), default=0)
    cached = min((each.tokens.reused - each.tokens.prefix for each in reports), default=0)
    scored = [each.scored for each in answers if each.scored]
    prompt += sum(len(each.tokens) - each.generated for each in scored)
    generated = sum(each.tokens.generated for each in reports) + sum(each.generated for each in scored)
    thoughts = sum(each.thoughts.tokens for each in reports if each.thoughts)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": max(0, cached)},
        "completion_tokens_details": {"reasoning_tokens": thoughts},
    }
    if reports:
        found["edge"] = _edge(answers, reports)
    return found


def _edge(answers: list[Answer], reports: list[RunReport]) -> dict[str, Any]:
    last = reports[-1]
    prefix = next((each.ended.prefix for each in answers if each.ended and each.ended.prefix), None)
    return {
        "joules": round(sum(each.energy.joules for each in reports), 6),
        "energy": {"source": last.energy.source, "certainty": last.energy.certainty, "scope": last.energy.scope},
        "seconds": round(sum(each.timings.total_s for each in reports), 4),
        "stop_reason": last.stop_reason,
        "budget": last.stop_reason if last.stop_reason in BUDGETS else None,
        "memory": {"peak": last.memory.peak_rss, "budget": last.memory.budget, "kv": last.memory.kv},
        "kv": {
            "rows": last.kv.rows,
            "capacity": last.kv.capacity,
            "evicted": last.kv.evicted,
            "policy": last.kv.policy,
        },
        "prefix": prefix,
    }


def timings_of(answers: Iterable[Answer]) -> dict[str, Any] | None:
    """The last answer's timings in llama-server's form; None without a report."""
    reports = reports_of(answers)
    if not reports:
        return None
    report = reports[-1]
    tokens, timings = report.tokens, report.timings
    prompt_ms = 1e3 * tokens.ran / timings.prefill_tok_s if timings.prefill_tok_s else 0.0
    predicted_ms = 1e3 * (tokens.generated - 1) / timings.decode_tok_s if timings.decode_tok_s else 0.0
    return {
        "cache_n": tokens.reused,
        "prompt_n": tokens.ran,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / tokens.ran if tokens.ran else 0.0,
        "prompt_per_second": timings.prefill_tok_s or 0.0,
        "predicted_n": tokens.generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(1, tokens.generated),
        "predicted_per_second": timings.decode_tok_s or 0.0,
    }

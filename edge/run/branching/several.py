"""Answers that several generations make: votes and outlines. Their report counts all of them."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Protocol

from edge.errors import BudgetError, UnsupportedError
from edge.model.model import Model
from edge.model.parts.prompt import Prompt
from edge.options import Options
from edge.plan.engines import plan_here
from edge.plan.plan import Plan
from edge.run.hooks import Hooks
from edge.run.report import Branched, BranchUse, RunReport
from edge.run.request import Request

if TYPE_CHECKING:
    from edge.run.branching.branches import Fork


ROOM = 300  # rows of an outline and of a point, beside the answer
MOST_AT_ONCE = 8  # sequences; a pass of more costs nearly as many passes


def side_by_side(model: Model, options: Options, count: int | None, *, all_or_one: bool = False) -> int:
    """The number of sequences to load a model with for so many branches (None: unknown), as many as fit. all_or_one:
    fewer than all are of no use, and all only with rows for `options.expected_tokens`."""
    for sequences in (count or 1,) if all_or_one else (MOST_AT_ONCE, 6, 4, 3, 2):
        if sequences <= max(2, count or MOST_AT_ONCE) and sequences <= MOST_AT_ONCE:
            with suppress(BudgetError, UnsupportedError):
                _, plan = plan_here(model.file, model.spec, replace(options, sequences=sequences))
                if not all_or_one or plan.config.capacity >= (options.expected_tokens or 0):
                    return sequences
    return 1


class Answering(Protocol):
    """The part of a `Session` that answers in branches need."""

    model: Model
    options: Options
    report: RunReport | None

    @property
    def plan(self) -> Plan: ...
    def start(self, request: Request, hooks: Hooks = ...) -> Generator[str, None, None]: ...
    def fork(self, n: int) -> Fork: ...
    def reset(self) -> None: ...


class Spent:
    """The generations of one answer so far, and what they cost."""

    def __init__(self, session: Answering, request: Request) -> None:
        """Takes the session's budgets where the request states none."""
        self.session, self.asked, self.request = session, request, request.within(session.options)
        self.sequences = session.plan.config.sequences
        self._started = time.perf_counter()
        self.reports, self.uses = list[RunReport](), list[BranchUse]()

    @property
    def ended(self) -> bool:
        """Whether a budget or the caller has ended the last generation, and with it the answer."""
        return bool(self.reports) and self.reports[-1].stop_reason not in ("eos", "stop", "length")

    @property
    def left(self) -> int | None:
        """Tokens that the answer may still have beside those generated so far; None: as many as it likes."""
        most, generated = self.request.max_tokens, sum(each.tokens.generated for each in self.reports)
        return None if most is None else max(0, most - generated)

    @property
    def _seconds(self) -> float:
        return self.request.time_spent + time.perf_counter() - self._started

    def share(self, number: int, of: int) -> float | None:
        """The time limit of generation `number` of `of` that begin now, as many side by side as there are sequences:
        those that wait for others have the later parts of what is left of the budget."""
        limit, spent = self.request.time, self._seconds
        part = (number // self.sequences + 1) / ceil(of / self.sequences)
        return None if limit is None else spent + max(0.0, limit - spent) * part

    def part(self, of: int = 1) -> Request:
        """The request of a generation that may use all that is left of the time, and an `of`-th of the energy."""
        request = self.request
        limit, spent = request.energy, request.energy_spent + sum(each.energy.joules for each in self.reports)
        if limit is not None and of > 1:
            limit, spent = max(0.0, limit - spent) / of, 0.0
        return replace(
            request, vote=None, skeleton=False, time_spent=self._seconds, energy=limit, energy_spent=spent,
            keep_text=False,
        )  # fmt: skip

    def add(self, part: str, report: RunReport | None, text: str, votes: int = 0) -> None:
        """Count a generation that has ended; None: it never began."""
        if report is not None:
            self.reports.append(report)
            tokens, energy = report.tokens, report.energy
            self.uses.append(
                BranchUse(part, text, tokens.generated, tokens.ran, energy.joules, report.stop_reason, votes)
            )

    def report(
        self, by: str, text: str, like: RunReport, route: str | None = None, one_piece: str | None = None
    ) -> RunReport:
        """The report of the whole answer, whose other fields are those of the generation `like`."""
        reports, asked = self.reports, self.request
        generated, seconds = sum(each.tokens.generated for each in reports), time.perf_counter() - self._started
        joules = sum(each.energy.joules for each in reports)
        prefill = [each.energy.prefill for each in reports if each.energy.prefill is not None]
        decode = joules - sum(prefill)
        energy = replace(
            like.energy, joules=joules, budget=asked.energy, before=asked.energy_spent, prefill=sum(prefill),
            decode=decode, per_token=decode / generated if generated else None, watts=joules / seconds,
        )  # fmt: skip
        first = reports[0].timings.ttft_s
        pace = generated / (seconds - first) if generated and first is not None and seconds > first else None
        timings = replace(like.timings, ttft_s=first, decode_tok_s=pace, total_s=seconds, before_s=asked.time_spent,
                          budget_s=asked.time)  # fmt: skip
        tokens = replace(like.tokens, generated=generated, ran=sum(each.tokens.ran for each in reports))
        side = min(self.sequences, sum(each.part in ("answer", "point") for each in self.uses))
        branched = Branched("vote" if by == "vote" else "outline", tuple(self.uses), max(1, side), route, one_piece)
        return replace(
            like, text=text if asked.keep_text else None, tokens=tokens, timings=timings, energy=energy,
            memory=reports[-1].memory, branched=branched,
        )  # fmt: skip


def anew(prompt: Prompt) -> Prompt:
    """The same prompt, none of which has been run."""
    return Prompt([prompt.first(None)], prompt.thinks, given=prompt.given)

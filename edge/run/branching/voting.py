"""Votes: several answers are drawn, and the one that most agree on is given.

Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", arXiv:2203.11171, for answers
that are short enough to be compared as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import replace

from edge.errors import BudgetError, EdgeError, InputError
from edge.model.model import Model
from edge.run.branching.several import Spent, anew
from edge.run.hooks import Hooks
from edge.run.reporting import why_unanswered
from edge.run.request import Request
from edge.sampling import SamplingParams

TEMPERATURE = 0.7  # of answers where neither the caller nor the model's file states one, as in the paper
_AROUND = " .,;:!?\"'`*()[]"


def words_of(text: str) -> str:
    """What makes answers equal: their words, without case, spaces and what stands around them."""
    return " ".join(text.casefold().split()).strip(_AROUND)


def drawn(request: Request, model: Model) -> SamplingParams:
    """How a vote draws, with a seed. Raises InputError for temperature 0, which draws one answer over and over."""
    stated = request.sampling
    found = stated if isinstance(stated, SamplingParams) else model.sampling(**(stated or {}))
    if not found.temperature:
        if stated is not None and not (isinstance(stated, Mapping) and stated.get("temperature") is None):
            raise InputError("--vote draws different answers: state a --temp above 0, or none")
        found = replace(found, temperature=TEMPERATURE)
    return found.with_seed()


def vote(spent: Spent, hooks: Hooks) -> Generator[str, None, None]:
    """Yield the answer that most of `request.vote` agree on, in one piece; of several, the one that was drawn first.
    The others end as soon as they cannot change it. Raises what a single answer raises, if none ends with one."""
    session, count = spent.session, spent.request.vote or 1
    sampling = drawn(spent.request, session.model)
    request = spent.part(count)
    asked = request.encode(session.model)
    with session.fork(count) as fork:
        streams, thoughts = [], [list[str]() for _ in fork]
        for number, branch in enumerate(fork):
            own = replace(sampling, seed=((sampling.seed or 0) + number) % 2**64)
            shown = Hooks(prefill=None if number else hooks.prefill, thought=thoughts[number].append)
            streams.append(branch.start(replace(request, prompt=anew(asked), sampling=own), shown))
        texts: dict[int, str] = {}
        failed: Exception | None = None
        while fork.batch.step():
            for number, stream in enumerate(streams):
                if stream.ticket.pause or number in texts:
                    continue
                try:
                    texts[number] = "".join(stream)
                except (EdgeError, InterruptedError) as error:
                    texts[number], failed = "", failed or error
            most = [each for _, each in Counter(filter(None, map(words_of, texts.values()))).most_common(2)]
            if most and most[0] - sum(most[1:2]) > count - len(texts):
                for stream in streams:
                    stream.close()
        votes = Counter(filter(None, map(words_of, texts.values())))
        for number, stream in enumerate(streams):
            text = texts.get(number, "")
            spent.add("answer", stream.report, text, votes[words_of(text)])
        chosen = max(sorted(texts), key=lambda number: votes[words_of(texts[number])], default=None)
        report = None if chosen is None else streams[chosen].report
        if chosen is None or report is None:
            raise failed or InputError("no answer of the vote began")
        tokens = replace(report.tokens, prompt=asked.first(None).size)
        session.report = spent.report("vote", texts[chosen], replace(report, tokens=tokens, seed=sampling.seed))
        if failed and not texts[chosen]:
            if isinstance(failed, BudgetError):  # of one answer, by its part of the budget
                why, budget = why_unanswered(session.report, session.options), session.report.stop_reason
                raise BudgetError(why, param=spent.asked.stated(budget)) from None
            raise failed
        if hooks.thought:
            for thought in thoughts[chosen]:
                hooks.thought(thought)
        after = fork.after(asked, texts[chosen]) if fork[chosen].tokens is None else None  # its rows were evicted
        fork.join(fork[chosen], after)
    yield texts[chosen]

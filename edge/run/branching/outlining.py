"""Outlines: an answer's points are listed first, and then written out side by side.

Ning et al., "Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation", arXiv:2307.15337. The model is
asked first whether the question has independent points (their router); the texts of the prompts are our own.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from edge.errors import BudgetError, UnsupportedError
from edge.model.chat.thinking import Think
from edge.run.batching.stream import Stream
from edge.run.branching.branches import Branch, Fork
from edge.run.branching.several import Spent
from edge.run.hooks import Hooks
from edge.run.report import StopReason
from edge.types import FloatArray, IntArray

ROUTES = ("points", "steps", "text")
_ROUTER = """Which form does the best answer to this question have?
A: a list of points that do not depend on each other
B: steps, calculations or code, of which each needs the ones before
C: a word, a sentence or a story
Say only the letter.

Question: """
_OUTLINE = (
    "\n\nDo not answer yet. Write only the outline of the answer: a numbered list of 3 to 6 points, 3 to 5 words each."
)
_POINT = (
    "Now write out one point of your outline in one or two sentences, without repeating it, and nothing else: point "
)
_LIST = re.compile(r"^\s*\d+[.)]\s+(\S.*)$", re.MULTILINE)
_MOST_POINTS, _LEAST_POINTS, _LONGEST_POINT = 8, 2, 80
_OUTLINE_TOKENS, _POINT_TOKENS, _LEAST_TOKENS = 120, 120, 8  # at most; of a point at least
_MARGIN = 8  # rows around a point's text


def points_of(outline: str) -> list[str]:
    """The points of a numbered list, each once, without what explains them."""
    found: dict[str, str] = {}
    for line in _LIST.findall(outline):
        point = re.split(r":(?:\s|$)|\s[–—-]\s", line.replace("**", ""), maxsplit=1)[0].strip(" .,;:")
        if point and len(point) <= _LONGEST_POINT:
            found.setdefault(point.casefold(), point)
    return [*found.values()][:_MOST_POINTS]


def outline(spent: Spent, hooks: Hooks) -> Generator[str, None, None]:
    """Yield the answer's points in their order, each as it is written; or an answer in one piece, where the model says
    that the question has no independent points, or writes fewer than two that `max_tokens` has room for.

    However it ends, the conversation goes on with the question and the text so far, or, if it was interrupted before
    that, is what it was. A budget that ends before the text is told as of an answer in one piece.
    """
    session, model = spent.session, spent.session.model
    if model.template is None:
        raise UnsupportedError(f"{model.name} has no chat template, and --outline asks it for an outline")
    prompt = spent.request.prompt
    question = prompt if isinstance(prompt, str) else None
    if question is None:
        raise UnsupportedError("--outline takes a question of text")
    spent.request, route = replace(spent.request, think=model.template.nearest(Think.parse(False))), None
    tokens, rows = spent.request.max_tokens, session.plan.config.capacity
    narrow = f"{rows} KV rows have no room for its points"
    with session.fork(1) as fork:
        fits = _room(spent, fork.tokens, _ROUTER + question) >= 1
        if fits and spent.request.skeleton != "always":
            route = _route(spent, fork[0], question)
    why = narrow if not fits else None if route in (None, "points") else f"it needs {route}"
    if why is None and not spent.ended:
        with session.fork(1) as fork:
            room = _room(spent, fork.tokens, question + _OUTLINE)
            points = _skeleton(spent, fork[0], question, hooks, room) if room >= _LEAST_TOKENS else []
            fit = points if spent.left is None else points[: spent.left // _LEAST_TOKENS]
            known, longest = fork[0].tokens, max([*fit, ""], key=len)
            room = 0 if known is None else _room(spent, known, f"{_POINT}0. {longest}") - len(longest) - _MARGIN
            if len(fit) >= _LEAST_POINTS and room >= _LEAST_TOKENS and not spent.ended:
                cut = len(fit) < len(points)
                yield from _written_out(spent, fork, question, fit, route, hooks, cut=cut, room=room)
                return
            if len(points) >= _LEAST_POINTS:
                why = narrow if len(fit) >= _LEAST_POINTS else f"-n {tokens} has no room for its points"
            else:
                why = "the outline has no two points" if spent.reports else narrow
    if spent.reports and spent.reports[-1].stop_reason == "interrupted":
        session.report = spent.report("outline", "", spent.reports[-1], route)
        return
    yield from _in_one_piece(spent, route, hooks, why)


def _room(spent: Spent, known: IntArray, prompt: str) -> int:
    """The rows that a prompt behind `known` tokens leaves to an answer."""
    asked = replace(spent.part(), prompt=prompt, follow_up=known.size > 0).encode(spent.session.model)
    return spent.session.plan.config.capacity - known.size - asked.first(None).size


def _route(spent: Spent, branch: Branch, question: str) -> str:
    """What the question needs: the likeliest of the letters that the model may answer."""
    encode = spent.session.model.tokenizer.encode
    letters = [{int(encode(f"{space}{letter}", start=False)[-1]) for space in ("", " ")} for letter in "ABC"]
    chosen = list[int]()

    def look(_: IntArray, logits: FloatArray) -> FloatArray:
        chosen.append(int(np.argmax([max(logits[token] for token in each) for each in letters])))
        return logits

    request = replace(spent.part(), prompt=_ROUTER + question, max_tokens=1, logits_processor=look)
    _read(spent, "route", branch.start(request, Hooks()))
    return ROUTES[chosen[0]] if chosen else ROUTES[-1]


def _skeleton(spent: Spent, branch: Branch, question: str, hooks: Hooks, room: int) -> list[str]:
    """Have the outline written, of `room` tokens at most. Returns its points."""
    part = spent.part()
    most = min(part.max_tokens or _OUTLINE_TOKENS, _OUTLINE_TOKENS, room)
    request = replace(part, prompt=question + _OUTLINE, max_tokens=most, stop=("\n\n",))
    return points_of(_read(spent, "outline", branch.start(request, Hooks(hooks.prefill, hooks.thought), "1."), "1."))


def _read(spent: Spent, part: str, stream: Stream, text: str = "") -> str:
    """The text of a generation, which a budget may end; counts it. text: with which it begins."""
    with suppress(BudgetError):
        text += "".join(stream)
    spent.add(part, stream.report, text)
    return text


def _in_one_piece(spent: Spent, route: str | None, hooks: Hooks, why: str | None) -> Generator[str, None, None]:
    session, texts, before = spent.session, list[str](), spent.session.report
    pieces = session.start(spent.part(), hooks)
    try:
        for piece in pieces:
            texts.append(piece)
            yield piece
    finally:
        pieces.close()
        if session.report is not None and session.report is not before:  # it ran
            spent.add("answer", session.report, "".join(texts))
            session.report = spent.report("outline", "".join(texts), session.report, route, why)


def _written_out(
    spent: Spent, fork: Fork, question: str, points: Sequence[str], route: str | None, hooks: Hooks, *, cut: bool,
    room: int,
) -> Generator[str, None, None]:  # fmt: skip
    """Write the points out side by side, behind the outline of the fork's first branch. The conversation goes on with
    question and answer. cut: whether there are more points. room: tokens of each, at most."""
    session, texts, streams, like = spent.session, list[str](), list[Stream](), spent.reports[-1]
    heads = [f"{at}. {point}:" for at, point in enumerate(points, 1)]
    thoughts = [deque[str]() for _ in points]
    part = spent.part(len(points))
    unbegun: StopReason = "interrupted"
    most = min(_POINT_TOKENS, room, room if spent.left is None else spent.left // len(points))
    try:
        for number, (head, own) in enumerate(zip(heads, thoughts, strict=True)):
            request = replace(
                part, prompt=f"{_POINT}{head[:-1]}", follow_up=True, max_tokens=most, stop=("\n",),
                time=spent.share(number, len(points)),
            )  # fmt: skip
            streams.append(Branch(fork, fork[0].tokens).start(request, Hooks(thought=own.append), head))
        for stream, head, own in zip(streams, heads, thoughts, strict=True):
            texts.append(head if not texts else f"\n{head}")
            yield texts[-1]
            try:
                for piece in stream:
                    while own and hooks.thought:
                        hooks.thought(own.popleft())
                    texts[-1] += piece
                    yield piece
            except BudgetError:  # before its first token
                unbegun = "time"
            except InterruptedError:
                unbegun = "interrupted"
    finally:
        if texts:
            ends = list[StopReason]()
            for number, (stream, head) in enumerate(zip(streams, heads, strict=True)):
                stream.close()
                text = "".join(texts[number : number + 1]).lstrip("\n")
                spent.add("point", stream.report, text.removeprefix(head).strip())
                ends.append(stream.report.stop_reason if stream.report else unbegun)
            reason = next((each for each in ends if each not in ("eos", "stop")), "length" if cut else "stop")
            session.report = spent.report("outline", "".join(texts), replace(like, stop_reason=reason), route)
            asked = replace(spent.request, prompt=question).encode(session.model)
            fork.join(fork[0], fork.after(asked, "".join(texts)))

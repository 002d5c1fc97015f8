"""Outlines: an answer's points are listed first, and then written out side by side.

Ning et al., "Skeleton-of-Thought: Prompting LLMs for Efficient Parallel Generation", arXiv:2307.15337. The model is
asked first whether the question has independent points (their router); the texts of the prompts are our own.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np

from edge.errors import UnsupportedError
from edge.model.chat.thinking import Think
from edge.run.branching.branches import tokens_of
from edge.run.branching.several import Spent, anew
from edge.run.hooks import Hooks
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
_OUTLINE_TOKENS, _POINT_TOKENS = 120, 120  # at most


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
    that the question has no independent points, or writes fewer than two."""
    session, model = spent.session, spent.session.model
    if model.template is None:
        raise UnsupportedError(f"{model.name} has no chat template, and --outline asks it for an outline")
    prompt = spent.request.prompt
    question = prompt if isinstance(prompt, str) else None
    if question is None:
        raise UnsupportedError("--outline takes a question of text")
    spent.request = replace(spent.request, think=model.template.nearest(Think.parse(False)))
    before, route, points = session.mark(hold=True), None, list[str]()
    with session.fork(1) as fork:
        known = fork.tokens
    if spent.request.skeleton != "always":
        route = _route(spent, question)
        session.rewind(before)
    if route in (None, "points") and not spent.ended:
        points = _skeleton(spent, question, hooks)
    if len(points) < _LEAST_POINTS:
        session.rewind(before)
        texts = list[str]()
        for piece in session.start(spent.part(), hooks):
            texts.append(piece)
            yield piece
        assert session.report is not None
        spent.add("answer", session.report, "".join(texts))
        session.report = spent.report("outline", "".join(texts), session.report, route)
        return
    if not spent.ended:
        yield from _written_out(spent, question, points, route, known)


def _route(spent: Spent, question: str) -> str:
    """What the question needs: the likeliest of the letters that the model may answer."""
    session, encode = spent.session, spent.session.model.tokenizer.encode
    letters = [{int(encode(f"{space}{letter}", start=False)[-1]) for space in ("", " ")} for letter in "ABC"]
    chosen = list[int]()

    def look(_: IntArray, logits: FloatArray) -> FloatArray:
        chosen.append(int(np.argmax([max(logits[token] for token in each) for each in letters])))
        return logits

    request = replace(spent.part(), prompt=_ROUTER + question, max_tokens=1, logits_processor=look)
    text = "".join(session.start(request))
    spent.add("route", session.report, text)
    return ROUTES[chosen[0]] if chosen else ROUTES[-1]


def _skeleton(spent: Spent, question: str, hooks: Hooks) -> list[str]:
    """Have the outline written. Returns its points."""
    session, part = spent.session, spent.part()
    asked = replace(part, prompt=question + _OUTLINE).encode(session.model)
    most = min(part.max_tokens or _OUTLINE_TOKENS, _OUTLINE_TOKENS)
    request = replace(part, prompt=anew(asked, tokens_of(session.model, "1.")), max_tokens=most, stop=("\n\n",))
    text = "1." + "".join(session.start(request, Hooks(hooks.prefill)))
    spent.add("outline", session.report, text)
    return points_of(text)


def _written_out(
    spent: Spent, question: str, points: Sequence[str], route: str | None, known: IntArray
) -> Generator[str, None, None]:
    """Write the points out side by side, behind the outline with which the conversation ends. known: the tokens of the
    conversation before, which goes on with question and answer."""
    session, texts, heads = spent.session, list[str](), [f"{at}. {point}:" for at, point in enumerate(points, 1)]
    part = spent.part(len(points))
    most = min(_POINT_TOKENS, max(8, (part.max_tokens or _POINT_TOKENS * len(points)) // len(points)))
    with session.fork(len(points)) as fork:
        streams = [
            branch.start(
                replace(part, prompt=f"{_POINT}{head[:-1]}", follow_up=True, max_tokens=most, stop=("\n",)), Hooks(),
                head,
            )
            for branch, head in zip(fork, heads, strict=True)
        ]  # fmt: skip
        for stream, head in zip(streams, heads, strict=True):
            texts.append(head if not texts else f"\n{head}")
            yield texts[-1]
            for piece in stream:
                texts[-1] += piece
                yield piece
        for stream, text, head in zip(streams, texts, heads, strict=True):
            spent.add("point", stream.report, text.lstrip("\n").removeprefix(head).strip())
        answered = [known, replace(spent.request, prompt=question).encode(session.model).first(None)]
        answered.append(tokens_of(session.model, "".join(texts)))
        fork.join(np.concatenate(answered))
    assert session.report is not None
    reasons = [each.stop_reason for each in spent.reports if each.stop_reason not in ("eos", "stop")]
    last = replace(session.report, stop_reason=(*reasons, "stop")[0])
    session.report = spent.report("outline", "".join(texts), last, route)

"""A prompt of passages: numbered, the most relevant first, as many as there is room for, the question last.

A prompt whose beginning is the same takes its rows from the prompt cache: instructions and passages come first, and
what differs between two questions last.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge.documents.pruning import part_that_fits
from edge.documents.searching import Found
from edge.documents.sentences import Count, sentences
from edge.run.grounding import Grounded
from edge.run.report import Cited

_BEGIN = "Answer the question by the passages below, and name the number of the passage that says so, such as [1].\n\n"
_END = "Question: {}"
_LEAST = 24  # tokens of a passage that is worth its place


def pack(question: str, found: Sequence[Found], count: Count, room: int) -> Grounded:
    """The prompt of a question with passages. count: the model's tokens of a text. room: tokens of the whole prompt.

    Passages that do not fit are left out; if not even the first one fits, it loses its last sentences.
    """
    left = room - count(_BEGIN) - count(_END.format(question))
    texts, sources = list[str](), list[Cited]()
    for each in found:
        head, body = f"[{len(texts) + 1}] {each.passage.label}\n", each.passage.text
        size = count(f"{head}{body}\n\n")
        if size > left and not texts:
            body = _cut(body, count, left - count(f"{head}\n\n"))
            size = count(f"{head}{body}\n\n")
        if not body or size > left:
            continue
        texts.append(f"{head}{body}\n\n")
        left -= size
        sources.append(source_of(len(texts), each, body))
    if not texts:
        return Grounded(question, ())
    return Grounded(_BEGIN + "".join(texts) + _END.format(question), tuple(sources))


def fitting(question: str, found: Sequence[Found], count: Count, room: int) -> float:
    """The part of passages, from LEAST to 1, for which there is room beside the question."""
    around = (
        count(_BEGIN) + count(_END.format(question)) + sum(count(f"[1] {each.passage.label}\n\n\n") for each in found)
    )
    whole = sum(count(each.passage.text) for each in found)
    return part_that_fits(whole, room - around)


def source_of(number: int, found: Found, text: str) -> Cited:
    """A passage as the report has it."""
    passage = found.passage
    return Cited(
        number, passage.title, passage.heading, passage.file, passage.place, passage.unit, text, round(found.score, 6),
        found.words, found.vectors, found.relevance,
    )  # fmt: skip


def _cut(text: str, count: Count, room: int) -> str:
    """The first sentences of a text, as many as fit; none if that is too few."""
    kept, left = list[str](), room
    for sentence in sentences(text):
        left -= count(sentence)
        if left < 0:
            break
        kept.append(sentence)
    return "".join(kept).rstrip() if kept and room >= _LEAST else ""

"""Passages of a document: 200 to 400 tokens that end with a sentence, under the headings that they stand below."""

from __future__ import annotations

from collections.abc import Iterator

from edge.documents.reading import Block, Document
from edge.documents.sentences import Count, sentences
from edge.records import dataclass

MOST = 400  # tokens of a passage
_LEAST, _GOOD = 1 / 2, 3 / 4  # of that: from there on a passage ends with its section, or with a paragraph
_DEEPEST = 2  # headings above a passage that are kept


@dataclass(frozen=True)
class Passage:
    """A part of a document. heading: those above it, the nearest two. place: its first line or page. tokens: of its
    text."""

    text: str
    heading: str
    place: int
    tokens: int


def split(document: Document, count: Count, most: int = MOST) -> Iterator[Passage]:
    """Yield the passages of a document, in order. count: the tokens of a text. most: tokens of a passage."""
    open_, headings = _Open(), list[tuple[int, str]]()
    for block in document.blocks:
        if block.level:
            if open_.tokens >= _LEAST * most:
                yield from open_.end()
            headings = [each for each in headings if each[0] < block.level]
            headings.append((block.level, block.text))
            open_.below = " › ".join([text for _, text in headings if text != document.title][-_DEEPEST:])
            if open_.parts:
                open_.add(f"\n\n{block.text}", count(block.text), block.place)
            continue
        if open_.tokens >= _GOOD * most:
            yield from open_.end()
        before = "\n\n"
        for piece, size, lines in _pieces(block, count, most):
            if open_.tokens + size > most:
                yield from open_.end()
            open_.add(before + piece, size, block.place + (lines if document.unit == "line" else 0))
            before = ""
    yield from open_.end()


class _Open:
    """The passage that is being filled."""

    def __init__(self) -> None:
        self.below = ""  # the headings so far
        self.parts, self.tokens, self._place, self._heading = list[str](), 0, 0, ""

    def add(self, text: str, size: int, place: int) -> None:
        if not self.parts:
            self._place, self._heading = place, self.below
        self.parts.append(text)
        self.tokens += size

    def end(self) -> Iterator[Passage]:
        """The passage, if there is one; the next begins empty."""
        text = "".join(self.parts).strip("\n").rstrip()
        if text.strip():
            yield Passage(text, self._heading, self._place, self.tokens)
        self.parts, self.tokens = [], 0


def _pieces(block: Block, count: Count, most: int) -> Iterator[tuple[str, int, int]]:
    """Sentences or lines of a block, each with its tokens and the lines before it; those of more than `most` tokens in
    parts."""
    lines = 0
    for piece in block.text.splitlines(keepends=True) if block.verbatim else sentences(block.text):
        size = count(piece)
        if size <= most:
            yield piece, size, lines
        else:
            for part in _cut(piece, count, most):
                yield part, count(part), lines
        lines += piece.count("\n")


def _cut(text: str, count: Count, most: int) -> Iterator[str]:
    """Parts of a long text, at line ends, else at blanks, else anywhere."""
    if count(text) <= most:
        yield text
        return
    half = len(text) // 2
    at = max(text.rfind("\n", 1, half), -1) + 1 or text.rfind(" ", 1, half) + 1 or half
    if at < half // 4:  # a short beginning would leave the rest as long as it was
        at = text.rfind(" ", 1, half) + 1 or half
    yield from _cut(text[:at], count, most)
    yield from _cut(text[at:], count, most)

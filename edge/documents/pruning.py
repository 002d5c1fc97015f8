"""Shorter texts before a question: whole sentences leave, those that say least about it, and the rest keeps its order.

Code never leaves, nor does a sentence with a number of the question, or with a name: a word that is written in capitals
there, or is no plain word, such as /etc/fstab. Sentences are ranked by BM25 (Robertson and Zaragoza, "The Probabilistic
Relevance Framework", 2009), with each sentence as a document, and a part of its better neighbour's score, since an
answer often stands beside the sentence that names its subject. Ranks by an encoder or a reranker are joined with those
of BM25 by reciprocal ranks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from edge.documents.searching import DAMPING
from edge.documents.sentences import Count, sentences
from edge.documents.words import said_words, stem
from edge.errors import InputError
from edge.records import dataclass
from edge.run.report import Pruned
from edge.run.session import Session

AUTO = "auto"
LEAST = 0.1  # of a text that stays
_K1, _B = 1.2, 0.75  # of BM25
_NEAR = 0.5  # of a neighbour's score
_CODE_LINE = re.compile(r"(?: {4}|\t|[$#>%] )")
_CODE_SIGNS = re.compile(r"[=;{}|\\<>$#\[\]_/]")
_SIGNS = 0.08  # of the characters of code, at least
_FENCE = re.compile(r"(^ {0,3}```.*?^ {0,3}```[^\n]*$)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"[A-Z]\w*|\w*[/._-]\w[\w/._-]*|\w*\d\w*")

Score = Callable[[Sequence[str]], Sequence[float]]  # of sentences


@dataclass(frozen=True)
class _Piece:
    text: str
    size: int  # tokens
    stays: bool


def parse_prune(value: object) -> float | str | None:
    """The part of a text that stays, or "auto". Raises InputError."""
    if value is None or value == AUTO:
        return AUTO if value else None
    try:
        part = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        part = math.nan
    if not LEAST <= part <= 1:
        raise InputError(f"--prune must be auto or a part from {LEAST} to 1, such as 0.4, not {value!r:.40}")
    return part


def part_that_fits(tokens: int, room: int) -> float:
    """The share of a text of `tokens` tokens, from LEAST to 1, for which there is room."""
    return min(1.0, max(LEAST, room / max(1, tokens)))


def prune_texts(
    texts: Sequence[str], question: str, keep: float, count: Count, score: Score | None = None, by: str = "BM25"
) -> tuple[list[str], Pruned]:
    """The texts with the sentences that stay, and what left. keep: the part of their tokens, at most; the best sentence
    stays even if it has more, so that less than a sentence more leaves than was asked for. score: the relevance of
    sentences to the question, beside that of BM25. by: what ranked them, for the report."""
    names = _names(question)
    pieces = [list(_pieces(text, names, count)) for text in texts]
    every = [(number, at) for number, some in enumerate(pieces) for at in range(len(some))]
    before = after = sum(piece.size for some in pieces for piece in some)
    loose = [each for each in every if not pieces[each[0]][each[1]].stays]
    gone = set[tuple[int, int]]()
    if loose and after > keep * before:
        said = [pieces[number][at].text.strip() for number, at in loose]
        scores = bm25(said, question)
        if score is None:
            scores = _beside(scores, [number for number, _ in loose])
        else:
            scores = [sum(each) for each in zip(*map(_reciprocal, (scores, score(said))), strict=True)]
        order = sorted(zip(scores, loose, strict=True), key=lambda pair: (pair[0], -pair[1][0], -pair[1][1]))
        for _, each in order[:-1]:  # the best sentence stays, however long
            if after <= keep * before:
                break
            gone.add(each)
            after -= pieces[each[0]][each[1]].size
    kept = [
        "".join(piece.text for at, piece in enumerate(some) if (number, at) not in gone).strip("\n").rstrip()
        for number, some in enumerate(pieces)
    ]
    left = tuple(pieces[number][at].text.strip() for number, at in sorted(gone))
    return kept, Pruned(before, after, left, by)


def ranked_by(session: Session, question: str) -> Score:
    """Scores of sentences by a loaded encoder or reranker."""
    return lambda said: [float(each) for each in session.rank(question, said)]


def bm25(documents: Sequence[str], question: str) -> list[float]:
    """The score of each document for the words of a question."""
    counts = [Counter(_words(each)) for each in documents]
    mean = sum(each.total() for each in counts) / max(1, len(counts)) or 1.0
    scores = [0.0] * len(documents)
    for word in set(_words(question)):
        having = sum(word in each for each in counts)
        rarity = math.log(1 + (len(counts) - having + 0.5) / (having + 0.5))
        for number, each in enumerate(counts):
            if often := each[word]:
                scores[number] += rarity * often * (_K1 + 1) / (often + _K1 * (1 - _B + _B * each.total() / mean))
    return scores


def _beside(scores: Sequence[float], texts: Sequence[int]) -> list[float]:
    """Scores, each with a part of its better neighbour's in the same text. texts: the number of each one's."""
    places = range(len(scores))
    near = [
        [scores[other] for other in (at - 1, at + 1) if other in places and texts[other] == texts[at]] for at in places
    ]
    return [score + _NEAR * max(others, default=0.0) for score, others in zip(scores, near, strict=True)]


def _reciprocal(scores: Sequence[float]) -> list[float]:
    """1 / (60 + rank) of each score; equal scores have the same rank."""
    ranks = dict[float, int]()
    for rank, score in enumerate(sorted(scores, reverse=True), 1):
        ranks.setdefault(score, rank)
    return [1 / (DAMPING + ranks[score]) for score in scores]


def _words(text: str) -> list[str]:
    return [stem(word) for word in said_words(text)]


def _names(question: str) -> frozenset[str]:
    """Names and numbers of a question, lowercase; a word at the beginning of a sentence is none for its capital."""
    found = set[str]()
    for sentence in sentences(question):
        first, *others = re.findall(r"[\w/.-]*\w", sentence) or [""]
        found.update(each.lower() for each in others if _NAME.fullmatch(each) and len(each) > 1)
        if re.search(r"[\d/._]", first):
            found.add(first.lower())
    return frozenset(found)


def _pieces(text: str, names: frozenset[str], count: Count) -> Iterator[_Piece]:
    """Sentences and pieces of code, which joined are the text."""
    for number, part in enumerate(_FENCE.split(text)):
        for paragraph in [part] if number % 2 else re.findall(r".+?(?:\n\s*\n|\Z)|\n+", part, re.DOTALL):
            if number % 2 or _is_code(paragraph):
                yield _Piece(paragraph, count(paragraph), True)
                continue
            for each in sentences(paragraph):
                words = {word.lower() for word in re.findall(r"[\w/.-]*\w", each)}
                yield _Piece(each, count(each), not each.strip() or bool(words & names))


def _is_code(paragraph: str) -> bool:
    lines = [line for line in paragraph.split("\n") if line.strip()]
    if not lines:
        return False
    marked = sum(_CODE_LINE.match(line) is not None for line in lines)
    return 2 * marked >= len(lines) or len(_CODE_SIGNS.findall(paragraph)) > _SIGNS * len(paragraph)

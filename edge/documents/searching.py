"""Search by words, by vectors, and by both.

Words are ranked by FTS5's BM25, vectors by their cosine with the question's. Both lists are joined by reciprocal ranks:
a passage has the score Σ 1 / (60 + rank) over the lists that have it (Cormack, Clarke and Büttcher, "Reciprocal Rank
Fusion outperforms Condorcet and individual Rank Learning Methods", SIGIR 2009). All vectors are compared, in blocks,
which bounds the memory; of more than 100,000, those that a graph finds (nearest.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from edge.documents.nearest import candidates
from edge.documents.store import Store, Stored
from edge.documents.words import said_words
from edge.errors import InputError
from edge.records import dataclass
from edge.run.sequences.ranking import ranked
from edge.run.session import Session
from edge.types import FloatArray

By = Literal["both", "words", "vectors"]

CANDIDATES = 50  # of each list
RERANKED = 20  # candidates that a reranker reads
DAMPING = 60  # of reciprocal ranks
_BLOCK = 4096  # vectors that are compared at once
_MOST_WORDS = 64


@dataclass(frozen=True)
class Found:
    """A passage, and why it was found. words, vectors: its rank in each list, from 1. relevance: a reranker's."""

    passage: Stored
    score: float
    words: int | None = None
    vectors: int | None = None
    relevance: float | None = None


def check_by(by: object) -> By:
    """Raise InputError for an unknown way to search."""
    for known in get_args(By):
        if by == known:
            return known  # type: ignore[no-any-return]
    raise InputError(f"--by must be one of {', '.join(get_args(By))}, not {by!r:.40}")


def search(store: Store, question: str, vector: FloatArray | None, *, most: int) -> list[Found]:
    """The passages of an index that fit a question best, the best first. vector: the question's; None: by words alone;
    an empty question: by vectors alone."""
    lists = {"words": by_words(store, question), "vectors": [] if vector is None else by_vectors(store, vector)}
    ranks = {name: {each: rank for rank, each in enumerate(ids, 1)} for name, ids in lists.items()}
    scores = join(list(lists.values()))
    order = sorted(scores, key=lambda each: (-scores[each], each))[:most]
    return [
        Found(each, scores[each.id], ranks["words"].get(each.id), ranks["vectors"].get(each.id))
        for each in store.passages(order)
    ]


def join(lists: Sequence[Sequence[int]]) -> dict[int, float]:
    """Scores of ids by reciprocal ranks. lists: ids, the best first."""
    scores = dict[int, float]()
    for ids in lists:
        for rank, each in enumerate(ids, 1):
            scores[each] = scores.get(each, 0.0) + 1 / (DAMPING + rank)
    return scores


def by_words(store: Store, question: str, most: int = CANDIDATES) -> list[int]:
    """Ids of the passages that have words of the question, the best first."""
    words = list(dict.fromkeys(said_words(question)))[:_MOST_WORDS]
    return store.find_words(" OR ".join(f'"{word}"' for word in words), most) if words else []


def by_vectors(store: Store, vector: FloatArray, most: int = CANDIDATES) -> list[int]:
    """Ids of the passages whose vectors are nearest, the best first. vector: float32 [size]."""
    best_ids, best = np.empty(0, np.int64), np.empty(0, np.float32)
    for ids, scales, codes in store.vectors(vector.size, _BLOCK, candidates(store, vector, most)):
        best_ids = np.concatenate([best_ids, ids])
        best = np.concatenate([best, (codes.astype(np.float32) @ vector) * scales])
        order = np.lexsort((best_ids, -best))[:most]
        best_ids, best = best_ids[order], best[order]
    return [int(each) for each in best_ids]


def rerank(session: Session, question: str, found: Sequence[Found]) -> list[Found]:
    """The passages in the order of a reranker, which reads each together with the question."""
    scores = session.rank(question, [each.passage.titled for each in found])
    return [replace(found[number], relevance=round(score, 6)) for number, score in ranked(scores)]

"""Beam search over a window's text, as `BeamSearchDecoder` of openai-whisper does it.

Where there is a sequence for each beam, they run in common passes. With one KV cache, of each beam only the tokens
behind those that it shares with the last one run again, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge.errors import InputError
from edge.records import dataclass
from edge.types import FloatArray

Tokens = tuple[int, ...]
_Score = tuple[float, tuple[float, ...]]  # of a text: the sum of its tokens' log-probabilities, and each


@dataclass(frozen=True)
class Beams:
    """size: texts that are searched at temperature 0; 1: the likeliest token is taken. best_of: texts that are drawn at
    higher temperatures. patience: the search ends with as many finished texts as size times this. length_penalty:
    alpha of Google's GNMT, by which texts of different lengths are compared; None: by the mean log-probability."""

    size: int = 1
    best_of: int = 1
    patience: float = 1.0
    length_penalty: float | None = None

    def __post_init__(self) -> None:
        for flag, value in (("--beam-size", self.size), ("--best-of", self.best_of)):
            if not isinstance(value, int) or not 1 <= value <= 64:
                raise InputError(f"{flag} must be from 1 to 64, not {value!r:.40}")
        if not 0 < self.patience <= 64:
            raise InputError(f"patience must be above 0 and at most 64, not {self.patience!r:.40}")
        if self.length_penalty is not None and not 0 <= self.length_penalty <= 1:
            raise InputError(f"length_penalty must be from 0 to 1, not {self.length_penalty!r:.40}")

    def rank(self, texts: Sequence[tuple[int, float]]) -> int:
        """The number of the best text, by its length and the sum of its log-probabilities."""
        scores = [
            total / (length if self.length_penalty is None else ((5 + length) / 6) ** self.length_penalty)
            if length else -np.inf for length, total in texts
        ]  # fmt: skip
        return int(np.argmax(scores))


GREEDY = Beams()


def search(
    beams: Beams,
    logprobs_of: Callable[[Tokens], FloatArray],
    end: int,
    most: int,
    ahead: Callable[[list[Tokens]], object] = len,
) -> tuple[Tokens, tuple[float, ...], float]:
    """The best text, without its end, the log-probability of each of its tokens, and the sum of these, with the end's.
    logprobs_of: of the tokens behind a text, [vocabulary], of which none is kept; beams with long common beginnings
    follow each other. end: the token that ends a text. most: tokens of a text."""
    live: dict[Tokens, _Score] = {(): (0.0, ())}
    finished, wanted = dict[Tokens, _Score](), round(beams.size * beams.patience)
    for _ in range(most):
        ahead(sorted(live))
        behind = {text: _likeliest(logprobs_of(text), beams.size + 1) for text in sorted(live)}
        scores = dict[Tokens, _Score]()
        for text, (total, each) in live.items():
            for token, logprob in behind[text]:
                longer = (*text, token)
                scores[longer] = total + logprob, (*each, logprob)
        live = {}
        for text in sorted(scores, key=lambda each: -scores[each][0]):
            if text[-1] != end:
                live[text] = scores[text]
            elif len(finished) < wanted:
                finished[text] = scores[text]
            if len(live) == beams.size:
                break
        if len(finished) >= wanted:
            break
    for text in sorted(live, key=lambda each: -live[each][0]):
        if len(finished) >= beams.size:
            break
        ended = (*text, end)
        finished[ended] = live[text]
    texts = [(text[: text.index(end)], *score) for text, score in finished.items()]
    tokens, total, logprobs = texts[beams.rank([(len(text), total) for text, total, _ in texts])]
    return tokens, logprobs[: len(tokens)], total


def _likeliest(logprobs: FloatArray, count: int) -> list[tuple[int, float]]:
    tokens = np.argsort(-logprobs, kind="stable")[:count]
    return list(zip(tokens.tolist(), logprobs[tokens].tolist(), strict=True))

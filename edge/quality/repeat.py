"""Repeated segments: whether what was read once helps when it comes again, after more text than the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge.errors import InputError
from edge.quality.perplexity import Advance, token_losses
from edge.run.session import Session
from edge.types import IntArray

SEGMENT, BETWEEN = 256, 1500  # tokens
_SETTLED = 16  # tokens at a segment's start that nothing before them could foretell
_NEEDED = 2 * SEGMENT + BETWEEN
REPEAT_TOKENS = _NEEDED + SEGMENT + 1  # of a text, the one that begins it included


@dataclass(frozen=True)
class Repeated:
    """Mean loss in nats of a segment's tokens when it comes first and when it comes again, trial by trial."""

    tokens: int  # scored per trial and occurrence
    first: list[float]
    again: list[float]


def make_repeats(text: IntArray, count: int, seed: int = 0, bos: Sequence[int] = ()) -> list[IntArray]:
    """Texts that say something twice: `SEGMENT` other tokens, a segment, `BETWEEN` other tokens, the segment.

    text: tokens to take both from, at random places that do not overlap. Raises InputError if it is too short.
    """
    if text.size < _NEEDED:
        raise InputError(
            f"repeated segments need {_NEEDED} tokens of text, and there are {text.size}: give more, or see --tasks"
        )
    random = np.random.default_rng(seed)
    repeats = []
    for _ in range(count):
        start = int(random.integers(text.size - _NEEDED + 1))
        around, segment = np.split(text[start : start + _NEEDED], [SEGMENT + BETWEEN])
        repeats.append(np.concatenate([bos, around[:SEGMENT], segment, around[SEGMENT:], segment]).astype(np.int32))
    return repeats


def measure_repeats(session: Session, repeats: Sequence[IntArray], advance: Advance) -> Repeated:
    """Stream every text from an empty cache and score both occurrences, without their first tokens."""
    scored, first, again = SEGMENT - _SETTLED, [], []
    for tokens in repeats:
        losses = token_losses(session, tokens, advance)
        again.append(float(losses[-scored:].mean()))
        end = losses.size - SEGMENT - BETWEEN  # where the first occurrence ends
        first.append(float(losses[end - scored : end].mean()))
    return Repeated(scored, first, again)

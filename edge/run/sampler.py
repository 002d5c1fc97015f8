"""From logits to the next token: small pure functions over a logits array, composed into one sampler.

The order is llama.cpp's: repetition penalty, top-k, top-p, min-p, temperature. Top-k comes first among the cuts
and is done by blocks, so that drawing from 49k or 262k logits costs little more than reading them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from edge.errors import EngineError
from edge.sampling import SamplingParams
from edge.types import AnyArray, FloatArray, IntArray

PENALTY_WINDOW = 64  # recent tokens that a repetition penalty looks at, as in llama.cpp
_COLDEST = 1e-30  # lower temperatures are this one: to divide by less overflows
_BLOCK = 64  # logits per block in top_k

Sampler = Callable[[FloatArray], int]


def make_sampler(params: SamplingParams, banned: Iterable[int] = ()) -> Sampler:
    """One callable, logits float32 [vocab] -> token id. It remembers what it drew, for the repetition penalty, and
    writes bans and penalties into the logits it is given.

    banned: tokens that are never drawn: those that the model's file suppresses, the end of turn under --ignore-eos.
    """
    ban = np.fromiter(banned, dtype=np.int64)
    recent: deque[int] = deque(maxlen=PENALTY_WINDOW)
    rng = np.random.default_rng(params.seed) if params.temperature > 0 else None

    def sample(logits: FloatArray) -> int:
        if ban.size:
            logits[ban] = -np.inf
        if recent:
            penalize(logits, np.fromiter(set(recent), dtype=np.int64), params.repeat_penalty)
        token = greedy(logits) if rng is None else draw(logits, params, rng)
        if params.repeat_penalty != 1.0:
            recent.append(token)
        return token

    return sample


def greedy(logits: FloatArray) -> int:
    """The most likely token. Raises EngineError if the model produced NaN."""
    token = int(logits.argmax())
    if math.isnan(logits[token]):  # argmax stops at the first NaN
        raise EngineError("the model produced NaN logits: its weights are damaged or overflow")
    return token


def draw(logits: FloatArray, params: SamplingParams, rng: np.random.Generator) -> int:
    """One random token: top-k, then top-p, then min-p, then temperature."""
    if not math.isfinite(float(logits.max())):  # NaN wins every max
        raise EngineError("the model produced NaN logits: its weights are damaged or overflow")
    tokens = top_k(logits, params.top_k or logits.size)
    kept = logits[tokens].astype(np.float64)
    probabilities = softmax(kept)
    keep = max(1, min(top_p(probabilities, params.top_p), min_p(probabilities, params.min_p)))
    scaled = (kept[:keep] - kept[0]) / max(params.temperature, _COLDEST)
    return int(tokens[rng.choice(keep, p=softmax(scaled))])


def top_k(logits: FloatArray, k: int) -> IntArray:
    """Ids of the k largest logits, largest first.

    The k-th largest of the blocks' maxima is a lower bound for the k-th largest logit, so only what reaches it
    has to be sorted.
    """
    blocks = logits.size // _BLOCK
    if k < blocks:
        maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        candidates = np.flatnonzero(logits >= np.partition(maxima, blocks - k)[blocks - k])
    else:
        candidates = np.arange(logits.size)
    order = np.argsort(-logits[candidates], kind="stable")[:k]
    return candidates[order].astype(np.int32)


def top_p(probabilities: AnyArray, p: float) -> int:
    """How many of the sorted probabilities make up at least p."""
    if p >= 1:
        return int(probabilities.size)
    return int(np.searchsorted(np.cumsum(probabilities), p)) + 1


def min_p(probabilities: AnyArray, p: float) -> int:
    """How many of the sorted probabilities are at least p times the largest."""
    return int(np.count_nonzero(probabilities >= p * probabilities[0]))


def penalize(logits: FloatArray, tokens: AnyArray, penalty: float) -> None:
    """Make tokens less likely, in place (CTRL, arXiv:1909.05858)."""
    found = logits[tokens]
    logits[tokens] = np.where(found > 0, found / penalty, found * penalty)


def softmax(x: AnyArray) -> AnyArray:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum())

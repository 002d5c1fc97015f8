"""KL divergence and perplexity of rows of logits.

KL(p ‖ q) = Σ p (ln p − ln q), in nats, where p are the reference's probabilities of the next token. All sums are in
float64, row by row, so that the divergence of a model from itself is exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge.errors import EngineError
from edge.types import FloatArray, IntArray

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Compared:
    """Compared predictions of n tokens."""

    kl: Doubles  # float64 [n], nats
    nll: Doubles  # float64 [n], nats
    reference_nll: Doubles  # float64 [n], nats
    same: npt.NDArray[np.bool_]  # [n], whether the likeliest tokens agree


@dataclass(frozen=True)
class Divergence:
    """The divergence of a model from a reference, over `tokens` predictions.

    kl_*: nats. top1: share of predictions whose likeliest token is the reference's. ratio, delta: ratio and difference
    of the perplexities, both with the errors of paired samples. Standard errors treat tokens as independent.
    """

    tokens: int
    kl_mean: float
    kl_stderr: float
    kl_median: float
    kl_p99: float
    kl_p999: float  # for fewer than 1,000 tokens, between the two largest
    kl_max: float
    top1: float
    top1_stderr: float
    perplexity: float
    reference_perplexity: float
    ratio: float
    ratio_stderr: float
    delta: float
    delta_stderr: float


def compare(reference: FloatArray, other: FloatArray, targets: IntArray) -> Compared:
    """Compare two models' logits after the same tokens, float32 [n, vocab]. targets: the tokens that came next, int
    [n].

    Raises EngineError for logits that are not finite numbers.
    """
    rows = len(targets)
    kl, nll, reference_nll = np.empty((3, rows))
    for row, (target, theirs, ours) in enumerate(zip(targets.tolist(), reference, other, strict=True)):
        p, q = _shifted(theirs), _shifted(ours)
        kl[row], reference_nll[row], nll[row] = _kl(p, q), _nll(p, target), _nll(q, target)
    if not np.isfinite(kl + nll + reference_nll).all():
        raise EngineError("a model's predictions are not finite numbers: are its weights damaged?")
    return Compared(kl, nll, reference_nll, reference.argmax(axis=-1) == other.argmax(axis=-1))


def divergences(reference: FloatArray, other: FloatArray) -> Doubles:
    """KL divergences, float64 [n], of two models' logits after the same tokens, float32 [n, vocab]."""
    return np.array([_kl(_shifted(theirs), _shifted(ours)) for theirs, ours in zip(reference, other, strict=True)])


def negative_log_likelihoods(logits: FloatArray, targets: IntArray) -> Doubles:
    """−ln p(target), float64 [n], of logits, float32 [n, vocab]."""
    return np.array([_nll(_shifted(each), target) for target, each in zip(targets.tolist(), logits, strict=True)])


def summarize(compared: Compared) -> Divergence:
    """Summarize at least one prediction."""
    kl, nll, base = compared.kl, compared.nll, compared.reference_nll
    top1, count = float(compared.same.mean()), kl.size
    perplexity, reference = math.exp(nll.mean()), math.exp(base.mean())
    ratio = math.exp(float((nll - base).mean()))
    return Divergence(
        tokens=count,
        kl_mean=float(kl.mean()),
        kl_stderr=stderr(kl),
        kl_median=float(np.median(kl)),
        kl_p99=float(np.quantile(kl, 0.99)),
        kl_p999=float(np.quantile(kl, 0.999)),
        kl_max=float(kl.max()),
        top1=top1,
        top1_stderr=math.sqrt(top1 * (1 - top1) / max(1, count - 1)),
        perplexity=perplexity,
        reference_perplexity=reference,
        ratio=ratio,
        ratio_stderr=ratio * stderr(nll - base),
        delta=perplexity - reference,
        delta_stderr=stderr(perplexity * nll - reference * base),  # to first order
    )


def stderr(values: Doubles) -> float:
    """The standard error of the mean; 0 for a single value."""
    return float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else 0.0


_Shifted = tuple[Doubles, Doubles, float]  # x, probabilities p, ln Σ exp x, with ln p = x − ln Σ exp x


def _shifted(logits: FloatArray) -> _Shifted:
    """Logits minus their maximum, their softmax, and ln Σ exp of the shifted logits."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    p = np.exp(shifted)
    total = float(p.sum())
    p /= total
    return shifted, p, math.log(total)


def _kl(p: _Shifted, q: _Shifted) -> float:
    """Σ p (x_p − x_q), then the difference of ln Σ exp, so that equal predictions give exactly 0."""
    return max(0.0, float(p[1] @ (p[0] - q[0])) + q[2] - p[2])


def _nll(p: _Shifted, target: int) -> float:
    return p[2] - float(p[0][target])

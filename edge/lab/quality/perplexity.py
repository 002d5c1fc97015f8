"""Perplexity of a text streamed through the session's own KV cache and policy, and of repeated segments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edge.errors import InputError
from edge.likelihood import stderr
from edge.run.session import Session
from edge.types import AnyArray, FloatArray, IntArray

LOGITS_ROWS = 64  # rows of logits per step: 12 MiB for 49k tokens; more is not faster
BLOCK = 64  # approximate tokens of a block, whose mean loss is kept to compare two runs block by block
SEGMENT, BETWEEN = 256, 1500  # tokens of a repeated segment, and between its two occurrences
_SETTLED = 16  # tokens at a segment's start that nothing before could predict: not scored
_NEEDED = 2 * SEGMENT + BETWEEN
REPEAT_TOKENS = _NEEDED + SEGMENT + 1  # of a text with a repeated segment, BOS included

Advance = Callable[[int], None]
"""Called with the number of tokens that have been run since the last call."""


@dataclass(frozen=True)
class Perplexity:
    """A perplexity with its standard error."""

    perplexity: float  # exp(nll)
    tokens: int  # number of predictions
    nll: float  # mean negative log-likelihood in nats
    stderr: float  # of nll

    @classmethod
    def of(cls, losses: AnyArray) -> Perplexity:
        """Summarize negative log-likelihoods, float64 [tokens]."""
        nll = float(losses.mean())
        return cls(perplexity=math.exp(nll), tokens=losses.size, nll=nll, stderr=stderr(losses))


@dataclass(frozen=True)
class Streamed:
    """Losses of several documents."""

    tokens: list[int]  # predictions per document
    nll: list[float]  # mean per document
    blocks: list[list[float]]  # means of about BLOCK predictions each, per document
    seconds: float


@dataclass(frozen=True)
class Repeated:
    """Mean loss in nats of a segment's tokens at its first and second occurrence, per trial."""

    tokens: int  # scored per trial and occurrence
    first: list[float]
    again: list[float]


def perplexity(
    session: Session,
    text: str | Iterable[str] | IntArray,
    *,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of `text`: each token is predicted from the preceding tokens that the KV policy kept.

    Load the session with `logits_rows=LOGITS_ROWS`, or it runs token by token. Raises InputError for fewer than two
    tokens, or if the policy may not evict and the text is longer than the cache.
    """
    most = None if max_tokens is None else max_tokens + 1
    tokens = text[:most] if isinstance(text, np.ndarray) else session.model.encode_text(text, most=most)
    done, total = 0, tokens.size - 1

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress:
            on_progress(done, total)

    return Perplexity.of(token_losses(session, tokens, advance))


def stream_documents(session: Session, documents: Sequence[IntArray], advance: Advance) -> Streamed:
    """Measure every document separately, from an empty cache."""
    started = time.perf_counter()
    losses = [token_losses(session, tokens, advance) for tokens in documents]
    seconds = time.perf_counter() - started
    return Streamed(
        tokens=[each.size for each in losses],
        nll=[float(each.mean()) for each in losses],
        blocks=[_block_means(each) for each in losses],
        seconds=seconds,
    )


def _block_means(losses: AnyArray) -> list[float]:
    """Means of nearly equal parts that together cover every token."""
    return [float(part.mean()) for part in np.array_split(losses, max(1, round(losses.size / BLOCK)))]


def token_losses(session: Session, tokens: IntArray, advance: Advance | None = None) -> AnyArray:
    """-log p(token) in nats for all tokens but the first, float64 [n − 1]. Raises InputError as `perplexity` does."""
    if tokens.size < 2:
        raise InputError("perplexity needs a text of at least two tokens")
    capacity = session.engine.kv.capacity
    policy = session.plan.policy
    if not policy.evicts and tokens.size - 1 > capacity:
        raise InputError(
            f"the text has {tokens.size} tokens, but --kv-policy={policy.name} has {capacity} KV rows: raise "
            f"--max-kv-size, use --kv-policy=streaming, or limit the text with --tokens {capacity}"
        )
    session.reset()
    step, total = min(session.plan.config.chunk, session.plan.config.logits_rows), tokens.size - 1
    session.engine.kv.announce(total)
    losses = np.empty(total, np.float64)
    for start in range(0, total, step):
        part = tokens[start : min(start + step, total)]
        session.make_room(part.size)
        targets = tokens[start + 1 : start + 1 + part.size]
        losses[start : start + part.size] = _losses(session.forward(part, upcoming=step, every=True), targets)
        if advance:
            advance(part.size)
    return losses


def token_loss(logits: FloatArray, target: int) -> float:
    """-log softmax(logits)[target], summed in float64."""
    top = float(logits.max())
    return top + math.log(float(np.exp(logits - top).sum(dtype=np.float64))) - float(logits[target])


def _losses(logits: FloatArray, targets: IntArray) -> list[float]:
    """The losses of a step. As a separate function, it frees the step's logits before the next step: plans count only
    one step's."""
    return [token_loss(row, target) for row, target in zip(logits, targets.tolist(), strict=True)]


def make_repeats(text: IntArray, count: int, seed: int = 0, bos: Sequence[int] = ()) -> list[IntArray]:
    """Make texts that contain a segment twice: `SEGMENT` other tokens, a segment, `BETWEEN` other tokens, the segment.

    text: the source: each text takes a random stretch of it. Raises InputError if it is too short.
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

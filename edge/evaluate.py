"""Quality figures: perplexity of a text, streamed through the session's own KV cache and policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from edge.errors import InputError
from edge.session import Session
from edge.types import FloatArray, IntArray

LOGITS_ROWS = 64  # rows of logits per step: 12 MiB for 49k tokens; more is not faster


@dataclass(frozen=True)
class Perplexity:
    """perplexity = exp(nll); nll: mean negative log-likelihood in nats over `tokens` predictions; stderr of nll."""

    perplexity: float
    tokens: int
    nll: float
    stderr: float


def perplexity(
    session: Session,
    text: str | Iterable[str] | IntArray,
    *,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """How well the model predicts `text`, every token given all before it that the KV policy kept.

    Load the session with `logits_rows=LOGITS_ROWS`, or it runs token by token. Raises InputError for fewer than two
    tokens, or if the policy may not evict and the text is longer than the cache.
    """
    tokens = text if isinstance(text, np.ndarray) else session.model.encode_prompt(text, raw=True)
    tokens = tokens[: None if max_tokens is None else max_tokens + 1]
    if tokens.size < 2:
        raise InputError("perplexity needs a text of at least two tokens")
    capacity = session.engine.kv.capacity
    if session.plan.kv_policy == "full" and tokens.size - 1 > capacity:
        raise InputError(
            f"the text has {tokens.size} tokens, but --kv-policy full has {capacity} KV rows: raise --max-kv-size, "
            f"use --kv-policy streaming, or limit the text with --tokens {capacity}"
        )
    session.reset()
    step, total = min(session.plan.config.chunk, session.plan.config.logits_rows), tokens.size - 1
    losses = np.empty(total, np.float64)
    for start in range(0, total, step):
        part = tokens[start : min(start + step, total)]
        session.make_room(part.size)
        logits = session.forward(part, upcoming=step, every=True)
        for row, target in enumerate(tokens[start + 1 : start + 1 + part.size]):
            losses[start + row] = _loss(logits[row], int(target))
        if on_progress:
            on_progress(start + part.size, total)
    nll = float(losses.mean())
    stderr = float(losses.std(ddof=1) / math.sqrt(total)) if total > 1 else math.nan
    return Perplexity(perplexity=math.exp(nll), tokens=total, nll=nll, stderr=stderr)


def _loss(logits: FloatArray, target: int) -> float:
    """-log softmax(logits)[target], summed in float64."""
    top = float(logits.max())
    return top + math.log(float(np.exp(logits - top).sum(dtype=np.float64))) - float(logits[target])

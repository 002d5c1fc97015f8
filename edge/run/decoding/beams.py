"""Beam search: the likeliest answer among several that are extended side by side, as transformers searches it.

Where the engine has a sequence for each beam, they run in common passes, and a beam that is continued in two ways is
copied, as the branches of a fork are. Otherwise all beams use one cache. To switch beams, the cache is truncated to
their common prefix, and the other beam's remaining tokens run. A cache that cannot be truncated at any row returns to
the end of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, nullcontext
from heapq import nlargest
from typing import cast

import numpy as np

from edge.backends.base import BatchedEngine
from edge.backends.kv_cache import KVCache, end_of
from edge.errors import InputError
from edge.records import dataclass
from edge.run.decoding.generation import Generation
from edge.run.decoding.lanes import Lanes, common
from edge.run.report import Beam, StopReason
from edge.run.sampling.sampler import top_k
from edge.run.sequences.sequence import TokenSequence
from edge.types import AnyArray, FloatArray


@dataclass(frozen=True)
class _Path:
    tokens: tuple[int, ...]
    logprob: float  # sum over the tokens

    def score(self, penalty: float) -> float:
        return self.logprob / math.pow(len(self.tokens), penalty)


def check_room(rows: int, prompt: int, answer: int, *, evicted: bool = False) -> None:
    """Raise InputError unless the cache has rows for both."""
    if prompt + answer > rows or evicted:
        raise InputError(
            f"--beams needs KV rows for prompt and answer, {prompt} + {answer}, and there are {rows}: raise "
            "--max-kv-size or use a smaller --max-tokens"
        )


def search(sequence: TokenSequence, run: Generation) -> Iterator[str]:
    """Search for the answer to a prompt that has been run. Yields the best answer's text in one piece; `run.beams` has
    all answers, `run.stop_reason` the reason for the end. Raises InputError if the cache is too small for an answer."""
    request, kv = run.request, sequence.engine.kv
    beams, penalty, most = request.beams or 1, request.length_penalty, request.max_tokens or 0
    start, end, held = kv.length, end_of(kv), tuple[int, ...]()
    check_room(kv.capacity, start, most, evicted=sequence.rows.evicted > 0)
    ends = frozenset() if request.ignore_eos else run.model.tokenizer.end_ids
    finished: list[_Path] = []
    running, logits = [_Path((), 0.0)], [_log_probabilities(sequence.logits, run)]
    reason: StopReason | None = None
    side_by_side = sequence.plan.config.sequences >= beams > 1 and sequence.lora is None
    lanes = Lanes(cast(BatchedEngine, sequence.engine), beams, start) if side_by_side else None
    if lanes and lanes.capacity < start + most:  # a batch has returned memory of their sequences
        lanes = None
    with closing(lanes) if lanes else nullcontext():
        for length in range(1, most + 1):
            found = _continued(running, logits, (1 + len(ends)) * beams)
            over = [path for path in found[:beams] if path.tokens[-1] in ends or length == most]
            finished = nlargest(beams, [*finished, *over], key=lambda path: path.score(penalty))
            running = [path for path in found if path.tokens[-1] not in ends][:beams]
            run.time_token()
            if not running or length == most:
                break
            if len(finished) == beams and running[0].score(penalty) <= finished[-1].score(penalty):
                break  # the best running path is no better than the worst finished one
            logits = []
            if lanes and not (reason := _before_pass(run, len(running), kv, start + length)):
                logits = [_log_probabilities(each, run) for each in lanes.run([path.tokens for path in running])]
            for path in [] if lanes else running:
                if reason := _before_pass(run, len(running), kv, start + length):
                    break
                shared = 0 if kv.has_tail else common(held, path.tokens[:-1])
                left = list(path.tokens[shared:])
                logits.append(_log_probabilities(sequence.branch(start + shared, end, left), run))
                held = path.tokens
            if reason:
                finished = finished or running
                break
    ranked = finished or running
    best = ranked[0].tokens
    ended = best[-1] in ends
    run.stop_reason = reason or ("eos" if ended else "length")
    run.generated = len(best) - ended
    sequence.continue_from(start, end, list(best[: run.generated]))
    decode = run.model.tokenizer.decode
    run.beams = tuple(Beam(decode(path.tokens), path.score(penalty), path.tokens) for path in ranked)
    text = "".join(run.thinking.feed(token) for token in best[: run.generated])
    yield text + run.thinking.rest()
    run.watch.pay()


def _before_pass(run: Generation, texts: int, kv: KVCache, rows: int) -> StopReason | None:
    """Why no pass of so many texts may come, each with this many rows then."""
    reason = run.watch.before_pass(texts)
    return reason or ("memory" if rows > kv.capacity else None)  # rows may have been returned to the system


def _log_probabilities(logits: FloatArray, run: Generation) -> AnyArray:
    """Log-probabilities of the next token, float64 [vocab]; −∞ for banned tokens."""
    found: AnyArray = logits.astype(np.float64)
    found -= found.max()
    found -= np.log(np.exp(found).sum())
    found[run.sample.banned] = -np.inf
    return found


def _continued(running: list[_Path], logits: list[AnyArray], count: int) -> list[_Path]:
    """The `count` likeliest extensions of the paths by one token, likeliest first."""
    found = [
        _Path((*path.tokens, token), path.logprob + float(each[token]))
        for path, each in zip(running, logits, strict=True)
        for token in top_k(each, count).tolist()
        if np.isfinite(each[token])
    ]
    return nlargest(count, found, key=lambda path: path.logprob)

"""Log-probabilities of generated tokens, and of the tokens of a given text.

They describe the model's own distribution, from unmodified logits: before penalties, biases, bans, grammars and
temperature.
"""

from __future__ import annotations

import math

import numpy as np

from edge.errors import MEMORY_SHORT, NOT_FINITE, BudgetError, EngineError, InputError
from edge.model.parts.prompt import Prompt
from edge.run.hooks import OnLogprob
from edge.run.report import TokenLogprob
from edge.run.sampling.sampler import top_k
from edge.run.sequences.sequence import TokenSequence
from edge.types import FloatArray, IntArray


class Reader:
    """Reads log-probabilities from logits, float32 [vocab], with the `top` likeliest tokens. Raises EngineError for
    logits that are not finite."""

    def __init__(self, logits: FloatArray, top: int) -> None:
        largest = float(logits.max())
        if not math.isfinite(largest):
            raise EngineError(NOT_FINITE)
        self._shift = largest + math.log(float(np.exp(logits - np.float32(largest)).sum(dtype=np.float64)))
        tokens = top_k(logits, top).tolist() if top else ()
        self._top = tuple((token, float(logits[token]) - self._shift) for token in tokens)
        self._logits = logits

    def of(self, token: int, *, thought: bool = False) -> TokenLogprob:
        """The log-probability of a token, after those before it."""
        return TokenLogprob(token, float(self._logits[token]) - self._shift, self._top, thought)


class Logprobs:
    """The log-probabilities of one answer. kept: those of all its tokens, if they are to be kept."""

    def __init__(self, top: int, on_logprob: OnLogprob | None, *, keep: bool) -> None:
        self._top, self._on_logprob = top, on_logprob
        self._reader: Reader | None = None
        self.kept: list[TokenLogprob] | None = [] if keep else None

    def look(self, logits: FloatArray) -> None:
        """Note the logits, float32 [vocab], from which the next token will be drawn."""
        self._reader = Reader(logits.copy(), self._top)

    def tell(self, token: int, *, thought: bool) -> None:
        """Report the token that has been drawn."""
        if self._reader is not None:
            found = self._reader.of(token, thought=thought)
            if self.kept is not None:
                self.kept.append(found)
            if self._on_logprob is not None:
                self._on_logprob(found)


def score(
    sequence: TokenSequence, tokens: IntArray, top: int, first: int = 1, *, keep_rows: bool = False
) -> list[TokenLogprob]:
    """As `Session.score`."""
    if tokens.size < 2:
        raise InputError("a text that is scored has at least two tokens")
    if not isinstance(first, int) or not 1 <= first < tokens.size:
        raise InputError(f"the first token that is scored is from 1 to {tokens.size - 1}, not {first!r:.40}")
    vocab = sequence.engine.spec.vocab
    if not 0 <= int(tokens[first:].min()) <= int(tokens[first:].max()) < vocab:  # the engine checks those that it runs
        raise InputError(f"token ids must be from 0 to {vocab - 1}")
    if prefix := sequence.prefix:
        tokens, first = np.concatenate([prefix.ids, tokens]), first + prefix.ids.size
    kv, config, total = sequence.engine.kv, sequence.plan.config, tokens.size - 1
    if not sequence.policy.evicts and total > kv.capacity:
        raise InputError(
            f"the text has {tokens.size} tokens, but --kv-policy={sequence.policy.name} has {kv.capacity} KV rows: "
            "raise --max-kv-size or use --kv-policy=streaming"
        )
    tokens, done = tokens.astype(np.int32), 0
    reads = sequence.policy.needs.reads  # scored tokens read chosen pages, so their rows are not those of a context
    if keep_rows and not reads and not sequence.rows.changes and total <= kv.capacity:  # no evictions
        beginning = Prompt([tokens[:first]])
        beginning.read()
        done = sequence.keep_beginning(beginning)
    else:
        sequence.reset()
    kv.announce(total - done)
    found, step = list[TokenLogprob](), min(config.chunk, config.logits_rows)
    while done < total:
        scored = done >= first - 1
        count = min(step, total - done) if scored else min(config.chunk, first - 1 - done)
        if not sequence.rows.make_room(count):
            raise BudgetError(MEMORY_SHORT)
        part = tokens[done : done + count]
        if not scored:
            sequence.forward_prompt(part, upcoming=step)
        else:
            logits = sequence.forward(part, upcoming=step, every=True)
            targets = tokens[done + 1 : done + 1 + count].tolist()
            found += [Reader(row, top).of(target) for row, target in zip(logits, targets, strict=True)]
        done += count
    if not keep_rows:
        sequence.reset()
    return found

"""Retrieval: can digits that occur once in a long text be recalled at its end?

Three protocols make different demands on a policy:

known: text and question are read, the cache is compressed once, and the answer follows, as in papers on prompt
compression. Until the compression, the cache is as large as the text.
later: the text is read, the cache is compressed once, and only then the question follows.
streamed: the cache never exceeds its size. The text announces the question at its start.

The answer is scored digit by digit, greedily and teacher-forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge.errors import InputError
from edge.kv.policy import EVERY
from edge.lab.quality.perplexity import Advance
from edge.model.model import Model
from edge.model.tokens.tokenizer import TokenizerLike
from edge.run.session import Session
from edge.types import FloatArray, IntArray

PROTOCOLS = ("known", "later", "streamed")

_TASK = "A pass key is hidden somewhere in a long text that does not matter. Find the pass key and remember it.\n\n"
_AHEAD = "At the end of the text you will be asked: What is the pass key?\n\n"
_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key? The pass key is"
_DIGITS = 5


@dataclass(frozen=True)
class Trial:
    """A key hidden in a text, with its question. Tokens are int32."""

    key: str
    depth: float  # of the key: 0 is the text's start, 1 its end
    context: IntArray  # the text with the key
    streamed: IntArray  # the same, after an announcement of the question
    question: IntArray
    reply: IntArray  # the question's last token, and the key

    @property
    def tokens(self) -> int:
        """Tokens of the longest protocol."""
        return self.streamed.size + self.question.size + self.reply.size


@dataclass(frozen=True)
class Retrieved:
    """Correct digits per trial, by protocol."""

    digits: list[int]  # of the key
    depths: list[float]
    known: list[int]
    later: list[int]
    streamed: list[int]


@dataclass(frozen=True)
class Compressed:
    """Correct digits per trial, by protocol."""

    later: list[int]
    known: list[int]


def make_trials(model: Model, text: IntArray, count: int, length: int, seed: int = 0) -> list[Trial]:
    """Make trials of `length` tokens, with keys at `count` evenly spaced depths, each in a random part of `text`, int
    [n].

    Raises InputError if the text is too short, or the model's tokens do not show digits.
    """
    random, trials = np.random.default_rng(seed), []
    for number in range(count):
        key = str(random.integers(10 ** (_DIGITS - 1), 10**_DIGITS))
        question, reply = split_reply(model.tokenizer, _QUESTION, key)
        task = model.encode_text(_TASK)
        ahead, needle = (model.tokenizer.encode(part) for part in (_AHEAD, _NEEDLE.format(key=key)))
        room = length - sum(part.size for part in (task, ahead, needle, question, reply))
        if room < 1:
            raise InputError(f"--length {length} leaves no room for text around the key: at least {length - room + 1}")
        if room > text.size:
            raise InputError(f"--length {length} needs {room} tokens of text, and there are {text.size}")
        start = int(random.integers(text.size - room + 1))
        depth = (number + 0.5) / count
        before, after = np.split(text[start : start + room], [int(depth * room)])
        context, streamed = (np.concatenate([*head, before, needle, after]) for head in ([task], [task, ahead]))
        trials.append(Trial(key, depth, context, streamed, question, reply))
    return trials


def split_reply(tokenizer: TokenizerLike, question: str, key: str) -> tuple[IntArray, IntArray]:
    """Tokenize question and key: the digit-free tokens except the last; then that token and the tokens of the key.
    Raises InputError if the model's tokens do not show digits."""
    tokens = tokenizer.encode(f"{question} {key}")
    shown = [index for index, token in enumerate(tokens) if digits_of(tokenizer, int(token))]
    if not shown or shown[0] == 0 or "".join(digits_of(tokenizer, int(each)) for each in tokens) != key:
        raise InputError("retrieval needs a model whose tokens show the digits of a number")
    question_ids, reply = np.split(tokens, [shown[0] - 1])
    return question_ids, reply


def digits_of(tokenizer: TokenizerLike, token: int) -> str:
    """The digits in a token's text."""
    return "".join(each for each in tokenizer.decode([token]) if each in "0123456789")


def count_right(tokenizer: TokenizerLike, logits: FloatArray, reply: IntArray) -> int:
    """The number of digits of `reply` that greedy predictions match, place by place. logits: [reply − 1, vocab]."""
    right = 0
    for row, token in zip(logits, reply[1:].tolist(), strict=True):
        said, wanted = digits_of(tokenizer, int(row.argmax())), digits_of(tokenizer, token)
        right += sum(one == other for one, other in zip(said, wanted, strict=False))
    return right


def recall_compressed(session: Session, trials: Sequence[Trial], rows: int, advance: Advance) -> Compressed:
    """Correct digits per trial after one compression to `rows`, including the answer's. The session must have room for
    the whole text."""
    kv, right = session.engine.kv, Compressed([], [])
    queries = session.plan.policy.needs.queries
    for trial in trials:
        # Both protocols begin with the same tokens, which run once; but saved rows have no accumulated attention.
        same = 0 if queries == EVERY else max(0, trial.context.size - max(1, queries))
        session.reset()
        _read(session, trial.context[:same])
        state = kv.save() if same else None
        for answers, early, late in (
            (right.later, trial.question[:0], trial.question),
            (right.known, trial.question, trial.question[:0]),
        ):
            session.reset()
            if state:
                kv.append(state)
            _read_observed(session, np.concatenate([trial.context[same:], early]), queries)
            _compress(session, rows - late.size - trial.reply.size)
            answers.append(_answer(session, late, trial.reply))
            advance(trial.tokens)
    return right


def recall_streamed(session: Session, trials: Sequence[Trial], advance: Advance) -> list[int]:
    """Correct digits per trial with the session's own cache and policy throughout."""
    right, chunk = [], session.plan.config.chunk
    for trial in trials:
        session.reset()
        prompt = np.concatenate([trial.streamed, trial.question])
        session.engine.kv.announce(prompt.size)
        for start in range(0, prompt.size, chunk):
            part = prompt[start : start + chunk]
            session.make_room(part.size)
            session.forward(part, upcoming=chunk)
        session.make_room(trial.reply.size)
        right.append(_answer(session, trial.question[:0], trial.reply))
        advance(trial.tokens)
    return right


def _read(session: Session, tokens: IntArray) -> None:
    """Run tokens that fit without eviction."""
    chunk = session.plan.config.chunk
    session.engine.kv.announce(tokens.size)
    for start in range(0, tokens.size, chunk):
        session.forward(tokens[start : start + chunk], upcoming=1)


def _read_observed(session: Session, tokens: IntArray, queries: int) -> None:
    """Run the tokens before an eviction, with the last `queries`, which the policy observes, in a separate pass."""
    last = min(tokens.size, session.plan.config.chunk, max(1, queries))
    _read(session, tokens[:-last])
    session.forward(tokens[-last:], upcoming=session.engine.kv.capacity)


def _compress(session: Session, rows: int) -> None:
    if rows < 1:
        raise InputError("the KV cache has too few rows for the question and its answer")
    session.shrink(rows)


def _answer(session: Session, question: IntArray, reply: IntArray) -> int:
    """Correct digits, each predicted from the question and the correct digits before it."""
    tokens = np.concatenate([question, reply[:-1]])
    logits = session.forward(tokens, upcoming=1, every=True)[question.size :]
    return count_right(session.tokenizer, logits, reply)

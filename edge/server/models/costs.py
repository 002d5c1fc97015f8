"""Bytes that requests take in memory: upper estimates, by measurements. `benchmarks/attacks.py` tries them out."""

from __future__ import annotations

from edge.run.request import Request

_TEXT = 16  # for each byte of a body: its text, the prompt that a template makes of it, and token ids
_VALUE = 300  # for each value of a body: an object, and its place in a list or a table
EMBEDDED = 48  # for each value of an embedding: a number, and its digits
RANKED = 512  # for each text that is ranked: its event, and its line of the response
_TOKEN = 64  # for each token of an answer: its text
_LIKELY = 450  # for each alternative of a token: its text, bytes and log-probability
_MATCHER = 768 << 10
_SYMBOL, _STRUCTURE, _ENTRY = 24, 12 << 10, 800  # for each character of a grammar, each brace, and each comma


def of_body(size: int, values: int) -> int:
    """A body of `size` bytes with so many values."""
    return _TEXT * size + _VALUE * values


def of_tokens(count: int, alternatives: int | None) -> int:
    """The tokens of an answer, or of a text that is scored. alternatives: of each token; None: no log-probabilities."""
    return count * (_TOKEN + (0 if alternatives is None else _LIKELY * (1 + alternatives)))


def of_answer(request: Request, capacity: int) -> int:
    """The answer of a model with `capacity` KV rows, as long as none of these is evicted."""
    return of_tokens(min(request.max_tokens or capacity, capacity), request.logprobs)


def of_grammar(text: str) -> int:
    """The matcher of a grammar, or of tools as JSON, and what its compilation takes."""
    return _MATCHER + _SYMBOL * len(text) + _STRUCTURE * text.count("{") + _ENTRY * text.count(",")

"""Bytes that requests take in memory: upper estimates, by measurements. `benchmarks/attacks.py` tries them out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edge.model.chat.media_parts import sent_text
from edge.model.chat.parts import kind_of
from edge.run.request import Request

_READ = 3  # for each byte of a body: its text, and the bytes of a picture in it
_TEXT = 13  # for each byte that is no picture: the prompt that a template makes of it, and token ids
FORM = 3  # for each byte of a form: the form, its file, and the file's content
_VALUE = 300  # for each value of a body: an object, and its place in a list or a table
EMBEDDED = 48  # for each value of an embedding: a number, and its digits
RANKED = 512  # for each text that is ranked: its event, and its line of the response
_TOKEN = 64  # for each token of an answer: its text
_LIKELY = 450  # for each alternative of a token: its text, bytes and log-probability
_MATCHER = 768 << 10
_SYMBOL, _STRUCTURE, _ENTRY = 24, 12 << 10, 800  # for each character of a grammar, each brace, and each comma


def of_bytes(size: int) -> int:
    """A body of `size` bytes, as it is read."""
    return _READ * size


def of_body(size: int, values: int, pictures: int) -> int:
    """A body of `size` bytes with `values` values, in addition to `of_bytes`. pictures: bytes of its pictures."""
    return _TEXT * (size - pictures) + _VALUE * values


def picture_bytes(data: Any) -> int:
    """Characters of the media in a body's messages, which no template writes and no tokenizer reads."""
    images = [each.get("images") for each in _messages(data)]
    plain = sum(len(each) for some in images if isinstance(some, list) for each in some if isinstance(each, str))
    return plain + sum(len(sent_text(part)) for part in _media_in(data))


def pictures_in(data: Any) -> Iterator[dict[str, Any]]:
    """The parts of a body's messages that are pictures."""
    return (part for part in _media_in(data) if kind_of(part) == "picture")


def _media_in(data: Any) -> Iterator[dict[str, Any]]:
    for each in _messages(data):
        yield from _in_message(each)


def _messages(data: Any) -> list[dict[str, Any]]:
    if not isinstance(data, dict):
        return []
    listed = [each for name in ("messages", "input") if isinstance(data.get(name), list) for each in data[name]]
    return [each for each in [data, *listed] if isinstance(each, dict)]


def _in_message(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("content", "output"):
        parts = message.get(name)
        for part in parts if isinstance(parts, list) else ():
            if kind_of(part):
                yield part
            elif isinstance(part, dict) and part.get("type") == "tool_result":
                yield from _in_message({"content": part.get("content")})


def of_tokens(count: int, alternatives: int | None) -> int:
    """The tokens of an answer, or of a text that is scored. alternatives: of each token; None: no log-probabilities."""
    return count * (_TOKEN + (0 if alternatives is None else _LIKELY * (1 + alternatives)))


def of_answer(request: Request, capacity: int) -> int:
    """The answer of a model with `capacity` KV rows, as long as none of these is evicted."""
    return of_tokens(min(request.max_tokens or capacity, capacity), request.logprobs)


def of_grammar(text: str) -> int:
    """The matcher of a grammar, or of tools as JSON, and what its compilation takes."""
    return _MATCHER + _SYMBOL * len(text) + _STRUCTURE * text.count("{") + _ENTRY * text.count(",")

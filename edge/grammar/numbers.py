"""Bounds the digits of JSON numbers, as a double can tell them apart: a model may write digits without end."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import numpy as np

from edge.model.tokens.tokenizer import TokenizerLike
from edge.types import AnyArray

TAIL = 24  # bytes of an answer that tell how many digits its number has
_INTEGER, _FRACTION, _EXPONENT = 16, 17, 2  # digits
_DIGITS = re.compile(rb"(?:([eE][-+]?)|(\.))?([0-9]*)\Z")
_LEADING = re.compile(rb"[0-9]*")


class Numbers:
    """Bounds for the tokens of one vocabulary."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        leading = np.zeros(tokenizer.size, np.int8)
        text = list[int]()
        for token in range(tokenizer.size):
            piece = tokenizer.piece(token)
            leading[token] = min(99, len(_LEADING.match(piece)[0]))  # type: ignore[index]
            if piece in (b'"', b"z"):
                text.append(token)
        self._leading = leading  # digits with which each token begins
        self._most = int(leading.max())
        self._text = text  # tokens that never follow a digit of a number, and mostly one in a string

    def exceeds(self, token: int, tail: bytes) -> bool:
        """Whether a token has too many digits behind an answer that ends with `tail`, if they are a number's."""
        return bool(self._leading[token] > _left(tail))

    def bound(self, bits: AnyArray, tail: bytes) -> None:
        """Clear the bits, uint8, of tokens that give the number at the end of `tail` too many digits, unless nothing
        else may follow. Digits of a string stay: other text, or its end, may follow them."""
        left = _left(tail)
        if left >= self._most or not self._text or any(bits[each >> 3] >> (each & 7) & 1 for each in self._text):
            return
        allowed = np.unpackbits(bits, bitorder="little")
        allowed[: self._leading.size][self._leading > left] = 0
        if allowed.any():
            bits[:] = np.packbits(allowed, bitorder="little")


def numbers_of(tokenizer: TokenizerLike) -> Numbers:
    """The bounds for a vocabulary, made once per tokenizer."""
    if (found := _made.get(tokenizer)) is None:
        found = _made[tokenizer] = Numbers(tokenizer)
    return found


_made: WeakKeyDictionary[TokenizerLike, Numbers] = WeakKeyDictionary()


def _left(tail: bytes) -> int:
    """The digits that may follow."""
    exponent, point, digits = _DIGITS.search(tail).groups()  # type: ignore[union-attr]
    return (_EXPONENT if exponent else _FRACTION if point else _INTEGER) - len(digits)

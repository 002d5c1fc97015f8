"""A short way to the end of an answer, by any grammar: tokens that close its open strings, lists and objects.

The way is found token by token, not among all: a string is closed before it is continued, an object before it gets
another key. It may be longer than the shortest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from edge.model.tokens.tokenizer import TokenizerLike

_OPEN_TEXT = "z"  # allowed in texts, and hardly anywhere else
_IN_TEXT, _BETWEEN = '"', '}])":,'  # the first that is allowed is taken
_OTHERS = "0>)]}.,:@/-!#$%&'(*+;<=?[\\^_`{|~ 123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n\t"


class Endings:
    """What ways are made of, for one vocabulary."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        single = {tokenizer.piece(token): token for token in range(tokenizer.size)}

        def tokens(text: str) -> list[int]:
            return [single[char.encode()] for char in text if char.encode() in single]

        self._open_text, self._in_text, self._between = tokens(_OPEN_TEXT), tokens(_IN_TEXT), tokens(_BETWEEN)
        self._others = tokens(_OTHERS)

    def way(self, matcher: Any, words: Sequence[Sequence[int]], most: int) -> list[int] | None:
        """Tokens after which the answer may end; None if no such way of at most `most` tokens was found.

        matcher: llguidance's, which stays as it is. words: tokens of texts that end a value.
        """
        matcher, way, used = matcher.deep_copy(), list[int](), Counter[int]()
        while True:
            step = matcher.compute_ff_tokens()
            if step:
                used.clear()
            elif matcher.is_accepting():
                return way if len(way) <= most else None
            else:
                step = self._step(matcher, words, used)
            way += step
            if len(way) > most or not matcher.consume_tokens(step):
                return None

    def _step(self, matcher: Any, words: Sequence[Sequence[int]], used: Counter[int]) -> list[int]:
        """The next token. used: those that were taken one after another, and have not ended a value."""
        for word in words:
            if matcher.validate_tokens(list(word)) == len(word):
                return list(word)
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)

        def may(token: int) -> int:
            return int(allowed[token >> 3] >> (token & 7) & 1)

        in_text = any(map(may, self._open_text))
        for token in self._in_text if in_text else self._between:
            if may(token) and not used[token]:
                used.clear()
                used[token] = in_text  # it should end the text
                return [token]
        found = min(filter(may, self._others), key=lambda token: used[token], default=None)  # the first of these
        if found is None:
            found = int(np.unpackbits(allowed, bitorder="little").argmax())
        used[found] += 1
        return [found]


def endings_of(tokenizer: TokenizerLike) -> Endings:
    """What ways are made of, once per tokenizer."""
    if (found := _made.get(tokenizer)) is None:
        found = _made[tokenizer] = Endings(tokenizer)
    return found


_made: WeakKeyDictionary[TokenizerLike, Endings] = WeakKeyDictionary()

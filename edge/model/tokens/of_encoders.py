"""What the tokenizers of encoders share: pieces of a vocabulary, and control tokens, which add no text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from edge.model.parts.prompt import joined
from edge.types import IntArray


class OfEncoders:
    """The part of a `TokenizerLike` (tokenizer.py) that does not depend on how words are split. Texts to embed stand
    between `bos_id` and `eos_id`. Subclasses set the fields."""

    add_bos = True
    end_ids = suppressed = frozenset[int]()
    size: int
    _texts: list[str]
    _special: dict[str, int]  # ids of control tokens

    def encode(self, text: str | Iterable[str], *, special: bool = False, start: bool = True) -> IntArray:
        """Token ids of `text`, int32 [n], without bos and eos. special: recognize control tokens in the text, where the
        family does that."""
        return joined(self.encode_blocks(text, special=special, start=start))

    def encode_blocks(
        self, text: str | Iterable[str], *, special: bool = False, start: bool = True
    ) -> Iterator[IntArray]:
        raise NotImplementedError

    def special_tokens(self) -> dict[str, tuple[int, bool]]:
        return {text: (index, True) for text, index in self._special.items()}

    def text(self, token: int) -> str:
        """A token's text in the vocabulary. Raises IndexError for ids outside it."""
        if not 0 <= token < self.size:
            raise IndexError(f"token {token} is not in the vocabulary of {self.size}")
        return self._texts[token]

    def piece(self, token: int, /) -> bytes:
        """The bytes that a token adds to a text, with the blank before a word."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(self.piece(int(token)) for token in tokens).decode("utf-8", errors="replace").removeprefix(" ")

    def stream_decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(errors="replace")

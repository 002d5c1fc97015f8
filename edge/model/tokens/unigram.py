"""XLM-R's tokenizer: SentencePiece's unigram model (arXiv:1804.10959).

Of all ways to split a word into pieces, it takes the one whose scores, log-probabilities, have the largest sum
(Viterbi's algorithm). The `tokenizers` library splits words, and normalizes text by SentencePiece's table of
characters, which the file has; its own trie of 250,000 pieces would take 360 MiB, where a dictionary takes 45.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import normalizers, pre_tokenizers

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.parts.text import well_formed
from edge.model.tokens.of_encoders import OfEncoders
from edge.model.tokens.tokenizer import cut_blocks, read_token_id
from edge.model.tokens.vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from edge.types import IntArray

SPACE = "▁"
_PENALTY = 10.0  # of an unknown character, below the least score
_REMEMBERED, _SHORT = 4096, 32  # words, and the characters of the longest: Chinese has no spaces
_CHARACTERS = "tokenizer.ggml.precompiled_charsmap"


class Unigram(OfEncoders):
    """A `TokenizerLike` (tokenizer.py) for encoders."""

    kind = "t5"

    def __init__(self, file: GGUFFile) -> None:
        """Read the vocabulary. Raises ModelFormatError, UnsupportedError."""
        self._texts = file.strings("tokenizer.ggml.tokens")
        self.size = len(self._texts)
        scores, types = (file.numbers(f"tokenizer.ggml.{name}") for name in ("scores", "token_type"))
        if self.size != file.tensors["token_embd.weight"].shape[1] or not self.size == scores.size == types.size:
            raise ModelFormatError(
                f"{file.path}: {self.size} tokens, but another number of embeddings, scores or types"
            )
        if not file.metadata.get("tokenizer.ggml.add_space_prefix", True):
            raise UnsupportedError(f"{file.path}: a unigram tokenizer without add_space_prefix is not supported")
        if not np.isfinite(scores).all():
            raise ModelFormatError(f"{file.path}: tokenizer.ggml.scores has values that are no numbers")
        self.bos_id, self.eos_id, unknown = (read_token_id(file, name, self.size) for name in ("bos", "eos", "unknown"))
        if unknown is None:
            unknown = next((int(index) for index in np.flatnonzero(types == UNKNOWN)), None)
        if unknown is None or None in (self.bos_id, self.eos_id):
            raise ModelFormatError(f"{file.path}: the vocabulary names no bos, eos or unknown token")
        self._control = frozenset(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist())
        self._special = {self._texts[index]: index for index in sorted(self._control, reverse=True)}
        self.unknown_id, self.scores = unknown, scores.astype(np.float64).tolist()
        plain = np.flatnonzero((types == NORMAL) | (types == USER_DEFINED)).tolist()
        self.pieces = {self._texts[index]: index for index in plain}
        self._longest = max(map(len, self.pieces), default=1)
        self.least = min((self.scores[index] for index in plain), default=0.0) - _PENALTY
        # The table of characters: bytes of a trie as uint32, the trie, and texts that end with a zero.
        self.table = file.numbers(_CHARACTERS).astype(np.uint8).tobytes() if _CHARACTERS in file.metadata else None
        with _whole(file.path):
            self.normalizer = normalizers.Sequence([normalizers.Precompiled(self.table)] if self.table else [])
        self._path = file.path
        spaces: Any = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
        self._words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
        self._remembered = lru_cache(_REMEMBERED)(self._find_split)

    def _split(self, word: str) -> list[int]:
        return self._remembered(word) if len(word) <= _SHORT else self._find_split(word)

    def _find_split(self, word: str) -> list[int]:
        """The pieces of a word; unknown characters in a row are one unknown token. Callers must not change the list."""
        ends = [(0.0, 0, -1)] + [(-np.inf, 0, -1)] * len(word)  # best score up to here, start of the last piece, its id
        for start in range(len(word)):
            before, known = ends[start][0], False
            for end in range(start + 1, min(start + self._longest, len(word)) + 1):
                piece = self.pieces.get(word[start:end])
                if piece is None:
                    continue
                known = known or end == start + 1
                if before + self.scores[piece] > ends[end][0]:
                    ends[end] = before + self.scores[piece], start, piece
            if not known and before + self.least > ends[start + 1][0]:
                ends[start + 1] = before + self.least, start, self.unknown_id
        found, at = list[int](), len(word)
        while at:
            _, at, piece = ends[at]
            if piece != self.unknown_id or found[-1:] != [piece]:
                found.append(piece)
        return found[::-1]

    def encode_blocks(
        self, text: str | Iterable[str], *, special: bool = False, start: bool = True
    ) -> Iterator[IntArray]:
        for block, _ in cut_blocks([text] if isinstance(text, str) else text):
            with _whole(self._path):
                words = self._words.pre_tokenize_str(self.normalizer.normalize_str(well_formed(block)))
            yield np.array([token for word, _ in words for token in self._split(word)], np.int32)

    def piece(self, token: int, /) -> bytes:
        """The bytes that a token adds to a text; control tokens add none."""
        text = self.text(token)
        return b"" if token in self._control else text.replace(SPACE, " ").encode()


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raise ModelFormatError where the library fails on a damaged table; a panic of Rust is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFormatError(f"{path}: {_CHARACTERS} is damaged ({error!s:.80})") from None

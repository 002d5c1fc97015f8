"""XLM-R's tokenizer: SentencePiece's unigram model (arXiv:1804.10959), by the `tokenizers` library.

Of all ways to split a word into pieces, it takes the one whose scores, log-probabilities, have the largest sum.
Text is normalized by SentencePiece's table of characters, which the file has.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Splitter
from tokenizers import models, normalizers, pre_tokenizers

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.prompt import joined
from edge.model.text import well_formed
from edge.model.tokenizer import cut_blocks, read_token_id
from edge.model.vocabulary import CONTROL, UNKNOWN
from edge.types import IntArray

SPACE = "▁"
_CHARACTERS = "tokenizer.ggml.precompiled_charsmap"


class Unigram:
    """The `edge.model.tokenizer.TokenizerLike` of encoders. Texts to embed stand between `bos_id` and `eos_id`."""

    kind = "t5"
    add_bos = True
    end_ids = suppressed = frozenset[int]()

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
        self.bos_id, self.eos_id, unknown = (read_token_id(file, name, self.size) for name in ("bos", "eos", "unknown"))
        if unknown is None:
            unknown = next((int(index) for index in np.flatnonzero(types == UNKNOWN)), None)
        if None in (self.bos_id, self.eos_id, unknown):
            raise ModelFormatError(f"{file.path}: the vocabulary names no bos, eos or unknown token")
        self._control = frozenset(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist())
        self._special = {self._texts[index]: index for index in sorted(self._control, reverse=True)}
        pieces: list[Any] = [*zip(self._texts, scores.astype(np.float64).tolist(), strict=True)]
        for index in self._control - {unknown}:
            pieces[index] = (f"\0{index}", pieces[index][1])  # no text has it
        self._splitter = Splitter(models.Unigram(pieces, unknown, False))
        steps: list[Any] = []
        if _CHARACTERS in file.metadata:
            steps.append(normalizers.Precompiled(file.numbers(_CHARACTERS).astype(np.uint8).tobytes()))
        self._splitter.normalizer = normalizers.Sequence(steps)
        spaces = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
        self._splitter.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])

    def encode(self, text: str | Iterable[str], *, special: bool = False, start: bool = True) -> IntArray:
        """Token ids of `text`, int32 [n], without bos and eos; control tokens in it are text."""
        return joined(self.encode_blocks(text, special=special, start=start))

    def encode_blocks(
        self, text: str | Iterable[str], *, special: bool = False, start: bool = True
    ) -> Iterator[IntArray]:
        for block, _ in cut_blocks([text] if isinstance(text, str) else text):
            yield np.array(self._splitter.encode(well_formed(block)).ids, np.int32)

    def special_tokens(self) -> dict[str, tuple[int, bool]]:
        return {text: (index, True) for text, index in self._special.items()}

    def text(self, token: int) -> str:
        """A token's text in the vocabulary. Raises IndexError for ids outside it."""
        if not 0 <= token < self.size:
            raise IndexError(f"token {token} is not in the vocabulary of {self.size}")
        return self._texts[token]

    def piece(self, token: int, /) -> bytes:
        """The bytes that a token adds to a text; control tokens add none."""
        text = self.text(token)
        return b"" if token in self._control else text.replace(SPACE, " ").encode()

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(self.piece(int(token)) for token in tokens).decode("utf-8", errors="replace").removeprefix(" ")

    def stream_decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(errors="replace")

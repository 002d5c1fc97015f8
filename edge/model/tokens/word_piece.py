"""BERT's tokenizer (WordPiece): splits words into the longest pieces of a vocabulary, by the `tokenizers` library.

Words end at blanks, and punctuation and Chinese characters are words of their own. Files store the vocabulary in
llama.cpp's form: pieces that begin a word have the mark `▁`, and pieces that continue one have lost their `##`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer as Splitter
from tokenizers import models, normalizers, pre_tokenizers

from edge.errors import ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.model.parts.text import well_formed
from edge.model.tokens.of_encoders import OfEncoders
from edge.model.tokens.tokenizer import cut_blocks, read_token_id
from edge.model.tokens.vocabulary import CONTROL, UNKNOWN
from edge.types import IntArray

# Settings for which llama.cpp has no fields. By default, text becomes lowercase if the vocabulary has no capitals, and
# accents are stripped from lowercased text.
LOWERCASE, ACCENTS = "tokenizer.edge.lowercase", "tokenizer.edge.strip_accents"
WORD = "▁"  # the mark of pieces that begin a word
REST = "##"
LONGEST_WORD = 100  # characters; longer ones are unknown
_CAPITALS = re.compile("[A-Z]")
_SPECIAL = re.compile(r"\[[A-Za-z]+\d*\]")  # [CLS], and in older files [unused12], have no mark


class WordPiece(OfEncoders):
    """A `TokenizerLike` (tokenizer.py) for encoders."""

    kind = "bert"

    def __init__(self, file: GGUFFile) -> None:
        """Read the vocabulary. Raises ModelFormatError if it lacks tokens that BERT needs."""
        self._texts, self._control = _read_tokens(file)
        self.size = len(self._texts)
        if self.size != file.tensors["token_embd.weight"].shape[1]:
            raise ModelFormatError(f"{file.path}: {self.size} tokens, but another number of embeddings")
        ids: dict[str, int] = {}
        for index, text in enumerate(self._texts):
            ids.setdefault(text, index)  # of tokens with the same text, the first is found

        def role(usual: str, *names: str) -> int:
            given = (read_token_id(file, name, self.size) for name in names)
            found = next((index for index in given if index is not None), ids.get(usual))
            if found is None:
                raise ModelFormatError(f"{file.path}: the vocabulary has no {usual}")
            return found

        self.bos_id: int | None = role("[CLS]", "cls", "bos")
        self.eos_id: int | None = role("[SEP]", "seperator", "eos")  # as GGUF spells it
        self._special = {self._texts[index]: index for index in sorted(self._control, reverse=True)}
        alternatives = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._special_pattern = re.compile(f"({alternatives})") if alternatives else None
        capitals = any(_CAPITALS.search(text) and not _SPECIAL.fullmatch(text) for text in self._texts)
        lowercase = bool(file.metadata.get(LOWERCASE, not capitals))
        unknown = self._texts[role("[UNK]", "unknown")]
        self.unknown_id = ids[unknown]
        plain = {text: index for text, index in ids.items() if index not in self._control}
        self.pieces = plain | {unknown: self.unknown_id}  # those that continue a word begin with REST
        self._splitter = Splitter(
            models.WordPiece(self.pieces, unk_token=unknown, max_input_chars_per_word=LONGEST_WORD)
        )
        self.normalizer = normalizers.BertNormalizer(
            lowercase=lowercase, strip_accents=bool(file.metadata.get(ACCENTS, lowercase))
        )
        self.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._splitter.normalizer, self._splitter.pre_tokenizer = self.normalizer, self.pre_tokenizer

    def encode_blocks(
        self, text: str | Iterable[str], *, special: bool = False, start: bool = True
    ) -> Iterator[IntArray]:
        for block, _ in cut_blocks([text] if isinstance(text, str) else text):
            parts = self._special_pattern.split(block) if special and self._special_pattern else [block]
            ids = list[int]()
            for index, part in enumerate(parts):
                ids += [self._special[part]] if index % 2 else self._splitter.encode(well_formed(part)).ids
            yield np.array(ids, np.int32)

    def piece(self, token: int, /) -> bytes:
        """The bytes that a token adds to a text, with the blank before a word."""
        text = self.text(token)
        if token in self._control:
            return b""
        return (text.removeprefix(REST) if text.startswith(REST) else f" {text}").encode()


def to_stored(text: str) -> str:
    """A token of BERT's vocabulary in the form that files store."""
    if _SPECIAL.fullmatch(text):
        return text
    return text.removeprefix(REST) if text.startswith(REST) else WORD + text


def _read_tokens(file: GGUFFile) -> tuple[list[str], frozenset[int]]:
    """All tokens in BERT's form, and the ids of control tokens."""
    key = "tokenizer.ggml.token_type"
    types = file.numbers(key) if key in file.metadata else np.zeros(0, np.int32)
    texts, control = list[str](), set[int]()
    for index, raw in enumerate(file.raw_strings("tokenizer.ggml.tokens")):
        stored = raw.decode("utf-8", errors="replace")
        if index < types.size and types[index] in (CONTROL, UNKNOWN):
            control.add(index)
            texts.append(stored)
        elif stored.startswith(WORD) and len(stored) > 1:
            texts.append(stored.removeprefix(WORD))
        else:
            texts.append(stored if _SPECIAL.fullmatch(stored) else REST + stored)
    return texts, frozenset(control)

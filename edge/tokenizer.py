"""Text to token ids and back, from the tokenizer fields of a GGUF file.

The merging itself is done by the `tokenizers` library. Around it: the pre-tokenizer that the file names, special
tokens (which never match inside text that a user typed), and encoding in blocks, so that a prompt of any length
costs four bytes per token and no more.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Merger

from edge.errors import ModelFormatError, UnsupportedError
from edge.gguf_file import GGUFFile
from edge.types import IntArray

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type

# Tokens that end a turn in models whose metadata names only one of them.
_END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "</s>",
)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _WORDS % "{1,3}"
_QWEN2 = _CONTRACTIONS + _WORDS % ""


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# `tokenizer.ggml.pre` -> how text is cut into words before merging. To add one: its name and its rule.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais", "trillion"), _gpt2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _digits_then_gpt2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), lambda: _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), lambda: _split(_QWEN2)),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3"}  # a word in the vocabulary is not merged up

# Between a letter and a space before a letter no pre-tokenizer above, and no SentencePiece vocabulary, joins text.
_SAFE_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_BLOCK = 8 << 10  # characters encoded at a time
_LONGEST_BLOCK = 64 << 10  # text without a safe place (no spaces at all) is cut here


class Tokenizer:
    """Token ids of one model. `end_ids` end a turn; `add_bos` says whether prompts start with `bos_id`."""

    def __init__(self, file: GGUFFile) -> None:
        fields = file.metadata
        self.kind = fields.get("tokenizer.ggml.model")
        if self.kind not in ("gpt2", "llama"):
            raise UnsupportedError(f"{file.path}: tokenizer {self.kind!r} is not supported yet (gpt2 and llama are)")
        tokens = list(file.strings("tokenizer.ggml.tokens"))
        if len(tokens) != file.tensors["token_embd.weight"].shape[1]:
            raise ModelFormatError(f"{file.path}: {len(tokens)} tokens, but another number of embeddings")
        self.size = len(tokens)
        types = (
            file.numbers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in fields else np.ones(self.size)
        )
        if types.size != self.size:
            raise ModelFormatError(f"{file.path}: {types.size} token types for {self.size} tokens")
        self._control = frozenset(np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist())
        self._literal = frozenset(np.flatnonzero(types == _USER_DEFINED).tolist())
        self._bytes = {int(i): _byte_of(tokens[i], file) for i in np.flatnonzero(types == _BYTE)}

        self.bos_id = _token_id(file, "bos", self.size)
        self.eos_id = _token_id(file, "eos", self.size)
        self.add_bos = (
            bool(fields.get("tokenizer.ggml.add_bos_token", self.kind == "llama")) and self.bos_id is not None
        )
        self._space_prefix = self.kind == "llama" and bool(fields.get("tokenizer.ggml.add_space_prefix", True))
        named = {_token_id(file, name, self.size) for name in ("eos", "eot", "eom")}
        by_text = {tokens[i]: i for i in self._control}
        self.end_ids = frozenset({i for i in named if i is not None} | {by_text[n] for n in _END_NAMES if n in by_text})

        self._literal_ids = {tokens[i]: i for i in self._literal if tokens[i]}
        self._special_ids = {**by_text, **self._literal_ids}
        self._special_ids.pop("", None)
        self._literal_pattern = _alternatives(self._literal_ids)
        self._special_pattern = _alternatives(self._special_ids)
        self._merger = _byte_level_bpe(file, tokens) if self.kind == "gpt2" else _sentencepiece_bpe(file, tokens)
        self.piece = lru_cache(maxsize=4096)(self._piece)

    def encode(self, text: str | Iterable[str], *, special: bool = False, start: bool = True) -> IntArray:
        """Token ids of `text`, int32 [n]. Text may come in parts, which are joined.

        special: let `<|im_end|>` and its like match (templates), else they are plain text (what users type).
        start: the text opens a prompt (SentencePiece models then put a space before it).
        """
        ids = array("i")
        for block, first in _blocks([text] if isinstance(text, str) else text):
            self._encode_block(block, special, start and first, ids)
        return np.frombuffer(ids, dtype=np.int32) if ids else np.zeros(0, np.int32)

    def _encode_block(self, text: str, special: bool, start: bool, ids: array[int]) -> None:
        pattern, by_text = (
            (self._special_pattern, self._special_ids) if special else (self._literal_pattern, self._literal_ids)
        )
        parts = pattern.split(text) if pattern else [text]  # plain, special, plain, special, ... plain
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(by_text[part])
                start = by_text[part] in self._control
            elif part:
                prefix = " " if start and self._space_prefix else ""
                ids.extend(self._merger.encode(prefix + part, add_special_tokens=False).ids)

    def text(self, token: int) -> str:
        """The token as it is written in the vocabulary. Raises IndexError for ids outside it."""
        text = self._merger.id_to_token(token)
        if text is None:
            raise IndexError(f"token {token} is not in the vocabulary of {self.size}")
        return str(text)

    def _piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; control tokens add none."""
        if token in self._control:
            return b""
        if token in self._bytes:
            return self._bytes[token]
        text = self.text(token)
        if token in self._literal:
            return text.encode()
        if self.kind == "llama":
            return text.replace("▁", " ").encode()
        return bytes(_BYTE_OF_CHAR[char] for char in text if char in _BYTE_OF_CHAR)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        return b"".join(self.piece(int(token)) for token in tokens).decode("utf-8", errors="replace")

    def stream_decoder(self) -> codecs.IncrementalDecoder:
        """Joins the bytes of successive tokens; holds back a character until all its bytes have come."""
        return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _blocks(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut a text into blocks that can be encoded one by one; the flag marks the first."""
    rest, first = "", True
    for part in parts:
        rest += part
        while len(rest) > _BLOCK:
            cuts = [match.start() for match in _SAFE_CUT.finditer(rest, 1, _BLOCK)]
            cut = cuts[-1] if cuts else next((m.start() for m in _SAFE_CUT.finditer(rest, _BLOCK)), _LONGEST_BLOCK)
            if cut > len(rest) - 2:
                break  # no safe place yet: wait for more text
            yield rest[:cut], first
            rest, first = rest[cut:], False
    if rest:
        yield rest, first


def _byte_level_bpe(file: GGUFFile, tokens: list[str]) -> Merger:
    name = str(file.metadata.get("tokenizer.ggml.pre", "gpt-2"))
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{file.path}: pre-tokenizer {name!r} is not supported yet ({', '.join(sorted(_PRE_TOKENIZERS))})"
        )
    vocabulary = {text: index for index, text in enumerate(tokens)}
    merges = []
    for line in file.strings("tokenizer.ggml.merges"):
        left, _, right = line[1:].partition(" ")  # the first character may itself be a space, never the separator
        pair = (line[:1] + left, right)
        if pair[0] not in vocabulary or pair[1] not in vocabulary or pair[0] + pair[1] not in vocabulary:
            raise ModelFormatError(f"{file.path}: merge {line!r} names tokens that are not in the vocabulary")
        merges.append(pair)
    merger = Merger(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    merger.pre_tokenizer = _PRE_TOKENIZERS[name]()
    return merger


def _sentencepiece_bpe(file: GGUFFile, tokens: list[str]) -> Merger:
    """SentencePiece joins the neighbours whose union scores best; as merges: every split of a piece, best first."""
    scores = file.numbers("tokenizer.ggml.scores")
    if scores.size != len(tokens):
        raise ModelFormatError(f"{file.path}: {scores.size} token scores for {len(tokens)} tokens")
    vocabulary = {text: index for index, text in enumerate(tokens)}
    ranked = []
    for index, text in enumerate(tokens):
        for cut in range(1, len(text)):
            if text[:cut] in vocabulary and text[cut:] in vocabulary:
                ranked.append((-float(scores[index]), vocabulary[text[:cut]], vocabulary[text[cut:]]))
    ranked.sort()
    merges = [(tokens[left], tokens[right]) for _, left, right in ranked]
    unknown = _token_id(file, "unknown", len(tokens))
    merger = Merger(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    merger.normalizer = normalizers.Replace(" ", "▁")
    return merger


def _token_id(file: GGUFFile, name: str, size: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None or value == 0xFFFFFFFF:
        return None
    if not isinstance(value, int) or not 0 <= value < size:
        raise ModelFormatError(f"{file.path}: {name}_token_id is {value!r}, outside the vocabulary of {size}")
    return value


def _byte_of(text: str, file: GGUFFile) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if match is None:
        raise ModelFormatError(f"{file.path}: byte token {text!r} is not of the form <0x41>")
    return bytes.fromhex(match[1])


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted: printable Latin-1 stands for itself, the rest follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()

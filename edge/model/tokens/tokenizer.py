"""Text to token ids and back, by the tokenizer fields of a GGUF file.

The `tokenizers` library splits text into words; the tables of `vocabulary.py` merge them. This module adds the
pre-tokenizer that the file names, special tokens (which never match inside text that a user typed), and encoding in
blocks, so that a prompt of any length can be run while it is read.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer as Merger
from tokenizers import models, normalizers

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.parts.prompt import joined
from edge.model.parts.text import well_formed
from edge.model.tokens.pre_tokenizers import PRE_TOKENIZERS, PUBLISHED, PreTokenizer
from edge.model.tokens.vocabulary import BYTE, CALL_ENDS, CONTROL, END_NAMES, USER_DEFINED, open_vocabulary
from edge.types import IntArray
from edge.values import brief

_HIDDEN = "\0"  # no token contains it
# Settings for which llama.cpp has no fields. NFC composes characters first. `first` and `always` put a space only
# before text that does not begin with one: at the start, or also after every special token.
NORMALIZER, SPACES = "tokenizer.edge.normalizer", "tokenizer.edge.spaces"

# Tokens that end a turn, beside EOS, where GGUF's roles are too few for them.
ENDS = "tokenizer.edge.end_token_ids"

# Special tokens that absorb blanks behind or before them, and those that match whole words only. Without RSTRIP, the
# name of a Phi-3 model stands for it.
RSTRIP, LSTRIP, ALONE = (f"tokenizer.edge.{key}_token_ids" for key in ("rstrip", "lstrip", "single_word"))
_BLANKS = " \t\n\r\v\f"

# The rule that splits words. Absent: llama.cpp's for `tokenizer.ggml.pre`; "published": the model's own (PUBLISHED).
WORDS = "tokenizer.edge.words"

# Marks of turns, thoughts and tools in templates. Some files list them as ordinary words, but text from users never
# becomes such a token.
MARK = re.compile(
    r"<\|.+\|>|<\|\w+>|<\w+\|>|<｜.+｜>|</?s>|<start_of_turn>|<end_of_turn>|</?(?:think|tool_call|tool_response|tools)>"
    r"|\[/?(?:INST|THINK|SYSTEM_PROMPT|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS)\]"
)

# No pre-tokenizer and no SentencePiece vocabulary joins text across the boundary between a letter and " letter".
_SAFE_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_SPM_CUT = re.compile(r"(?<=[A-Za-z])(?=▁[A-Za-z])")  # the same, with spaces as SentencePiece writes them
_GEMMA4_CUT = re.compile(_SPM_CUT.pattern + r"|(?<=\n)(?!\n)|(?<!\n)(?=\n)")  # and around runs of newlines
_REMEMBERED = 32  # characters; tokens of longer words are not cached
BLOCK = 8 << 10  # characters encoded at a time
LONGEST_BLOCK = 64 << 10  # text without a safe place to cut (no spaces at all) is cut here


class TokenizerLike(Protocol):
    """The tokenizer interface of runs: `Tokenizer`, or llama.cpp's own (`backends/llamacpp/tokenizer.py`)."""

    size: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool  # prompts start with bos_id
    end_ids: frozenset[int]  # tokens that end a turn
    suppressed: frozenset[int]  # tokens that must not be generated

    def encode(self, text: str | Iterable[str], *, special: bool = False, start: bool = True) -> IntArray: ...

    def encode_blocks(
        self, text: str | Iterable[str], *, special: bool = False, start: bool = True
    ) -> Iterator[IntArray]: ...

    def special_tokens(self) -> dict[str, tuple[int, bool]]: ...

    def text(self, token: int) -> str: ...

    def piece(self, token: int, /) -> bytes: ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def stream_decoder(self) -> codecs.IncrementalDecoder: ...


def check_known(file: GGUFFile) -> None:
    """Raise UnsupportedError for a tokenizer or pre-tokenizer that `Tokenizer` does not support."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4", "bert", "t5"):
        raise UnsupportedError(f"{file.path}: tokenizer {brief(kind)} is not supported yet")
    if kind == "gpt2":
        _pre_tokenizer(file)


def read_suppressed(file: GGUFFile) -> frozenset[int]:
    """Tokens that the file forbids to generate, such as Gemma 4's for images. Raises ModelFormatError."""
    return read_tokens(file, "tokenizer.ggml.suppress_tokens")


def read_tokens(file: GGUFFile, key: str) -> frozenset[int]:
    """The tokens that a field lists; none without the field. Raises ModelFormatError."""
    if key not in file.metadata:
        return frozenset()
    found = file.numbers(key)
    if found.dtype.kind not in "iu":
        raise ModelFormatError(f"{file.path}: {key} is not a list of tokens")
    size = file.count("tokenizer.ggml.tokens")
    return frozenset(int(token) for token in found if 0 <= token < size)  # llama.cpp leaves out others, too


class Tokenizer:
    """The tokenizer of one model. `end_ids` end a turn; `add_bos` says whether prompts start with `bos_id`."""

    def __init__(self, file: GGUFFile) -> None:
        fields = file.metadata
        check_known(file)
        self.kind: str = fields["tokenizer.ggml.model"]
        self.rule = rule = _pre_tokenizer(file) if self.kind == "gpt2" else None
        self.size = file.count("tokenizer.ggml.tokens")
        if self.size != file.tensors["token_embd.weight"].shape[1]:
            raise ModelFormatError(f"{file.path}: {self.size} tokens, but another number of embeddings")
        self.vocabulary = open_vocabulary(file, self.kind)
        text = self.vocabulary.text
        self._control = frozenset(self.vocabulary.of_kind(CONTROL))
        self._literal = frozenset(self.vocabulary.of_kind(USER_DEFINED))
        self._bytes = {token: _byte_of(text(token), file) for token in self.vocabulary.of_kind(BYTE)}

        self.bos_id = read_token_id(file, "bos", self.size)
        self.eos_id = read_token_id(file, "eos", self.size)
        if fields.get("general.architecture") == "modern-bert":
            self.bos_id, self.eos_id = (read_token_id(file, name, self.size) for name in ("cls", "seperator"))
        adds_bos = rule.adds_bos if rule else self.kind == "llama"
        adds_bos = self.kind == "gemma4" or bool(fields.get("tokenizer.ggml.add_bos_token", adds_bos))
        self.add_bos = self.bos_id is not None and adds_bos
        self._space_prefix = self.kind == "llama" and bool(fields.get("tokenizer.ggml.add_space_prefix", True))
        roles = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        named = {read_token_id(file, name, self.size) for name in roles}
        by_text = {text(i): i for i in sorted(self._control, reverse=True)}  # of the same text, the first
        ends = {i for i in named if i is not None} | {by_text[n] for n in END_NAMES if n in by_text}
        if any(by_text.keys() >= calls for calls in CALL_ENDS):
            ends.discard(by_text.get("<|end|>", -1))
        if "<|tool_response>" in by_text:
            ends.discard(by_text.get("</s>", -1))  # a tag of HTML in Gemma 4's vocabulary
        self.end_ids = frozenset(ends) | read_tokens(file, ENDS)
        self.suppressed = read_suppressed(file)

        self.spaces = fields.get(SPACES)
        if self.spaces not in (None, "first", "always"):
            raise UnsupportedError(f"{file.path}: {SPACES} is {brief(self.spaces)}, which is not supported")

        literal = sorted(self._literal, reverse=True)
        self._special_ids = {**by_text, **{text(i): i for i in literal}}
        self.literal_ids = {text(i): i for i in literal if not MARK.fullmatch(text(i))}
        self.swallowing, self.lstripping, self.alone = (read_tokens(file, key) for key in (RSTRIP, LSTRIP, ALONE))
        if RSTRIP not in fields and re.search("phi-?3", str(fields.get("general.name")), re.IGNORECASE):
            self.swallowing = frozenset(i for n, i in by_text.items() if n not in ("<unk>", "<s>", "<|endoftext|>"))
        self._literal_pattern = _alternatives(self.literal_ids, self.alone)
        self._special_pattern = _alternatives(self._special_ids, self.alone)
        self.unknown_id = read_token_id(file, "unknown", self.size) if self.kind == "llama" else None
        self._pre_tokenizer = rule.build() if rule else None
        self.composes = self.kind == "gpt2" and _composes(file)
        self.whole_words = rule is not None and rule.whole_words
        self._symbols = lru_cache(maxsize=4096)(self._find_symbols)
        self._merge_word = lru_cache(maxsize=4096)(self._merge)
        self.piece = lru_cache(maxsize=4096)(self._piece)

    def encode(self, text: str | Iterable[str], *, special: bool = False, start: bool = True) -> IntArray:
        """Token ids of `text`, int32 [n]. Text in parts is joined.

        special: recognize `<|im_end|>` and the like (for templates); otherwise they are plain text (from users).
        start: the text opens a prompt (SentencePiece models then put a space before it).
        """
        return joined(self.encode_blocks(text, special=special, start=start))

    def encode_blocks(
        self, text: str | Iterable[str], *, special: bool = False, start: bool = True
    ) -> Iterator[IntArray]:
        """`encode` in blocks, each produced on demand from a few thousand characters of the text."""
        for block, first in cut_blocks([text] if isinstance(text, str) else text):
            yield np.array(self._encode_block(block, special, start and first), np.int32)

    def _encode_block(self, text: str, special: bool, start: bool) -> list[int]:
        text = well_formed(text)
        pattern, by_text = (
            (self._special_pattern, self._special_ids) if special else (self._literal_pattern, self.literal_ids)
        )
        ids: list[int] = []
        parts = pattern.split(text) if pattern else [text]  # plain, special, plain, special, ... plain
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(by_text[part])
                start = by_text[part] in self._control
            else:
                if ids and index and ids[-1] in self.swallowing:
                    part = part.lstrip(_BLANKS)
                if index + 1 < len(parts) and by_text[parts[index + 1]] in self.lstripping:
                    part = part.rstrip(_BLANKS)
                if not part:
                    continue
                prefix = " " if start and self._wants_space(part, first=index == 0) else ""
                for word in self._cut(prefix + part):
                    ids += self._merge_word(word) if len(word) <= _REMEMBERED else self._merge(word)
        return ids

    def _cut(self, text: str) -> list[str]:
        """Split into words that no merge crosses. Byte-level models: the pre-tokenizer's words, in the byte alphabet.
        SentencePiece merges a text as one word; it is split here so that tokens of words can be cached."""
        if self._pre_tokenizer is None:
            return (_GEMMA4_CUT if self.kind == "gemma4" else _SPM_CUT).split(text.replace(" ", "▁"))
        composed = normalizers.NFC().normalize_str(text) if self.composes else text
        return [word for word, _ in self._pre_tokenizer.pre_tokenize_str(composed)]

    def _merge(self, word: str) -> list[int]:
        """The tokens of a word. Callers share the list and must not change it."""
        whole_word = self.whole_words or (self.kind == "gemma4" and word.startswith("\n"))
        if whole_word and (whole := self.vocabulary.find_plain(word)) is not None:
            return [whole]
        ids: list[int] = []
        for char in word:
            found = self._symbols(char)
            if found != [self.unknown_id] or ids[-1:] != found:  # unknown characters in a row are one unknown token
                ids += found
        return self.vocabulary.merge(ids)

    def _find_symbols(self, char: str) -> list[int]:
        """The initial tokens of a character: its own, those of its bytes, the unknown token, or none."""
        if (own := self.vocabulary.find_plain(char)) is not None:
            return [own]
        if self.kind == "gpt2":
            return []
        parts = [self.vocabulary.find_plain(f"<0x{byte:02X}>") for byte in char.encode()]
        known = [part for part in parts if part is not None]
        return known if len(known) == len(parts) else [] if self.unknown_id is None else [self.unknown_id]

    def _wants_space(self, part: str, *, first: bool) -> bool:
        """Whether a space is inserted before text that opens a prompt (`first`) or follows a control token."""
        if self.spaces is None:
            return self._space_prefix
        return self._space_prefix and (first or self.spaces == "always") and not part.startswith((" ", "▁"))

    @property
    def space_prefix(self) -> bool:
        """Whether a space is inserted before a prompt."""
        return self._space_prefix

    def special_tokens(self) -> dict[str, tuple[int, bool]]:
        """Tokens that match as a whole, before any merging: their text, id, and whether they are control tokens."""
        return {text: (index, index in self._control) for text, index in self._special_ids.items()}

    def library_form(self) -> Merger:
        """The tokenizer as the `tokenizers` library stores it; control tokens get names that match no text."""
        names = [_HIDDEN + self.text(i) if i in self._control else self.text(i) for i in range(self.size)]
        merges = [(names[left], names[right]) for left, right in self.vocabulary.merges()]
        options: dict[str, Any] = {"ignore_merges": self.whole_words}
        if self.kind != "gpt2":
            unknown = None if self.unknown_id is None else names[self.unknown_id]
            options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
        merger = Merger(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges, **options))
        if self._pre_tokenizer:
            merger.pre_tokenizer = self._pre_tokenizer
        normalizer = normalizers.NFC() if self.composes else normalizers.Replace(" ", "▁")
        if self.composes or self.kind != "gpt2":
            merger.normalizer = normalizer
        return merger

    def text(self, token: int) -> str:
        """A token's text in the vocabulary. Raises IndexError for ids outside it."""
        return self.vocabulary.text(token)

    def _piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; control tokens add none."""
        if token in self._control:
            return b""
        if token in self._bytes:
            return self._bytes[token]
        text = self.text(token)
        if token in self._literal:
            return text.encode()
        if self.kind != "gpt2":
            return text.replace("▁", " ").encode()
        return bytes(BYTE_OF_CHAR[char] for char in text if char in BYTE_OF_CHAR)

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode token ids to text; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.piece(int(token)) for token in tokens).decode("utf-8", errors="replace")

    def stream_decoder(self) -> codecs.IncrementalDecoder:
        """A decoder of successive tokens that holds back a character until all of its bytes have arrived."""
        return codecs.getincrementaldecoder("utf-8")(errors="replace")


def cut_blocks(parts: Iterable[str], longest: int = LONGEST_BLOCK) -> Iterator[tuple[str, bool]]:
    """Split a text into blocks that can be encoded independently; the flag marks the first.

    longest: characters after which a block without a safe place is cut anyway.
    """
    rest, wanted, first = "", BLOCK, True
    for part in parts:
        for start in range(0, len(part), longest):  # so that cutting a long text takes linear time
            rest += part[start : start + longest]
            while len(rest) > wanted:
                cut = _safe_cut(rest, longest)
                if cut is None:
                    wanted += BLOCK  # wait for more text
                    continue
                yield rest[:cut], first
                rest, wanted, first = rest[cut:], BLOCK, False
    if rest:
        yield rest, first


def _safe_cut(text: str, longest: int) -> int | None:
    """The last place below BLOCK, or else the first one above it, where a cut changes no token."""
    below = [match.start() for match in _SAFE_CUT.finditer(text, 1, BLOCK)]
    if below:
        return below[-1]
    above = _SAFE_CUT.search(text, BLOCK, longest)
    return above.start() if above else longest if len(text) > longest else None


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    name, words = file.metadata.get("tokenizer.ggml.pre") or "default", file.metadata.get(WORDS)
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(f"{file.path}: pre-tokenizer {brief(name)} is not supported yet")
    if words is not None and (words != "published" or name not in PUBLISHED):
        raise UnsupportedError(f"{file.path}: {WORDS} is {brief(words)}, which is not supported with {brief(name)}")
    return PRE_TOKENIZERS[name] if words is None else PUBLISHED[name]


def _composes(file: GGUFFile) -> bool:
    normalizer = file.metadata.get(NORMALIZER)
    if normalizer not in (None, "NFC"):
        raise UnsupportedError(f"{file.path}: the normalizer {brief(normalizer)} is not supported (NFC is)")
    return normalizer is not None


def read_token_id(file: GGUFFile, name: str, size: int) -> int | None:
    """The token of a role, such as `eos`; None if the file names none. Raises ModelFormatError."""
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None or value == 0xFFFFFFFF:
        return None
    if not isinstance(value, int) or not 0 <= value < size:
        raise ModelFormatError(f"{file.path}: {name}_token_id is {brief(value)}, outside the vocabulary of {size}")
    return value


def _byte_of(text: str, file: GGUFFile) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    if match is None:
        raise ModelFormatError(f"{file.path}: byte token {brief(text)} is not of the form <0x41>")
    return bytes.fromhex(match[1])


def _alternatives(ids: dict[str, int], alone: frozenset[int]) -> re.Pattern[str] | None:
    longest_first = (
        rf"(?<!\w){re.escape(text)}(?!\w)" if ids[text] in alone else re.escape(text)
        for text in sorted(ids, key=len, reverse=True)
    )
    return re.compile("(" + "|".join(longest_first) + ")") if ids else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted: printable Latin-1 characters stand for themselves, the rest
    follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()

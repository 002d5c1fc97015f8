"""The C tokenizer (apps/runtime/text/tokenizer.c) as tests call it: the same ids as Python's `Tokenizer`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np
from runtime_library import PLATFORM, load_runtime, pointer

from edge.apps.sections.vocabulary import tokenizer_sections
from edge.model.tokens.tokenizer import TokenizerLike
from edge.types import AnyArray

SOURCES = (
    "tokens_harness.c", "tokenizer.c", "vocabulary.c", "words.c", "letters.c", "pieces.c", "compose.c", "utf8.c",
    "error.c", *PLATFORM,
)  # fmt: skip


@lru_cache
def library(*more: str) -> ctypes.CDLL:
    lib = load_runtime(*SOURCES, *more)
    lib.tokens_open.restype = ctypes.c_void_p
    for name in ("tokens_encode", "tokens_decode", "tokens_about", "words_cut"):
        getattr(lib, name).restype = ctypes.c_int64
    return lib


class CTokenizer:
    """The tables of a tokenizer, opened in C. file: write section TOKENIZER to it, and map it. more: C files."""

    def __init__(self, tokenizer: TokenizerLike, file: Path | None = None, more: tuple[str, ...] = ()) -> None:
        self.library, self.sections = library(*more), tokenizer_sections(tokenizer)
        self._tables = [aligned(each) for each in self.sections]
        if file:
            file.write_bytes(self.sections[0])
            self._tables[0] = np.memmap(file, np.uint8, "r")
        places = [part for each in self._tables for part in (pointer(each), ctypes.c_uint64(each.size))]
        mapped = ctypes.c_size_t(self._tables[0].size if file else 0)
        self.handle = ctypes.c_void_p(self.library.tokens_open(*places, tokenizer.size, mapped, None))
        assert self.handle

    def encode(self, text: str | bytes, special: bool = False, start: bool = True) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = np.empty(4 * len(data) + 8, np.int32)
        size, room = ctypes.c_size_t(len(data)), ctypes.c_int64(ids.size)
        count = self.library.tokens_encode(self.handle, data, size, special, start, pointer(ids), room)
        assert count < ids.size
        found: list[int] = ids[:count].tolist()
        return found

    def decode(self, ids: list[int]) -> str:
        tokens, out = np.array(ids, np.int32), np.empty(3 * 1024 * len(ids) + 16, np.uint8)
        size = self.library.tokens_decode(self.handle, pointer(tokens), ctypes.c_int64(len(ids)), pointer(out))
        return out[:size].tobytes().decode()

    def about(self) -> tuple[int, list[int], list[int]]:
        """BOS or -1, the tokens that end a turn, those that are never generated."""
        out = np.empty(1 << 16, np.int32)
        bos, ends, *rest = out[: self.library.tokens_about(self.handle, pointer(out))].tolist()
        return bos, rest[:ends], rest[ends + 1 :]


def cut_words(section: bytes, text: str) -> list[int]:
    """The lengths of a text's words in bytes, by section WORDS."""
    rules, data = aligned(section), text.encode()
    lengths = np.empty(len(data) + 1, np.int32)
    size, length = ctypes.c_uint64(rules.size), ctypes.c_uint64(len(data))
    count = library().words_cut(pointer(rules), size, data, length, pointer(lengths))
    assert count >= 0
    found: list[int] = lengths[:count].tolist()
    return found


def aligned(section: bytes) -> AnyArray:
    return np.frombuffer(section, np.uint8).copy()  # NumPy aligns arrays to 16 bytes

"""The C tokenizer (edge/embed/runtime/tokenizer.c) as tests call it: the same ids as edge.model.tokenizer.Tokenizer."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import numpy as np
from runtime_library import load_runtime

from edge.embed.vocabulary import tokenizer_sections
from edge.model.tokenizer import Tokenizer

RUNTIME_TESTS = Path(__file__).parent / "runtime"
SOURCES = ("tokenizer.c", "words.c", "utf8.c", "error.c", "platform.c")


@lru_cache
def library() -> ctypes.CDLL:
    lib = load_runtime(RUNTIME_TESTS / "tokens.c", *SOURCES)
    lib.tokens_open.restype = ctypes.c_void_p
    lib.tokens_encode.restype = ctypes.c_int64
    lib.tokens_decode.restype = ctypes.c_int64
    return lib


class CTokenizer:
    """The tables of a tokenizer, opened in C."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.sections = [np.frombuffer(each + bytes(64), np.uint8) for each in tokenizer_sections(tokenizer)]
        sizes = [ctypes.c_uint64(each.size - 64) for each in self.sections]
        starts = [ctypes.c_void_p(each.ctypes.data) for each in self.sections]
        self.handle = ctypes.c_void_p(
            library().tokens_open(starts[0], sizes[0], starts[1], sizes[1], tokenizer.size, None)
        )
        assert self.handle

    def encode(self, text: str | bytes, special: bool = False, start: bool = True) -> list[int]:
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        room = 4 * len(data) + 8
        ids = np.empty(room, np.int32)
        count = library().tokens_encode(
            self.handle, data, ctypes.c_size_t(len(data)), special, start, ctypes.c_void_p(ids.ctypes.data),
            ctypes.c_int64(room),
        )  # fmt: skip
        assert count < room
        found: list[int] = ids[:count].tolist()
        return found

    def decode(self, ids: list[int], split: bool = False) -> str:
        """The text, joined to whole characters after every token; split: one line for each, the rest last."""
        tokens = np.array(ids, np.int32)
        out = ctypes.create_string_buffer(3 * 1024 * (len(ids) + 1))
        size = library().tokens_decode(self.handle, ctypes.c_void_p(tokens.ctypes.data), len(ids), out)
        return out.raw[:size].decode()

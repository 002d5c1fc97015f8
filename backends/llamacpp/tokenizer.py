"""llama.cpp's own tokenizer, for models with a tokenizer unknown to edge: RWKV, PLaMo 2, SuperBPE …

Only the vocabulary is loaded. Since llama.cpp may abort the process, a child first opens the vocabulary, decodes all
tokens and encodes all kinds of characters. Its success is remembered in the cache folder under a hash of the header's
fields, of llama.cpp's version and of the child's source.
"""

from __future__ import annotations

import codecs
import ctypes
import hashlib
import os
import re
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.llamacpp.library import LOG, library, version
from edge.devices.child import run_child
from edge.errors import CacheError, EngineError, ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile, at_full_size
from edge.model.parts.prompt import joined
from edge.model.parts.text import well_formed
from edge.model.tokens.tokenizer import MARK, cut_blocks, read_suppressed
from edge.storage import cache
from edge.types import IntArray

_UNKNOWN, _CONTROL, _USER_DEFINED = 1 << 0, 1 << 3, 1 << 4  # llama_token_attr
_CHILD_BYTES = 180 << 20  # of that process, measured with 262,144 tokens: 130 MiB
_TIMEOUT = 60.0  # seconds
# Characters without a space that llama.cpp gets at a time. Its regular expressions recurse for every character of a
# word, and end the process at about 30,000 with a stack of 8 MiB.
_LONGEST_BLOCK = 8 << 10


class LlamaCppTokenizer:
    """The `edge.model.tokens.tokenizer.TokenizerLike` of llama.cpp.

    A text is encoded in blocks that end between words; a tokenizer whose tokens span words may give other ids there.
    Raises UnsupportedError for a vocabulary that llama.cpp cannot load, ModelFormatError for one whose size differs
    from the embeddings', MissingExtraError without llama.cpp.
    """

    def __init__(self, file: GGUFFile) -> None:
        library()
        _try_first(file)
        with at_full_size(file) as path:
            self._lib, self._vocabulary = open_vocabulary(self, path)
        self.size = int(self._lib.llama_vocab_n_tokens(self._vocabulary))
        if self.size > file.tensors["token_embd.weight"].shape[1]:
            raise ModelFormatError(f"{file.path}: {self.size} tokens, but another number of embeddings")
        self.bos_id, self.eos_id = (self._role(name) for name in ("bos", "eos"))
        self.add_bos = self.bos_id is not None and bool(self._lib.llama_vocab_get_add_bos(self._vocabulary))
        attributes = [self._lib.llama_vocab_get_attr(self._vocabulary, token) for token in range(self.size)]
        special = [i for i, each in enumerate(attributes) if each & (_UNKNOWN | _CONTROL | _USER_DEFINED)]
        self._special = {self.text(i): (i, bool(attributes[i] & (_UNKNOWN | _CONTROL))) for i in special}
        self.end_ids = frozenset(i for i in special if self._lib.llama_vocab_is_eog(self._vocabulary, i))
        self.suppressed = read_suppressed(file)
        # llama.cpp finds user-defined tokens in any text, also those that stand for turns.
        marks = [text for text, (_, control) in self._special.items() if not control and MARK.fullmatch(text)]
        self._marks = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None
        self.piece = lru_cache(maxsize=4096)(self._piece)
        self._space_prefix = self.decode(tokenize(self._lib, self._vocabulary, "a", special=False)).startswith(" ")

    def encode(self, text: str | Iterable[str], *, special: bool = False, start: bool = True) -> IntArray:
        """Like `Tokenizer.encode`, but llama.cpp may also put a space before a text that does not open a prompt."""
        return joined(self.encode_blocks(text, special=special, start=start))

    def encode_blocks(
        self, text: str | Iterable[str], *, special: bool = False, start: bool = True
    ) -> Iterator[IntArray]:
        for block, first in cut_blocks([text] if isinstance(text, str) else text, _LONGEST_BLOCK):
            if self._space_prefix and not (start and first):
                block = block.removeprefix(" ")  # llama.cpp puts it back
            for part in [block] if special else self._without_marks(block):
                yield tokenize(self._lib, self._vocabulary, well_formed(part), special)

    def _without_marks(self, text: str) -> Iterator[str]:
        """Split every special token after its first character, so that none is recognized."""
        at = 0
        for match in self._marks.finditer(text) if self._marks else ():
            yield text[at : match.start() + 1]
            at = match.start() + 1
        yield text[at:]

    def special_tokens(self) -> dict[str, tuple[int, bool]]:
        return dict(self._special)

    def text(self, token: int) -> str:
        if not 0 <= token < self.size:
            raise IndexError(f"token {token} is not in the vocabulary of {self.size}")
        written: bytes = self._lib.llama_vocab_get_text(self._vocabulary, token)
        return written.decode("utf-8", errors="replace")

    def _piece(self, token: int) -> bytes:
        return piece_of(self._lib, self._vocabulary, token)

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(self.piece(int(token)) for token in tokens).decode("utf-8", errors="replace")

    def stream_decoder(self) -> codecs.IncrementalDecoder:
        return codecs.getincrementaldecoder("utf-8")(errors="replace")

    def _role(self, name: str) -> int | None:
        token = getattr(self._lib, f"llama_vocab_{name}")(self._vocabulary)
        return int(token) if 0 <= token < self.size else None


def open_vocabulary(owner: object, path: Path) -> tuple[Any, Any]:
    """Open a model's vocabulary, freed with its owner; also return the library. Raises UnsupportedError."""
    lib = library()
    parameters = lib.llama_model_default_params()
    parameters.vocab_only = True
    LOG.clear()
    model = lib.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise UnsupportedError(f"{path}: llama.cpp does not know its tokenizer either ({LOG.reason()})")
    weakref.finalize(owner, lib.llama_model_free, model)
    return lib, lib.llama_model_get_vocab(model)


def tokenize(lib: Any, vocabulary: Any, text: str, special: bool) -> IntArray:
    """Token ids without BOS and EOS, int32 [n]."""
    data = text.encode()
    count = len(data) + 16
    while True:
        ids = np.empty(count, np.int32)
        pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        found = int(lib.llama_tokenize(vocabulary, data, len(data), pointer, count, False, special))
        if found >= 0:
            return np.array(ids[:found])
        count = -found  # some normalizers make a text longer


def piece_of(lib: Any, vocabulary: Any, token: int) -> bytes:
    """The bytes that a token adds to a text."""
    count = 64
    while True:
        buffer = ctypes.create_string_buffer(count)
        found = int(lib.llama_token_to_piece(vocabulary, token, buffer, count, 0, False))
        if found >= 0:
            return buffer.raw[:found]
        count = -found


def _try_first(file: GGUFFile) -> None:
    """Open the vocabulary in a child process, unless that succeeded before. Raises UnsupportedError."""

    def write(path: Path) -> None:
        _try(file)
        path.write_text("llama.cpp has opened this vocabulary\n", encoding="ascii")

    try:
        cache.find_or_make("tokenizers", _key(file), ".tried", write, about=f"tokenizer of {file.path.name}")
    except (CacheError, OSError):  # a cache folder that cannot be used
        _try(file)


def _try(file: GGUFFile) -> None:
    try:
        with at_full_size(file) as path:
            run_child(
                "edge.backends.llamacpp.tokenizer_child", str(path), lambda message: None,
                failure="llama.cpp gave up", environment={"GGML_NO_BACKTRACE": "1"}, timeout=_TIMEOUT,
                takes=_CHILD_BYTES, purpose="reads the tokenizer",
            )  # fmt: skip
    except EngineError as error:
        raise UnsupportedError(f"{file.path}: llama.cpp cannot read its tokenizer ({error})") from None


def _key(file: GGUFFile) -> str:
    digest = hashlib.sha256(f"{version()} {file.metadata.get('general.architecture')}".encode())
    for name in ("tokenizer.py", "tokenizer_child.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    for key in sorted(file.spans):
        digest.update(key.encode())
        for part in file.field_parts(key):
            digest.update(part)
    return digest.hexdigest()[:32]

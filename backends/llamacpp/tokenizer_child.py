"""The child process in which llama.cpp opens a vocabulary for the first time, since it may abort."""

from __future__ import annotations

from pathlib import Path

from edge.backends.llamacpp.tokenizer import open_vocabulary, piece_of, tokenize
from edge.devices.child import serve


class _Owner:
    """Keeps a vocabulary alive."""


def try_vocabulary(path: str) -> int:
    """Decode all tokens and encode all characters up to U+FFFF. Returns the number of tokens; raises
    UnsupportedError."""
    owner = _Owner()
    lib, vocabulary = open_vocabulary(owner, Path(path))
    size = int(lib.llama_vocab_n_tokens(vocabulary))
    for token in range(size):
        piece_of(lib, vocabulary, token)
    characters = "".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0x10000))))
    for special in (False, True):
        for start in range(0, len(characters), 1000):
            tokenize(lib, vocabulary, characters[start : start + 1000], special)
    return size


if __name__ == "__main__":
    serve(lambda request, say: try_vocabulary(request))

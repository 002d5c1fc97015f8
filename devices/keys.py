"""Keys of what is derived and kept: hashes of all that it depends on.

By BLAKE2b of the interpreter itself: importing hashlib loads OpenSSL, which takes 3 MiB of every process.
"""

from __future__ import annotations

from _blake2 import blake2b

__all__ = ["Hasher", "blake2b", "key_of"]


def key_of(text: str | bytes, size: int = 32) -> str:
    """The key of a text, `size` hexadecimal digits."""
    return Hasher(text).key(size)


class Hasher:
    """Hashes parts one after another."""

    def __init__(self, text: str | bytes = b"") -> None:
        self._hash = blake2b()
        self.update(text)

    def update(self, part: str | bytes | memoryview) -> None:
        self._hash.update(part.encode() if isinstance(part, str) else part)

    def key(self, size: int = 32) -> str:
        return self._hash.hexdigest()[:size]

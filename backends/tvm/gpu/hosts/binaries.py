"""Compiled kernels in the cache folder, since a phone takes seconds to compile a model's."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from edge.errors import CacheError
from edge.storage import cache

_SUFFIX = ".bin"


def find_binary(compiler: str, source: str) -> bytes | None:
    """The cached binary. compiler: everything besides the source that it depends on: device, driver, options."""
    with suppress(CacheError, OSError):
        path = cache.find("kernels", _key(compiler, source), _SUFFIX)
        return path.read_bytes() if path else None
    return None


def has_binary(compiler: str, source: str) -> bool:
    """Whether `find_binary` finds one."""
    with suppress(CacheError):
        return cache.find("kernels", _key(compiler, source), _SUFFIX) is not None
    return False


def keep_binary(compiler: str, source: str, binary: bytes) -> None:
    """Cache a binary, unless the cache folder cannot be written."""
    with suppress(CacheError), cache.create("kernels", _key(compiler, source), _SUFFIX, about=compiler) as temporary:
        temporary.write_bytes(binary)


def _key(compiler: str, source: str) -> str:
    return hashlib.sha256(f"{compiler}\n{source}".encode()).hexdigest()[:32]

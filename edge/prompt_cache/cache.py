"""The prompt cache: the prefix that a prompt shares with earlier ones is not run again.

    cache = PromptCache("~/.cache/prompts", size="1GiB")
    reused = cache.restore(kv, tokens, most)   # before prefill, into an empty KV cache
    cache.store(kv, tokens)                    # afterwards, as long as nothing has been evicted

Blocks are searched in memory (`tree.py`), then in the folder (`disk.py`). The folder holds the prompts'
tokens and their keys and values: who can read it can read the prompts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np

from edge.backends.base import CapacityError, KVCache, KVState
from edge.budget import parse_bytes
from edge.errors import EdgeError, InputError
from edge.prompt_cache.disk import BlockFiles
from edge.prompt_cache.tree import BLOCK, Block, PrefixTree, prefix_name, root_name
from edge.types import IntArray

DEFAULT_SIZE = "1GiB"
_WAIT_S = 1.0  # for the lock, which is never free if a signal came in the middle of `store`

_log = logging.getLogger("edge")


class PromptCache:
    """KV rows of earlier prompts, in a folder or in memory or both; several sessions and processes may share them.

    size: the most bytes of files in the folder. memory: the most bytes of blocks in this process.
    Raises InputError for a folder that cannot be used.
    """

    def __init__(
        self, folder: str | Path | None = None, *, size: str | int = DEFAULT_SIZE, memory: str | int | None = None
    ) -> None:
        if folder is None and memory is None:
            raise InputError("a prompt cache needs a folder, or memory")
        self.memory = 0 if memory is None else parse_bytes(memory, "the prompt cache's memory")
        limit = parse_bytes(size, "--prompt-cache-size")
        self._tree = PrefixTree(self.memory)
        self._files = None if folder is None else BlockFiles(Path(folder).expanduser(), limit)
        self._tiers: list[PrefixTree | BlockFiles] = [self._tree] if self.memory else []
        self._tiers += [self._files] if self._files else []
        self._lock = threading.Lock()

    def restore(self, kv: KVCache, tokens: IntArray, most: int) -> int:
        """Restore rows of a prompt's first tokens into an empty cache, at most `most`. Returns their number."""
        parent, length = root_name(kv.key), 0
        with self._lock, self._holding() as hold:
            while length < most and (found := self._find(parent, tokens[length:])):
                tier, block = found
                end = length + block.tokens.size
                try:
                    kv.append(KVState(kv.key, np.arange(length, end, dtype=np.int32), end, block.data))
                except CapacityError:
                    break
                except EdgeError as error:
                    _log.warning("ignored rows of the prompt cache: %s", error)
                    tier.drop(block)
                    break
                if self.memory and tier is not self._tree:
                    self._tree.put(block)
                length += min(block.agreement(tokens[length:]), most - length)
                if length < end:
                    kv.truncate(length)
                    break
                parent = block.name
                hold(parent)
        return length

    def store(self, kv: KVCache, tokens: IntArray) -> None:
        """Store a copy of the cache's first rows, those of `tokens`; blocks that exist are only marked as used.

        Nothing may have been evicted. Failures are logged: they must not fail an answer.
        """
        parent, tiers = root_name(kv.key), self._tiers
        try:
            with self._lock, self._holding() as hold, self._writing():
                for first in range(0, tokens.size, BLOCK):
                    part = tokens[first : first + BLOCK]
                    if lacking := [tier for tier in tiers if not tier.has(parent, part)]:
                        block = Block(parent, part, kv.save(first, first + part.size).data)
                        full = [tier for tier in lacking if not tier.put(block)]
                        tiers = [tier for tier in tiers if tier not in full]  # a block is useless without its parent
                    if not tiers:
                        return
                    parent = prefix_name(parent, part)
                    hold(parent)
        except (OSError, EdgeError) as error:
            _log.warning("the prompt cache could not be written: %s", error)

    def shrink(self, memory: int) -> None:
        """Reduce the limit of blocks in memory; files stay."""
        if memory < self.memory and self._lock.acquire(timeout=_WAIT_S):
            self._tree.shrink(memory)
            self.memory = memory
            self._lock.release()

    def _find(self, parent: str, tokens: IntArray) -> tuple[PrefixTree | BlockFiles, Block] | None:
        """The block that agrees with most tokens, and its place."""
        best, most = None, 0
        for tier in self._tiers:
            block = tier.find(parent, tokens) if most < min(tokens.size, BLOCK) else None
            if block and block.agreement(tokens) > most:
                best, most = (tier, block), block.agreement(tokens)
        return best

    @contextmanager
    def _holding(self) -> Iterator[Callable[[str], None]]:
        """A function that keeps a prompt's blocks in memory while others are put there."""
        held: list[str] = []

        def hold(name: str) -> None:
            held.append(name)
            self._tree.hold(name)

        try:
            yield hold
        finally:
            self._tree.release(held)

    def _writing(self) -> AbstractContextManager[None]:
        return self._files.writing() if self._files else nullcontext()

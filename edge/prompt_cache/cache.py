"""The prompt cache: reuses the KV rows of a prefix shared with earlier prompts.

    cache = PromptCache("~/.cache/prompts", size="1GiB")
    reused = cache.restore(kv, tokens, most)   # before prefill, into an empty KV cache
    cache.store(kv, tokens)                    # afterwards, as long as nothing has been evicted

Blocks are searched in memory (`tree.py`), then in the folder (`disk.py`). An engine with a tail (`KVState.tail`) cannot
continue from rows alone: tails are stored as additional blocks, after the whole blocks that `ends` names. The folder
holds the prompts' tokens, keys and values: whoever can read it can read the prompts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge.backends.kv_cache import CapacityError, KVCache, KVState
from edge.budget import parse_bytes
from edge.devices.output import check_path
from edge.errors import EdgeError, InputError
from edge.prompt_cache.cost import Cost
from edge.prompt_cache.disk import BlockFiles
from edge.prompt_cache.tree import BLOCK, SNAPSHOT_STEP, Block, PrefixTree, prefix_name, root_name
from edge.types import IntArray

DEFAULT_SIZE = "1GiB"
_APART = 256  # tokens between stored ends of messages: a tail may take as much memory as these rows
_WAIT_S = 1.0  # patience with the lock: a signal handler that interrupted `store` would wait forever

_UNKNOWN = Cost()

_log = logging.getLogger("edge")


class PromptCache:
    """KV rows of earlier prompts, in a folder, in memory, or both; several sessions and processes may share it.

    size: limit of the folder in bytes. memory: limit of the blocks in this process, in bytes.
    Raises InputError for a folder that cannot be used.
    """

    def __init__(
        self, folder: str | Path | None = None, *, size: str | int = DEFAULT_SIZE, memory: str | int | None = None
    ) -> None:
        if folder is None and memory is None:
            raise InputError("a prompt cache needs a folder, or memory")
        if folder is not None:
            check_path("folder", folder)
        self.memory = 0 if memory is None else parse_bytes(memory, "the prompt cache's memory")
        limit = parse_bytes(size, "--prompt-cache-size")
        self._tree = PrefixTree(self.memory)
        self._files = None if folder is None else BlockFiles(Path(folder).expanduser(), limit)
        self._tiers: list[PrefixTree | BlockFiles] = [self._tree] if self.memory else []
        self._tiers += [self._files] if self._files else []
        self._lock = threading.Lock()

    def restore(
        self, kv: KVCache, tokens: IntArray, most: int, cost: Cost = _UNKNOWN, positions: IntArray | None = None
    ) -> int:
        """Restore the rows of at most `most` first tokens into an empty cache. Returns their number. cost: as for
        `store`. positions: of the tokens, int32 [n]; None: consecutive ones."""
        numbers = np.arange(tokens.size, dtype=np.int32) if positions is None else positions
        parent, length = root_name(kv.key), 0
        with self._lock, self._holding() as hold:
            tail = None
            if kv.has_tail:
                most, tail = self._find_tail(parent, tokens[: max(0, most)])
            while length < most and (found := self._find(parent, tokens[length:])):
                tier, block = found
                end = length + block.tokens.size
                if tail is not None and block.agreement(tokens[length:]) < BLOCK:
                    break
                last = tail if end == most else None
                try:
                    own = numbers[length:end]
                    if own.size < block.tokens.size:  # the block goes on behind these tokens, which share its beginning
                        own = np.append(own, own[-1] + 1 + np.arange(block.tokens.size - own.size, dtype=np.int32))
                    kv.append(KVState(kv.key, own, int(own[-1]) + 1, block.data, last))
                except CapacityError:
                    break
                except EdgeError as error:
                    _log.warning("ignored rows of the prompt cache: %s", error)
                    tier.drop(block)
                    break
                if self.memory and tier is not self._tree:
                    self._tree.put(replace(block, cost=cost.between(length, end)))
                length += min(block.agreement(tokens[length:]), most - length)
                if length < end:
                    kv.truncate(length)
                    break
                parent = block.name
                hold(parent)
        if tail is not None and length < most:  # blocks before the tail were evicted since it was stored
            kv.truncate(0)
            return 0
        return length

    def known(self, kv: KVCache, tokens: IntArray) -> int:
        """The length of the longest prefix of `tokens` from whose rows a prompt can go on."""
        parent, length = root_name(kv.key), 0
        with self._lock:
            if kv.has_tail:
                return self._find_tail(parent, tokens)[0]
            while length < tokens.size and (found := self._find(parent, tokens[length:])):
                block = found[1]
                agreed = block.agreement(tokens[length:])
                length += agreed
                if agreed < block.tokens.size:
                    break
                parent = block.name
        return length

    def ends(self, kv: KVCache, tokens: IntArray, system: int = 0, messages: Iterable[int] = ()) -> list[int]:
        """Token counts after which prefill should pause and call `store`, so that tails are stored: the last whole
        block of the prompt, and of its first `system` tokens, with which conversations begin; the end of the blocks
        shared with earlier prompts; every `SNAPSHOT_STEP`; and ends of `messages`, which other conversations may share,
        at least `_APART` apart. Empty for a cache without a tail."""
        if not kv.has_tail:
            return []
        parent, shared = root_name(kv.key), 0
        with self._lock:
            while shared + BLOCK <= tokens.size:
                part = tokens[shared : shared + BLOCK]
                if not any(tier.has(parent, part) for tier in self._tiers):
                    break
                parent, shared = prefix_name(parent, part), shared + BLOCK
        steps = {each for each in range(SNAPSHOT_STEP, tokens.size, SNAPSHOT_STEP) if each > shared}
        before = shared
        for end in (each // BLOCK * BLOCK for each in messages if each <= tokens.size):
            if end - before >= _APART:
                before = end
                steps.add(end)
        return sorted({shared, *(size // BLOCK * BLOCK for size in (system, tokens.size)), *steps} - {0})

    def store(self, kv: KVCache, tokens: IntArray, cost: Cost = _UNKNOWN) -> None:
        """Store a copy of the cache's first rows, those of `tokens`; existing blocks are only marked as used. cost: of
        recomputing tokens, which orders evictions from memory; the folder evicts the least recently used blocks.

        The KV cache must not have evicted rows. Failures are logged, not raised: they must not fail an answer.
        """
        parent, tiers = root_name(kv.key), self._tiers
        try:
            with self._lock, self._holding() as hold, self._writing():
                for first in range(0, tokens.size, BLOCK):
                    part = tokens[first : first + BLOCK]
                    if lacking := [tier for tier in tiers if not tier.has(parent, part)]:
                        end = first + part.size
                        block = Block(parent, part, kv.save(first, end).data, cost.between(first, end))
                        full = [tier for tier in lacking if not tier.put(block)]
                        tiers = [tier for tier in tiers if tier not in full]  # a block is useless without its parent
                    if not tiers:
                        return
                    before, parent = parent, prefix_name(parent, part)
                    hold(parent)
                if kv.has_tail and kv.length == tokens.size and tokens.size and tokens.size % BLOCK == 0:
                    self._store_tail(kv, _tail_name(before), part, tiers, cost.between(0, tokens.size))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            _log.warning("the prompt cache could not be written: %s%s", where, error.strerror or error)
        except EdgeError as error:
            _log.warning("the prompt cache could not be written: %s", error)

    def shrink(self, memory: int) -> None:
        """Reduce the memory limit, in bytes; files stay."""
        if memory < self.memory and self._lock.acquire(timeout=_WAIT_S):
            self._tree.shrink(memory)
            self.memory = memory
            self._lock.release()

    def _store_tail(
        self, kv: KVCache, parent: str, part: IntArray, tiers: list[PrefixTree | BlockFiles], cost: float
    ) -> None:
        lacking = [tier for tier in tiers if not tier.has(parent, part)]
        if lacking and (tail := kv.save(kv.length).tail) is not None:
            for tier in lacking:
                tier.put(Block(parent, part, tail, cost))  # without the tail, the rows before it are useless

    def _find_tail(self, parent: str, tokens: IntArray) -> tuple[int, bytes | memoryview | None]:
        """The longest prefix of these tokens with a stored tail: its length and the tail; 0 and None if there is
        none."""
        blocks = [tokens[at : at + BLOCK] for at in range(0, tokens.size // BLOCK * BLOCK, BLOCK)]
        parents = [parent]
        for block in blocks:
            parents.append(prefix_name(parents[-1], block))
        for count in range(len(blocks), 0, -1):
            part, parent = blocks[count - 1], _tail_name(parents[count - 1])
            if (found := self._find(parent, part)) and found[1].agreement(part) == BLOCK:
                return count * BLOCK, found[1].data
        return 0, None

    def _find(self, parent: str, tokens: IntArray) -> tuple[PrefixTree | BlockFiles, Block] | None:
        """The block that shares the longest prefix with the tokens, and its place."""
        best, most = None, 0
        for tier in self._tiers:
            block = tier.find(parent, tokens) if most < min(tokens.size, BLOCK) else None
            if block and block.agreement(tokens) > most:
                best, most = (tier, block), block.agreement(tokens)
        return best

    @contextmanager
    def _holding(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that holds a prompt's blocks in memory until the context ends."""
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


def _tail_name(parent: str) -> str:
    """The parent name under which the tail after a block is stored."""
    return root_name(f"{parent} tail")

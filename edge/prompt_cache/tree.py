"""A radix tree over token ids that holds KV rows of prompts in memory, shared between prompts with a common prefix.

Without eviction, rows depend only on the tokens before them. They are kept in blocks of up to BLOCK tokens, each named
by the prefix that it ends: prompts share the blocks of their common prefix, and have blocks of their own after it. A
block never changes (copy on write). Only a prompt's last block is shorter than BLOCK; a prompt that continues it gets a
longer copy, which replaces it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import islice

import numpy as np

from edge.devices.keys import blake2b
from edge.records import dataclass
from edge.types import IntArray

BLOCK = 64  # tokens. Shorter blocks make more files; longer blocks store more rows twice where prompts diverge.
SNAPSHOT_STEP = 2048  # tokens of a long prompt after which its tail is stored, too: a multiple of BLOCK
_NAME_BYTES = 12
_COMPARED = 256  # least recently used blocks, of which the one of least worth is evicted


@dataclass(frozen=True, eq=False)
class Block:
    """The rows of 1 to BLOCK tokens after a prefix."""

    parent: str  # name of the prefix
    tokens: IntArray  # int32 [n]
    data: bytes | memoryview  # `KVState.data`
    cost: float = 1.0  # of running its tokens again

    @cached_property
    def name(self) -> str:
        return prefix_name(self.parent, self.tokens)

    @property
    def nbytes(self) -> int:
        return len(self.data) + self.tokens.nbytes

    def agreement(self, tokens: IntArray) -> int:
        return agreement(self.tokens, tokens)


def root_name(key: str) -> str:
    """The name of the empty prefix for `key` (`KVCache.key`): a model, engine and settings."""
    return blake2b(key.encode(), digest_size=_NAME_BYTES).hexdigest()


def prefix_name(parent: str, tokens: IntArray) -> str:
    """The name, in hexadecimal, of the prefix `parent` followed by `tokens`."""
    content = bytes.fromhex(parent) + np.ascontiguousarray(tokens, np.int32).tobytes()
    return blake2b(content, digest_size=_NAME_BYTES).hexdigest()


def agreement(one: IntArray, other: IntArray) -> int:
    """The length of the common prefix."""
    count = min(one.size, other.size)
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if different.size else count


class PrefixTree:
    """Blocks in memory, at most `limit` bytes. Evicts the block of least worth first: cost of recomputing it ÷ bytes ×
    likelihood of use, which falls with the number of other blocks' uses since its last one. Blocks of equal cost per
    byte are thus evicted least recently used first. Leaves go before their parents; held blocks stay."""

    def __init__(self, limit: int) -> None:
        self.limit, self.nbytes = limit, 0
        self._blocks: OrderedDict[str, Block] = OrderedDict()  # by name, the least recently used first
        self._children: defaultdict[str, list[Block]] = defaultdict(list)  # by the name of their parent
        self._holders: Counter[str] = Counter()
        self._uses = 0
        self._used: dict[str, int] = {}  # by name: `_uses` when the block was used last

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, parent: str, tokens: IntArray) -> Block | None:
        """The block after `parent` that shares the longest prefix with `tokens`, or None. Counts as a use."""
        best = max(self._children.get(parent, ()), key=lambda block: block.agreement(tokens), default=None)
        if best is None or not best.agreement(tokens):
            return None
        self._use(best)
        return best

    def has(self, parent: str, tokens: IntArray) -> bool:
        """Whether a block after `parent` begins with all of `tokens` (at most BLOCK). Counts as a use."""
        block = self.find(parent, tokens)
        return block is not None and block.agreement(tokens) == tokens.size

    def put(self, block: Block) -> bool:
        """Insert a block. False if there is no room, because all others are held or have children."""
        if self.has(block.parent, block.tokens):
            return True
        if not self._make_room(block.nbytes, block.parent):
            return False
        for each in self._children[block.parent][:]:
            if each.agreement(block.tokens) == each.tokens.size and not self.references(each.name):
                self.drop(each)
        self._blocks[block.name] = block
        self._use(block)
        self._children[block.parent].append(block)
        self.nbytes += block.nbytes
        return True

    def shrink(self, limit: int) -> None:
        """Reduce the limit and evict down to it. Blocks that are held now are evicted by a later insert."""
        self.limit = limit
        self._make_room(0)

    def _make_room(self, nbytes: int, keep: str = "") -> bool:
        """Evict blocks other than `keep` until this many bytes fit. False if that is impossible."""
        while self.nbytes + nbytes > self.limit:
            free = (each for each in self._blocks.values() if not self.references(each.name) and each.name != keep)
            victim = min(islice(free, _COMPARED), key=self._worth, default=None)
            if victim is None:
                return False
            self.drop(victim)
        return True

    def _worth(self, block: Block) -> float:
        return block.cost / block.nbytes / (1 + self._uses - self._used[block.name])

    def _use(self, block: Block) -> None:
        self._uses += 1
        self._used[block.name] = self._uses
        self._blocks.move_to_end(block.name)

    def references(self, name: str) -> int:
        """The number of references to a block: its holders and its children."""
        return self._holders[name] + len(self._children.get(name, ()))

    def hold(self, name: str) -> None:
        """Protect a block from eviction until it has been released as often as held."""
        self._holders[name] += 1

    def release(self, names: Iterable[str]) -> None:
        self._holders.subtract(names)
        self._holders = +self._holders

    def drop(self, block: Block) -> None:
        """Remove a block. Its children are unreachable until it is inserted again."""
        if self._blocks.pop(block.name, None) is None:
            return
        self._children[block.parent].remove(block)
        if not self._children[block.parent]:
            del self._children[block.parent]
        self.nbytes -= block.nbytes
        del self._used[block.name]

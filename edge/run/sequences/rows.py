"""The rows of a sequence in the KV cache, the tokens that they were made of, and ways to use them again: the prompt
cache, snapshots, marks, other sequences with the same beginning, and a rerun after preemption."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from edge.backends.base import Engine
from edge.backends.importance import RowImportance
from edge.backends.kv_cache import KVState, RewindError, end_of
from edge.kv import make_policy
from edge.kv.policy import EVERY
from edge.model.parts.prompt import Prompt
from edge.plan.candidates import EVICTED_SHARE
from edge.plan.plan import Plan
from edge.prompt_cache.cost import Cost
from edge.prompt_cache.tree import BLOCK, SNAPSHOT_STEP, agreement
from edge.run.sequences.eviction import evict
from edge.run.sequences.snapshots import Mark, Outline, Snapshots
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.model.parts.given import GivenRows
    from edge.prompt_cache.cache import PromptCache
    from edge.run.sequences.whole_pictures import RowPictures


class SequenceRows:
    """The rows that a `TokenSequence` has run. The plan's policy evicts some; the prompt cache shares those of prompts.

    fed: tokens of all rows, if none has been evicted. again: tokens whose rows were dropped, and have to run again.
    evicted: the number of evicted rows. changes: whether rows of a short text are not those of a long one.
    """

    def __init__(
        self, engine: Engine, plan: Plan, prompt_cache: PromptCache | None, learned: RowImportance | None
    ) -> None:
        """learned: the fitted importance of rows, for policies that need it."""
        self.engine, self.prompt_cache, self._plan, self._learned = engine, prompt_cache, plan, learned
        self._cost = Cost.of_model(engine.spec)  # of recomputing rows that the prompt cache evicts
        self.policy = make_policy(plan.kv_policy, plan.sinks, keep=plan.sinks)
        self.snapshots = Snapshots(plan.snapshots if engine.kv.has_tail else 0)
        self.changes = engine.kv.foresight > 0
        self._forget()

    def _forget(self) -> None:
        self.snapshots.drop(0)
        self.fed, self.again, self.evicted = array("i"), array("i"), 0
        self.pictures: RowPictures | None = None  # of rows, once there may be some
        self._outline = Outline()  # of the last prompt
        self._ends = list[int]()  # row counts at which to store the prompt in the prompt cache
        self._stops = list[int]()  # row counts at which others take the rows and the tail of the running prompt
        self.prompts_end: int | None = None  # tokens of `fed` up to the end of the last prompt; None while one runs

    def reset(self, shared: int) -> None:
        """Empty the KV cache, except the first rows, which the next prompt shares."""
        self.engine.kv.truncate(shared)
        fed = self.fed[:shared]
        self._forget()
        self.fed = fed

    def begin(self, outline: Outline) -> None:
        """Begin to run a prompt."""
        self.prompts_end, self._outline, self._stops = None, outline, []

    def see(self, given: GivenRows | None) -> None:
        """Keep pictures among these rows undivided."""
        if given is not None and given.has_pictures and self.pictures is None:
            from edge.run.sequences.whole_pictures import RowPictures

            self.pictures = RowPictures()
        if self.pictures:
            self.pictures.given = given

    @property
    def known(self) -> IntArray:
        """The tokens of rows, as far as they are known, and those that have to run again, int32 [n]."""
        since = self.pictures.since if self.pictures else array("i")
        return np.array(self.fed + self.again + since, np.int32)

    def add(self, tokens: IntArray) -> None:
        """Note the tokens of new rows."""
        if not self.evicted:
            self.fed.frombytes(tokens.astype(np.int32, copy=False).tobytes())
        elif self.pictures:
            self.pictures.since.frombytes(tokens.astype(np.int32, copy=False).tobytes())

    def drop(self, count: int) -> None:
        """Drop the last rows."""
        self.engine.kv.truncate(self.engine.kv.length - count)
        del self.fed[-count:]
        if self.evicted and self.pictures:
            self.pictures.drop(count)

    def cut(self, rows: int, end: KVState | None) -> None:
        """Keep the first `rows`. end: the saved end of those rows, if the cache has a tail. Raises RewindError."""
        dropped = self.engine.kv.length - rows
        self.engine.kv.truncate(rows, end)
        if self.evicted and self.pictures:
            self.pictures.drop(dropped)
        self.snapshots.drop(rows + 1)
        self.fed = self.fed[:rows]

    # Eviction

    def make_room(self, count: int) -> bool:
        """As `Session.make_room`."""
        kv = self.engine.kv
        if count <= kv.free:
            return True
        if not self.policy.evicts or count > kv.capacity:
            return False
        self.shrink(kv.capacity - max(count, min(self._plan.evict_step, max(1, kv.capacity // EVICTED_SHARE))))
        return True

    def shrink(self, budget: int) -> None:
        """As `Session.shrink`."""
        kv = self.engine.kv
        if kv.length <= budget or not self.policy.evicts:
            return
        self.remember()
        context = self.engine.spec.context
        self.evicted += evict(kv, self.policy, budget, context, self._learned, self.pictures, self.fed)
        if self.evicted:
            self.fed = array("i")
        elif self.pictures:
            self.pictures.clear()
        self.snapshots.drop(0)

    # Rows of other sequences

    def shared(self, tokens: IntArray) -> int:
        """The number of first rows that a prompt that begins with these tokens shares with this sequence."""
        kv = self.engine.kv
        count = self._common(np.frombuffer(self.fed, np.int32)[: kv.length], tokens)
        return count if count >= kv.earliest else 0

    def shared_out(self, tokens: IntArray) -> int:
        """As `shared`, for another sequence to take: with a tail, all rows or none."""
        kv = self.engine.kv
        count = self.shared(tokens)
        return count if count == kv.length or not kv.has_tail else 0

    def is_ahead_of(self, tokens: IntArray, running: Prompt) -> bool:
        """Whether the rest of the running prompt will make rows that a prompt of these tokens shares."""
        kv, common = self.engine.kv, self._coming(tokens, running)
        if kv.has_tail:  # by the prompt cache, or where the running prompt waits for that
            return any(kv.length < end <= common for end in [*self._ends, *self._stops])
        return common > kv.length

    def wait_for(self, tokens: IntArray, running: Prompt) -> None:
        """Where a cache has a tail, stop the running prompt behind the beginning that a prompt of these tokens shares,
        so that another sequence can take both there."""
        if self.engine.kv.has_tail and running.waiting <= self.engine.kv.free:  # evictions come where they would
            self._stops.append(self._coming(tokens, running))

    @property
    def waits(self) -> bool:
        """Whether the running prompt is at a place of `wait_for`."""
        return self.engine.kv.length in self._stops

    def _coming(self, tokens: IntArray, running: Prompt) -> int:
        """The number of first rows that a prompt of these tokens shares with the running prompt, once that was run."""
        text = np.concatenate([np.array(self.fed, np.int32), running.peek(max(0, tokens.size - len(self.fed)))])
        return self._common(text, tokens)

    def _common(self, text: IntArray, tokens: IntArray) -> int:
        """The number of a prompt's first tokens whose rows are those of `text`. Never all: the last token is run."""
        kv = self.engine.kv
        fits = len(self.fed) == kv.length and tokens.size <= kv.capacity  # else evictions would come at other times
        if not fits or self.evicted or self.changes or self.policy.needs.queries or not text.size:
            return 0
        return min(agreement(text, tokens), max(0, tokens.size - 1))

    def take(self, other: SequenceRows, count: int) -> None:
        """Append another sequence's rows after these, up to row `count`. These tokens must be a prefix of its own."""
        kv = self.engine.kv
        for first in range(kv.length, count, BLOCK):
            last = min(first + BLOCK, count)
            kv.append(other.engine.kv.save(first, last))
            self.fed.extend(other.fed[first:last])

    def give_up(self) -> None:
        """Drop all rows, none of which has been evicted; they have to run `again`."""
        self.again, self.fed = self.fed + self.again, array("i")
        self.engine.kv.truncate(0)
        self.snapshots.drop(0)

    # Ways back

    def mark(self, left: IntArray, *, hold: bool) -> Mark:
        """As `Session.mark`. left: tokens that have not been run, int32 [n]."""
        kv = self.engine.kv
        self.snapshots.take(kv)
        return Mark(kv.length, self.evicted, left, self.prompts_end, end_of(kv) if hold else None)

    def rewind(self, mark: Mark) -> IntArray | None:
        """As `Session.rewind`. Returns the tokens before the mark that have to run again, int32 [n]; None where that is
        impossible."""
        kv = self.engine.kv
        if self.evicted != mark.evicted or kv.length < mark.rows or (mark.rows and self.policy.needs.queries):
            return None
        rows, end = mark.rows, mark.end
        if end is None and 0 < rows < min(kv.earliest, kv.length):
            rows, end = self.snapshots.latest(rows)
            if end is None or (rows < mark.rows and self.evicted):  # then the tokens in between are unknown
                return None
        again = np.array(self.fed[rows : mark.rows], np.int32)
        try:
            self.cut(rows, end)
        except RewindError:  # rows have changed their form since
            return None
        self.prompts_end = mark.prompts_end
        return again

    def beginning(self, prompt: Prompt) -> int:
        """The number of first rows to keep for a prompt, fewer than its tokens: at least one is run for its logits."""
        kv = self.engine.kv
        tokens = prompt.peek(min(len(self.fed), max(0, prompt.waiting - 1)))
        rows = agreement(np.array(self.fed[: tokens.size], np.int32), tokens)
        if self.prompt_cache is not None and self.prompt_cache.known(kv, prompt.peek(kv.capacity)[:-1]) > rows:
            return 0  # the prompt cache has a longer prefix
        return 0 if self.evicted else rows

    # The prompt cache

    def restore(self, prompt: Prompt, step: int, given: GivenRows | None) -> int:
        """Take a prompt's first rows from the prompt cache. Returns their number. step: tokens per pass of the prompt.
        given: the rows of ids beyond the vocabulary.

        The last token runs for its logits, and as many as the policy observes before an eviction run, too: restored
        rows have no attention. A policy that counts the attention of all queries must observe the whole prompt.
        """
        kv, queries = self.engine.kv, self.policy.needs.queries
        kv.announce(prompt.waiting)  # decides which stored rows fit this text
        if self.prompt_cache is None or queries == EVERY:
            return 0
        tokens = prompt.peek(kv.capacity)
        most = min(prompt.waiting, kv.capacity) - max(1, queries, self._outline.opening or 0)
        if prompt.waiting > kv.capacity:  # chunks begin, and rows are evicted, where they would be without the cache
            while (known := self.prompt_cache.known(kv, tokens[: max(0, most)])) % step:
                most = known - known % step
            most = min(most, known)
        positions = given.numbers(tokens) if given else None
        reused = self.prompt_cache.restore(kv, tokens, most, self._cost, positions)
        prompt.advance(reused)
        self.fed = array("i", tokens[:reused].tolist())
        self.keep_place(prompt)
        return reused

    def choose_ends(self, prompt: Prompt, step: int, given: GivenRows | None) -> None:
        """Choose the row counts at which the running prompt is stored in the prompt cache. step, given: as for
        `restore`."""
        kv, queries = self.engine.kv, self.policy.needs.queries
        self._ends = []
        if self.prompt_cache is None or self.evicted or queries == EVERY or not kv.has_tail:
            return
        tokens = np.concatenate([np.array(self.fed, np.int32), prompt.peek(kv.free)])
        step = step if prompt.waiting > kv.free else 1  # evictions come where they would
        known = tokens[: max(0, tokens.size - max(1, queries))]
        ends = self.prompt_cache.ends(kv, known, self._outline.system, prompt.ends)
        undivided = [span for span in given.pictures(tokens) if span.content.whole] if given else []
        ends = [end for end in ends if not any(span.start < end < span.end for span in undivided)]
        self._ends = [end for end in ends if end > kv.length and end % step == 0]

    def until_place(self, prompt: Prompt) -> int:
        """Tokens of a prompt up to the next place at which `keep_place` stores rows or takes a snapshot."""
        kv = self.engine.kv
        places = [end - kv.length for end in [*self._ends[:1], *self._stops]]
        if self.snapshots.most and prompt.waiting <= kv.free:  # evictions come where they would
            places += [SNAPSHOT_STEP - kv.length % SNAPSHOT_STEP, prompt.waiting - (self._outline.opening or 0)]
        return min((each for each in places if each > 0), default=prompt.waiting)

    def keep_place(self, prompt: Prompt) -> None:
        """Store rows or take a snapshot, if a running prompt is at such a place."""
        kv = self.engine.kv
        if self._ends and kv.length == self._ends[0]:
            del self._ends[0]
            self.remember()
        if (prompt.ended and prompt.waiting == self._outline.opening) or kv.length % SNAPSHOT_STEP == 0:
            self.snapshots.take(kv)

    def remember(self) -> None:
        """Store the rows of all prompts so far, and of the answers between them, in the prompt cache."""
        if self.prompt_cache is not None and not self.evicted:
            self.prompt_cache.store(self.engine.kv, np.array(self.fed[: self.prompts_end], np.int32), self._cost)

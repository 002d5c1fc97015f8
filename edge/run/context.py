"""The context of a conversation: its rows in the KV cache, and the tokens of it that have not been run."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

import numpy as np

from edge.backends.base import Engine, PickingEngine
from edge.errors import InputError
from edge.kv import make_policy
from edge.kv.policy import EVERY
from edge.model.lora import Lora
from edge.model.prompt import Prompt, joined
from edge.plan.candidates import EVICTED_SHARE
from edge.plan.plan import Plan
from edge.prompt_cache.cache import PromptCache
from edge.run.eviction import keep_heads, observe, queries_to_observe, rows_per_head, view_for
from edge.run.meters import EnergyMeter
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class Mark:
    """A place in a conversation, to which `Session.rewind` goes back; by default its beginning."""

    rows: int = 0
    evicted: int = 0
    left: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens that have not been run
    prompts_end: int | None = None


class Context:
    """Runs tokens in an engine, evicts rows by the plan's policy, and shares the rows of prompts by a prompt cache.

    lora: the adapters that the engine runs. evicted: rows so far. prompt: the last one, however far it was run; a
    follow-up first runs what is left of it. pending: tokens of the answer that have not been run: the one before a
    stop. ahead: tokens that the engine chose and the answer has not come to; each has a row of the token before it, but
    the rows go with `settle`. fed: the tokens of all rows, if there is a prompt cache and nothing has been evicted.
    """

    def __init__(
        self, engine: Engine, plan: Plan, lora: Lora | None, prompt_cache: PromptCache | None, meter: EnergyMeter
    ) -> None:
        self.engine, self.lora = engine, lora
        self.policy = make_policy(plan.kv_policy, plan.sinks, keep=plan.sinks)
        self._plan, self._prompt_cache, self._meter = plan, prompt_cache, meter
        self._prompts_end: int | None = None  # how many of `fed` end with a prompt; None while one is run
        self._forget()

    def _forget(self) -> None:
        self.evicted, self.fed, self.prompt, self.pending = 0, array("i"), Prompt(()), list[int]()
        self.ahead = deque[int]()

    def reset(self) -> None:
        """Forget the conversation: empty the KV cache."""
        self.engine.kv.truncate(0)
        self._forget()

    def mark(self) -> Mark:
        """Where the conversation is, between two generations."""
        left = joined([*self._left()])
        self.prompt, self.pending = Prompt([left]), []
        return Mark(self.engine.kv.length, self.evicted, left, self._prompts_end)

    def rewind(self, mark: Mark) -> bool:
        """As `Session.rewind`."""
        kv = self.engine.kv
        if self.evicted != mark.evicted or kv.length < mark.rows or (mark.rows and self.policy.needs.queries):
            return False
        if 0 < mark.rows < min(kv.earliest, kv.length):
            return False
        kv.truncate(mark.rows)
        self.fed, self._prompts_end = self.fed[: mark.rows], mark.prompts_end
        self.prompt, self.pending = Prompt([mark.left]), []
        return True

    def check_fits(self, prompt: Prompt) -> None:
        """Raises InputError for a prompt that is empty, or whose rows do not fit beside those of the conversation."""
        free = self.engine.kv.free
        held = self.prompt.first(free + 1).size + len(self.pending)
        if not prompt.waiting and not held:
            raise InputError("the prompt is empty")
        if not self.policy.evicts and prompt.waiting + held > free:
            raise InputError(
                f"the prompt has {prompt.size} tokens, but --kv-policy="
                f"{self.policy.name} has {free - held} free KV rows: raise --max-kv-size or use --kv-policy=streaming"
            )

    def begin(self, prompt: Prompt, *, follow_up: bool) -> Prompt:
        """The prompt that is to be run now; a follow-up begins with what is left of the conversation."""
        if follow_up:
            prompt = Prompt(chain(self._left(), prompt.rest()), prompt.thinks)
        self.prompt, self.pending, self._prompts_end = prompt, [], None
        return prompt

    def end_prompt(self) -> None:
        """All of the prompt has been run; what follows is the answer."""
        self._prompts_end = len(self.fed)

    def _left(self) -> Iterator[IntArray]:
        return chain(self.prompt.rest(), [np.array(self.pending, np.int32)])

    def forward(self, tokens: IntArray, *, upcoming: int, every: bool = False) -> FloatArray:
        """As `Session.forward`."""
        self._observe(tokens.size, upcoming)
        logits = self.engine.forward_all(tokens) if every else self.engine.forward(tokens)
        self._count(tokens)
        return logits

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """`PickingEngine.forward_top`; one token will want room next."""
        self._observe(tokens.size, upcoming=1)
        found = cast(PickingEngine, self.engine).forward_top(tokens, count)
        self._count(tokens)
        return found

    def run_greedy(self, token: int, count: int, banned: IntArray) -> int:
        """`PickingEngine.run_greedy`; returns the first token and puts the others into `ahead`."""
        self._observe(1, upcoming=1)
        first, *others = cast(PickingEngine, self.engine).run_greedy(token, count, banned).tolist()
        self.ahead.extend(others)
        self._count(np.array([token, first, *others][:-1], np.int32), passes=1 + len(others))
        return int(first)

    def settle(self) -> None:
        """Forget the rows of tokens that the answer has not come to."""
        if count := len(self.ahead):
            self.ahead.clear()
            self.engine.kv.truncate(self.engine.kv.length - count)
            del self.fed[-count:]

    def _observe(self, incoming: int, upcoming: int) -> None:
        if self.policy.needs.queries:
            queries = queries_to_observe(self.policy.needs, self.engine.kv.free, incoming, upcoming)
            observe(self.engine, self.policy.needs, queries)

    def _count(self, tokens: IntArray, passes: int = 1) -> None:
        """Tokens have been run: what was read of memory for them, and `fed`."""
        kv = self.engine.kv
        weights = self.engine.spec.weight_bytes + (self.lora.size.nbytes if self.lora else 0)
        rows = kv.length - (passes - 1) / 2  # on average
        self._meter.add_bytes(passes * (weights + kv.fixed + (kv.nbytes - kv.fixed) * rows / kv.capacity))
        if self._prompt_cache is not None and not self.evicted:
            self.fed.frombytes(tokens.astype(np.int32, copy=False).tobytes())

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
        before = rows_per_head(kv, self.policy.needs)
        rows = self.policy.rows_to_keep(view_for(kv, self.policy.needs, kv.capacity - budget), budget)
        if isinstance(rows, np.ndarray):
            kv.keep(rows, close_gaps=self.policy.close_gaps)
        else:
            keep_heads(kv, rows, self.engine.spec.context, forget=self.policy.needs.queries > 0)
        self.evicted += before - rows_per_head(kv, self.policy.needs)

    def reuse(self, chunk: int) -> int:
        """Take the prompt's first rows from the prompt cache; returns how many. chunk: tokens that run at once.

        The last token is run for its logits, and as many as the policy wants to observe before an eviction: rows that
        come back have no attention. A policy that counts all attention there ever was has to see the whole prompt.
        """
        kv, prompt, queries = self.engine.kv, self.prompt, self.policy.needs.queries
        if self._prompt_cache is None or queries == EVERY:
            return 0
        most = min(prompt.waiting, kv.capacity) - max(1, queries)
        if prompt.waiting > kv.capacity:  # chunks begin, and rows are evicted, where they would be without the cache
            most -= most % chunk
        tokens = prompt.peek(kv.capacity)
        reused = self._prompt_cache.restore(kv, tokens, most)
        prompt.advance(reused)
        self.fed = array("i", tokens[:reused].tolist())
        return reused

    def ends_to_remember(self, chunk: int) -> list[int]:
        """Numbers of rows, behind those in use, at which the prompt cache wants the prompt while it runs."""
        kv, prompt, queries = self.engine.kv, self.prompt, self.policy.needs.queries
        if self._prompt_cache is None or self.evicted or queries == EVERY or not kv.has_tail:
            return []
        tokens = np.concatenate([np.array(self.fed, np.int32), prompt.peek(kv.free)])
        step = chunk if prompt.waiting > kv.free else 1  # evictions come where they would
        ends = self._prompt_cache.ends(kv, tokens[: max(0, tokens.size - max(1, queries))])
        return [end for end in ends if end > kv.length and end % step == 0]

    def remember(self) -> None:
        """Put the rows of all prompts so far, and of the answers between them, into the prompt cache."""
        if self._prompt_cache is not None and not self.evicted:
            self._prompt_cache.store(self.engine.kv, np.array(self.fed[: self._prompts_end], np.int32))

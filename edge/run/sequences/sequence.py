"""A sequence: the tokens of a conversation, and the passes of the engine that run them. rows.py has what they leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, cast

import numpy as np

from edge.backends.base import (
    Engine,
    GivenEngine,
    HiddenEngine,
    ObservedEngine,
    PickingEngine,
    TopEngine,
    VerifyingEngine,
)
from edge.backends.importance import RowImportance
from edge.backends.kv_cache import KVState
from edge.errors import EngineError, InputError
from edge.kv import pinned_rows
from edge.model.adapters.lora import Lora
from edge.model.parts.places import Places
from edge.model.parts.prompt import Prompt, joined
from edge.plan.plan import Plan
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.ahead import Ahead, Outcome
from edge.run.drafting.drafter import Drafter
from edge.run.sampling.sampler import Sampler
from edge.run.sequences.eviction import all_rows, queries_to_observe, unobserved
from edge.run.sequences.rows import SequenceRows
from edge.run.sequences.snapshots import Mark, Outline
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:
    from edge.model.adapters.prefix import Prefix
    from edge.model.parts.given import GivenRows
    from edge.prompt_cache.cache import PromptCache


class TokenSequence:
    """The tokens of a conversation that are to be run, and their passes. `rows` has the tokens that were run. Only its
    methods change its fields."""

    def __init__(
        self, engine: Engine, plan: Plan, lora: Lora | None, prompt_cache: PromptCache | None, meter: EnergyMeter,
        drafter: Drafter | None = None, learned: RowImportance | None = None, prefix: Prefix | None = None,
    ) -> None:  # fmt: skip
        """lora: the adapters that the engine runs. meter: counts the bytes that passes read, and perhaps their joules.
        learned: the fitted importance of rows, for policies that need it. prefix: the beginning of prompts, by its
        ids."""
        self.prefix = prefix
        self.engine, self.plan, self.lora = engine, plan, lora
        self.rows = SequenceRows(engine, plan, prompt_cache, learned)
        self.policy = self.rows.policy  # that evicts rows
        self.chunk = plan.config.chunk  # tokens that are run at once, at most
        power = None
        if plan.config.drafts and meter.read().kind != "estimate":
            from edge.run.drafting.power import PassPower  # here: few devices measure joules

            power = PassPower(meter)
        self.ahead = Ahead(plan.config.drafts, drafter, engine.spec.vocab, power)
        self._meter = meter
        self._drafter = drafter
        # Whether tokens that run together have the results of separate passes.
        self._exact = engine.capabilities.verifies and not self.policy.needs.queries
        if engine.capabilities.picks and not plan.config.drafts:  # several pending tokens run as a chunk
            self._exact = False
        self._forget()

    def _forget(self) -> None:
        self.given = self.prefix.given if self.prefix else None  # rows of ids beyond the vocabulary
        self.prompt = Prompt(())  # the last prompt, perhaps run in part; a follow-up first runs the rest of it
        self.pending = list[int]()  # tokens of the answer that have not been run
        self.ahead.clear()
        self._leave()
        self.ran = 1  # tokens of the answer in the last pass
        self._answered = 0  # tokens of the answer
        self.lost = False  # whether a change of adapters has dropped the conversation
        self._outcome: Outcome = np.zeros(0, np.float32)  # of the last pass, during a generation

    def _leave(self) -> None:
        """Note that the next tokens do not follow those that ran last."""
        if self._drafter:
            self._drafter.reset()

    def reset(self, shared: int = 0) -> None:
        """Forget the conversation: empty the KV cache, except the first rows, which the next prompt shares."""
        self.rows.reset(shared)
        self._forget()

    def forget(self) -> None:
        """Forget the conversation, and all texts, including earlier conversations', from which drafts are copied: the
        timing of other users' answers must not reveal them."""
        self.reset()
        self.ahead.drafts.clear()

    def give_up(self) -> None:
        """Drop all rows, none of which has been evicted; `resume` and `run_again` restore them."""
        self._leave()
        self.rows.give_up()

    def resume(self, engine: Engine) -> None:
        """Continue with an engine whose cache is empty."""
        self.engine = self.rows.engine = engine

    def run_again(self, most: int) -> bool:
        """Rerun at most `most` tokens whose rows were dropped. False: none is left."""
        if self.rows.again:
            count = min(most, self.chunk, len(self.rows.again))
            if self.given:
                count = self.given.undivided(
                    np.array(self.rows.again, np.int32), count, len(self.rows.again), self.engine.kv.capacity
                )[0]
            tokens = np.array(self.rows.again[:count], np.int32)
            self.engine.kv.announce(len(self.rows.again))
            del self.rows.again[:count]
            self.forward_prompt(tokens, upcoming=1)
        return bool(self.rows.again)

    def forward_prompt(self, tokens: IntArray, upcoming: int) -> FloatArray:
        """As `forward`, but the tokens read all rows."""
        with all_rows(self.engine, self.policy.needs):
            return self.forward(tokens, upcoming=upcoming)

    def adopt(self, lora: Lora | None, lost: bool) -> None:
        """Forget the conversation; the engine now runs these adapters. lost: whether there was a conversation."""
        self.reset()
        self.lora, self.lost = lora, lost

    def check_fits(self, prompt: Prompt, shared: int = 0, *, alone: bool = False) -> None:
        """Raise InputError for an empty prompt, or one whose rows do not fit beside those of the conversation.

        shared: the prompt's rows in the cache already. alone: whether the conversation will be forgotten first.
        """
        kv = self.engine.kv
        free = kv.capacity if alone else kv.free + shared
        held = 0 if alone else self.prompt.first(free + 1).size + len(self.pending)
        if prompt.empty and not held:
            raise InputError("the prompt is empty")
        if prompt.given:
            prompt.given.check_fits(self.plan.config.chunk, kv.capacity, pinned_rows(self.policy))
        if not self.policy.evicts and prompt.waiting + held > free:
            raise InputError(
                f"the prompt has {prompt.size} tokens, but --kv-policy="
                f"{self.policy.name} has {free - held} free KV rows: raise --max-kv-size or use --kv-policy=streaming"
            )

    def begin(self, prompt: Prompt, outline: Outline, *, follow_up: bool) -> Prompt:
        """Return the prompt to run; a follow-up begins with the conversation's tokens that have not been run."""
        self._keep_given(prompt.given, self.prompt.first(None) if follow_up and self.given else None)
        if follow_up:
            prompt = Prompt(chain(self._left(), prompt.rest()), prompt.thinks, given=prompt.given)
            self.ahead.drafts.drop(len(self.pending))  # noted again as part of the prompt
        else:
            self.ahead.restart(np.array(self.rows.fed, np.int32))
        self.prompt, self.pending = prompt, []
        self.rows.begin(outline)
        self.ran = 1
        self.ahead.begin()
        return prompt

    def _keep_given(self, given: GivenRows | None, left: IntArray | None) -> None:
        """Take a prompt's rows of ids beyond the vocabulary, and keep of others those of the prefix, of rows in the
        cache and of tokens that are `left`: a picture is held with its pixels."""
        if self.given:
            used = [self.rows.known, *([] if left is None else [left]), *([self.prefix.ids] if self.prefix else [])]
            self.given = self.given.only(np.concatenate(used))
        if given:
            self.given = given.joined(self.given)
        self.rows.see(self.given)

    def pass_size(self, count: int) -> int:
        """The number of tokens per pass when `count` are left to run."""
        kv = self.engine.kv
        if count > kv.free and self.chunk > kv.capacity // 2:
            return max(1, kv.capacity // 8)  # the plan expected no evictions; each must leave most of the cache
        return self.chunk

    def undivided(self, count: int, behind: int = 0) -> tuple[int, int]:
        """How many tokens of the prompt to run in a pass of about `count`, and the rows to have room for: see
        `GivenRows.undivided`. behind: tokens before that pass."""
        if self.given is None:
            return count, count
        tokens, rows = self.prompt.peek(behind + count)[behind:], self.engine.kv.capacity - pinned_rows(self.policy) - 1
        return self.given.undivided(tokens, count, self.prompt.waiting - behind, rows)

    def halve_chunk(self, least: int) -> None:
        """Halve the tokens per pass, but to no fewer than `least`."""
        self.chunk = max(least, self.chunk // 2)

    def run_prompt(self, count: int, *, upcoming: int) -> int:
        """Run the next `count` tokens of the prompt, for which there is room; `upcoming` will follow them at once.
        Returns the number of those whose rows are the prefix's keys and values, and did not run."""
        self.engine.kv.announce(self.prompt.waiting)
        tokens = self.prompt.peek(count)
        left = self._behind_saved(tokens)
        if left.size:
            self._outcome = self.forward_prompt(left, upcoming)
        self.prompt.advance(count)
        self.ahead.note(tokens)
        self.rows.keep_place(self.prompt)
        return count - left.size

    def end_prompt(self) -> None:
        """Note that the whole prompt has been run; the answer follows."""
        self.rows.prompts_end, self._answered = len(self.rows.fed), 0

    @property
    def prompt_done(self) -> bool:
        """Whether the last prompt was run to its end."""
        return self.rows.prompts_end is not None

    def next_token(self, sample: Sampler) -> int:
        """The next token, from the last pass's outcome. Raises EngineError if the model produced NaN."""
        outcome = self._outcome
        if isinstance(outcome, int):
            return outcome
        return sample.draw_from(*outcome) if isinstance(outcome, tuple) else sample(outcome)

    @property
    def logits(self) -> FloatArray:
        """Logits of the last pass, float32 [vocab]; only if the engine did not choose or preselect tokens."""
        assert isinstance(self._outcome, np.ndarray)
        return self._outcome

    def branch(self, rows: int, end: KVState | None, tokens: list[int]) -> FloatArray:
        """Truncate to the first `rows`, and run these tokens. Returns logits after the last, float32 [vocab]. end: the
        saved end of those rows, if the cache has a tail."""
        self.continue_from(rows, end, tokens)
        while count := min(len(self.pending), self.pass_size(len(self.pending))):
            logits = self.forward(np.array(self.pending[:count], np.int32), upcoming=1)
            del self.pending[:count]
        return logits

    def continue_from(self, rows: int, end: KVState | None, tokens: list[int]) -> None:
        """Truncate to the first `rows`; these tokens become pending. end: as for `branch`."""
        self.rows.cut(rows, end)
        self._leave()
        self.pending = tokens

    def append(self, token: int) -> None:
        """Continue with the token that `next_token` returned."""
        self.pending.append(token)
        self._answered += 1
        self.ahead.note(np.array([token], np.int32))

    def insert(self, tokens: list[int]) -> None:
        """Continue with tokens that the model did not choose."""
        self.settle()
        self.pending += tokens
        self.ahead.note(np.array(tokens, np.int32))

    @property
    def was_run(self) -> bool:
        """Whether the pending tokens were run ahead."""
        return self.ahead.begins_with(self.pending)

    def take_ahead(self) -> bool:
        """Take the pending tokens that were run ahead. True if none is left; else, drop the other tokens run ahead."""
        while self.pending and (outcome := self.ahead.take(self.pending[0])) is not None:
            self._outcome = outcome
            del self.pending[0]
        if self.pending:
            self.settle()
        return not self.pending

    @property
    def next_pass(self) -> int:
        """The number of pending tokens that run in the next pass."""
        count = len(self.pending)
        return min(count, 1 + self.plan.config.drafts if self._exact else self.pass_size(count))

    def run_pending(self, sample: Sampler, most_ahead: Callable[[], int]) -> None:
        """Run the next pending tokens, for which there is room, and perhaps tokens that may follow them.

        most_ahead: returns the number of tokens that may run in this pass, including the pending one; 0 for one.
        """
        started, behind = time.perf_counter(), self.engine.kv.length
        self.ran = count = self.next_pass
        tokens, engine = np.array(self.pending[:count], np.int32), cast(PickingEngine, self.engine)
        picks = engine.capabilities.picks
        tops = engine.capabilities.tops and 0 < sample.candidates <= engine.most_candidates
        chooses = picks and len(self.pending) == 1 and sample.greedy and sample.banned.size <= engine.most_banned
        draft, steps = self._draft(most_ahead) if self._exact else np.zeros(0, np.int32), 1
        if chooses and not draft.size and (most := most_ahead()):
            self._outcome = self._run_greedy(self.pending[0], most, sample.banned)
            steps = self.ran
        elif self._exact:
            if self.ahead.power:
                self.ahead.power.start(tokens.size + draft.size)
            started = time.perf_counter()
            if tops and tokens.size + draft.size == 1:
                self._run_top(engine, tokens, sample.candidates)
            else:
                self._verify(tokens, draft, sample.candidates if tops else 0)
        elif tops and (picks or count == 1):  # of a chunk, an engine without a device of its own has all
            self._run_top(engine, tokens, sample.candidates)
        else:
            self._outcome = self.forward(tokens, upcoming=1)
        seconds = time.perf_counter() - started
        for _ in range(steps if self.ahead.most else 0):
            self.ahead.time(self.ran // steps, self.ahead.unsettled, seconds / steps, behind)
        del self.pending[: self.ran]

    def _run_top(self, engine: TopEngine, tokens: IntArray, count: int) -> None:
        self._observe(tokens.size, upcoming=1)
        self._outcome = engine.forward_top(tokens, count)
        self._count(tokens)

    def _draft(self, most_ahead: Callable[[], int]) -> IntArray:
        """A draft of the tokens after the pending ones, as long as pays. No row is evicted for it."""
        count, ahead = len(self.pending), self.ahead
        if not ahead.most or count > self.next_pass:
            return np.zeros(0, np.int32)
        room = min(most_ahead(), self.engine.kv.free, 1 + ahead.most)
        return ahead.propose(room - count, count, self.engine.kv.length)

    def _verify(self, tokens: IntArray, draft: IntArray, top: int) -> None:
        """Run pending tokens and a draft, which goes into `ahead`. top: as for `Ahead.verify`."""
        if tokens.size + draft.size == 1:
            self._outcome = self.forward(tokens, upcoming=1)
            return
        found, self.ran, self._outcome = self.ahead.verify(cast(VerifyingEngine, self.engine), tokens, draft, top)
        self._count(np.concatenate([tokens, draft])[:found])

    def observe_next(self) -> int:
        """Announce that the next pending token runs in a pass of several sequences. Returns the token."""
        self._observe(1, upcoming=1)
        return self.pending[0]

    def take(self, logits: FloatArray, sharing: int) -> None:
        """Take the logits of the token from `observe_next`, which ran with those of `sharing` − 1 other sequences."""
        self.ran, self._outcome = 1, logits
        self._count(np.array(self.pending[:1], np.int32), sharing=sharing)
        del self.pending[0]

    def _run_greedy(self, token: int, most: int, banned: IntArray) -> int:
        """Let the engine choose tokens. Returns the first, and puts the others into `ahead`."""
        count = min(most, unobserved(self.policy.needs, self.engine.kv.free), self.ahead.burst(self._answered))
        self._observe(1, upcoming=1)
        length = self.engine.kv.length
        try:
            chosen = self.ahead.choose(cast(PickingEngine, self.engine), token, count, banned)
        except EngineError:
            if self.engine.kv.length > length:  # the token ran, and its logits are no numbers
                self._count(np.array([token], np.int32))
                del self.pending[0]
            raise
        self.ran = len(chosen)
        self._count(np.array([token, *chosen[:-1]], np.int32), passes=self.ran)
        return chosen[0]

    def settle(self) -> None:
        """Drop the rows of tokens run ahead that the answer has not reached."""
        if count := self.ahead.settle():
            self.rows.drop(count)
            if self._drafter:
                self._drafter.drop(count)

    def settle_choices(self) -> None:
        """Drop tokens that the engine chose, since a grammar holds. Drafts stay, since their logits are known."""
        if not self.ahead.unsettled:
            self.settle()

    def end(self) -> None:
        """End the generation: keep only rows of the conversation, and store them in the prompt cache."""
        self._outcome = np.zeros(0, np.float32)
        self.settle()
        self.rows.remember()

    def forward(self, tokens: IntArray, *, upcoming: int, every: bool = False) -> FloatArray:
        """As `Session.forward`."""
        tokens = self._behind_saved(tokens)
        if not tokens.size:
            return np.zeros(0, np.float32)
        self._observe(tokens.size, upcoming)
        if self.given is not None and self._has_given(tokens):
            running, given = cast(GivenEngine, self.engine), self.given
            run = running.forward_all if every else running.forward
            logits = run(tokens, given, given.places(tokens, running.kv.next_position))
        else:
            logits = self.engine.forward_all(tokens) if every else self.engine.forward(tokens)
        self._count(tokens)
        return logits

    def _has_given(self, tokens: IntArray) -> bool:
        return self.given is not None and int(tokens.max()) >= self.engine.spec.vocab

    def _behind_saved(self, tokens: IntArray) -> IntArray:
        """Append the prefix's keys and values where the tokens are its ids. Returns the tokens after them."""
        prefix, first = self.prefix, self.engine.kv.length
        if prefix is None or first >= prefix.saved:
            return tokens
        count = min(tokens.size, prefix.saved - first)
        if (tokens[:count] != prefix.ids[first : first + count]).any():
            return tokens
        cast(GivenEngine, self.engine).append_rows(prefix.rows[:, :, :, first : first + count])
        self.rows.add(tokens[:count])
        return tokens[count:]

    def hidden(self, engine: HiddenEngine, tokens: IntArray, places: Places | None = None) -> FloatArray:
        """`HiddenEngine.hidden`, by this sequence's engine."""
        self._observe(tokens.size, tokens.size)
        with all_rows(self.engine, self.policy.needs):
            states = engine.hidden(tokens) if places is None else engine.hidden(tokens, places)
        self._count(tokens)
        return states

    def _observe(self, incoming: int, upcoming: int) -> None:
        if (needs := self.policy.needs).queries:
            queries = queries_to_observe(needs, self.engine.kv.free, incoming, upcoming)
            cast(ObservedEngine, self.engine).observe(queries, votes=needs.votes)

    def _count(self, tokens: IntArray, passes: int = 1, sharing: int = 1) -> None:
        """Count tokens that were run: the bytes read for them, and rows. sharing: sequences in the same pass."""
        kv = self.engine.kv
        weights = self.engine.spec.weight_bytes + (self.lora.size.nbytes if self.lora else 0)
        rows = kv.length - (passes - 1) / 2  # on average
        fixed = kv.fixed
        self._meter.add_bytes(passes * (weights / sharing + fixed + (kv.nbytes - fixed) * rows / kv.capacity))
        if self._drafter and self._has_given(tokens):
            self._drafter.reset()
        elif self._drafter:
            self._drafter.ran(tokens)
        self.rows.add(tokens)

    def mark(self, *, hold: bool) -> Mark:
        """As `Session.mark`."""
        return self.rows.mark(self._gather(), hold=hold)

    def _gather(self) -> IntArray:
        """The tokens that have not been run, int32 [n]; they run with the next prompt."""
        left = joined([*self._left()])
        self.prompt, self.pending = Prompt([left]), []
        return left

    @property
    def tokens(self) -> IntArray | None:
        """All tokens of the conversation, int32 [n], between two generations; None once rows were evicted."""
        left = self._gather()
        return None if self.rows.evicted else np.concatenate([np.array(self.rows.fed, np.int32), left])

    def become(self, tokens: IntArray, other: TokenSequence, given: GivenRows | None) -> None:
        """Make `tokens` the conversation, with the rows that this or another sequence has of them. The others run with
        the next prompt. given: its rows of ids beyond the vocabulary."""
        longer = np.append(tokens, np.int32(0))  # a last token that must run
        own, found = self.rows.shared(longer), other.rows.shared_out(longer)
        self.reset(own)
        if found > own:
            self.rows.take(other.rows, found)
        self.given = given or self.given
        self.prompt = Prompt([tokens[self.engine.kv.length :]])

    def rewind(self, mark: Mark) -> bool:
        """As `Session.rewind`."""
        again = self.rows.rewind(mark)
        if again is None:
            return False
        self._leave()
        self.ahead.restart(np.array(self.rows.fed, np.int32))
        self.prompt, self.pending = Prompt([again, mark.left]), []
        return True

    def _left(self) -> Iterator[IntArray]:
        return chain(self.prompt.rest(), [np.array(self.pending, np.int32)])

    def keep_beginning(self, prompt: Prompt) -> int:
        """Keep the rows of the prefix shared with `prompt`, and drop the others. Returns the number of kept rows."""
        kv, rows = self.engine.kv, self.rows.beginning(prompt)
        if not rows or not (rows == kv.length or self.rewind(Mark(rows))):
            self.reset()
            return 0
        self.prompt, self.pending = Prompt(()), []
        return kv.length  # fewer than `rows` where a snapshot was taken before

    def reuse(self) -> int:
        """Take the prompt's first rows from those that the last prompt shared with it, or from the prompt cache.
        Returns their number."""
        kv, prompt = self.engine.kv, self.prompt
        if kv.length:
            prompt.advance(kv.length)
            self.rows.keep_place(prompt)
            return kv.length
        reused = self.rows.restore(prompt, self.pass_size(prompt.waiting), self.given)
        self.ahead.note(np.array(self.rows.fed, np.int32))
        return reused

    def choose_ends(self) -> None:
        """Choose where the running prompt is stored in the prompt cache."""
        self.rows.choose_ends(self.prompt, self.pass_size(self.prompt.waiting), self.given)

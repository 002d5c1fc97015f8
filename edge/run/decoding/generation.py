"""One generation: the objects that watch it and produce its text, and its counts so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import field
from io import StringIO
from typing import TYPE_CHECKING

from edge.backends.counts import ExpertCounts
from edge.errors import InputError
from edge.grammar.grammar import Grammar
from edge.model.model import Model
from edge.model.parts.prompt import Looks, Prompt
from edge.records import dataclass
from edge.run.budgets.meters import Watch
from edge.run.hooks import Hooks, OnPrefill
from edge.run.report import Beam, Energy, StopReason, Timings, Tokens
from edge.run.request import Request
from edge.run.sampling.sampler import Sampler
from edge.run.sampling.stop_strings import StopStrings
from edge.run.sampling.thoughts import Thinking
from edge.sampling import SamplingParams
from edge.storage.making import Made

if TYPE_CHECKING:
    from edge.run.decoding.logprobs import Logprobs
    from edge.run.sampling.constraint import Constrained
    from edge.run.sampling.tool_calls import ToolCalls

_MOST_AHEAD = 256  # tokens that an engine runs in one call
_PACED = 16  # tokens after which their pace predicts how many more a budget allows
_RESERVED = 0.9  # share of that prediction that is relied on
_MOST_HELD = 0.1  # share of decoding time; beyond it, the speed is the caller's rather than the model's


@dataclass
class Generation:
    """The state of one generation. Times are seconds on `time.perf_counter`, None before the event."""

    request: Request
    model: Model
    prompt: Prompt
    started: float
    watch: Watch
    sample: Sampler
    seed: int | None
    thinking: Thinking
    stops: StopStrings
    constrained: Constrained | None
    logprobs: Logprobs | None
    text: StringIO | None  # of the answer; a list of pieces would take ten times the memory. None: it is not kept
    calls: ToolCalls | None = None  # None without tools
    on_prefill: OnPrefill | None = None
    prepared: Made = field(default_factory=Made)  # the cost of cache entries made before, once for this model
    reused: int = 0
    ran: int = 0  # prompt tokens that have been run, the last at `ran_at`
    generated: int = 0
    unasked: int = 0  # tokens that its grammar forced
    following: deque[int] = field(default_factory=deque)  # those of them that the answer does not have yet
    beams: tuple[Beam, ...] | None = None  # of a beam search, the best first
    prefill_joules: float | None = None
    restored_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ran_at: float | None = None
    held: float = 0.0  # seconds that pieces of text stayed with the caller before it asked for the next
    experts: ExpertCounts | None = None  # of the engine when it began
    team: tuple[int, ...] = ()  # its passes by the number of their threads, likewise
    stop_reason: StopReason = "interrupted"  # unless something else ends it
    limit: StopReason = "length"  # what will end the answer, if the model does not
    looks: Looks = Looks()  # of the model's senses when it began
    at_once: Callable[[], int] | None = None  # tokens to run before other generations do; None: there are none

    @classmethod
    def of(
        cls, request: Request, model: Model, watch: Watch, started: float, hooks: Hooks
    ) -> Generation:  # fmt: skip
        """Raises InputError, MissingExtraError, and the errors of `Request.encode` and `Matcher`."""
        prompt, keep, tokenizer = request.encode(model), request.keep_text, model.tokenizer
        if model.prefix and not request.follow_up:
            prompt.begin_with(model.prefix.ids)
        use = prompt.tools
        marks: dict[str, int] = {}
        calls = None
        if use:
            from edge.run.sampling.tool_calls import ToolCalls, special_marks

            marks, calls = special_marks(use, tokenizer), ToolCalls(use, hooks.call)
        begins = use is not None and use.form.begins
        thinking = Thinking(
            model, prompt, request.think, watch, hooks.thought, keep, () if begins else marks.values(),
            use.form.opening if use and begins else None,
        )  # fmt: skip
        banned = tokenizer.suppressed | (tokenizer.end_ids if request.ignore_eos else frozenset())
        stated = request.sampling
        sampling = (stated if isinstance(stated, SamplingParams) else model.sampling(**(stated or {}))).with_seed()
        grammar, top = request.grammar, request.logprobs
        begins = begins and grammar is None
        if use and grammar is None and (lark := use.grammar(marks)) is not None:
            grammar = Grammar(lark=lark, param="tools")
        outside = [token for token, _ in sampling.logit_bias if token >= tokenizer.size]
        if outside:
            raise InputError(f"--logit-bias names token {outside[0]}, and the vocabulary has {tokenizer.size}")
        sample = Sampler(
            sampling, banned, piece=tokenizer.piece, processor=request.logits_processor, ends=tokenizer.end_ids,
            whole=request.beams is not None,
        )  # fmt: skip
        logprobs = constrained = None
        if top is not None:
            from edge.run.decoding.logprobs import Logprobs

            logprobs = Logprobs(top, hooks.logprob, keep=keep)
            sample.look = logprobs.look
        if grammar is not None:
            from edge.run.sampling.constraint import Constrained, check_tools

            ours = use if request.grammar is None else None
            if ours and ours.retyped:
                check_tools(ours, tokenizer)
            try:
                constrained = Constrained.of(grammar, model, thinking, skips=logprobs is None, begins=begins,
                                             ends=use.form.ends if use else ())  # fmt: skip
            except InputError:
                if ours and not ours.retyped:  # rather than the grammar that is made of schemas
                    check_tools(ours, tokenizer)
                raise
            if request.max_tokens is not None:
                constrained.leave_room(request.max_tokens)
        return cls(
            request, model, prompt, started, watch, sample, sampling.seed, thinking, StopStrings(request.stop),
            constrained, logprobs, StringIO() if keep else None, calls, hooks.prefill,
            looks=model.looks,
        )  # fmt: skip

    def part_of(self, chunk: int, least: int) -> int:
        """Tokens of a chunk to run now: `at_once`, but neither these nor the rest are fewer than `least`."""
        part = chunk if self.at_once is None else max(least, self.at_once())
        return part if part + least <= chunk else chunk

    def count_prompt(self, count: int) -> None:
        """Count `count` prompt tokens that have just been run."""
        self.ran, self.ran_at = self.ran + count, time.perf_counter()

    def time_token(self) -> None:
        """Note the time at which a token of the answer was chosen."""
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at

    def follow(self, token: int) -> deque[int]:
        """Tell the grammar a drawn token, once its text is known. Returns the tokens that follow without a choice."""
        if self.constrained is not None:
            self.constrained.accept(token)
        return self.forced()

    def end_thoughts(self, closing: list[int]) -> deque[int]:
        """Tell the grammar the tokens inserted to end the thoughts. Returns those that follow without a choice."""
        if self.constrained is not None:
            self.constrained.thoughts_were_cut(closing)
        return self.forced()

    def forced(self) -> deque[int]:
        """The tokens that follow without a choice. After them, the grammar constrains sampling where it holds."""
        if self.constrained is None:
            return deque()
        tokens = self.constrained.forced()
        self.unasked += len(tokens)
        if tokens:
            self.sample.follow(tokens)
        self.sample.constrained = self.constrained if self.constrained.holds else None
        self.following = deque(tokens)
        return self.following

    def said(self, text: str) -> str:
        """The part of a generated text that belongs to the answer: all but tool calls."""
        return text if self.calls is None or not text else self.calls.feed(text)

    def end(self, reason: StopReason) -> str:
        """Set the stop reason. Returns the text held back in the search for tool calls."""
        natural = reason == "eos" or (reason == "stop" and not self.stops.met)
        rest = self.calls.rest(cut=not natural) if self.calls else ""
        called = natural and self.calls is not None and bool(self.calls.found)
        self.stop_reason = "tool_calls" if called or (reason == "length" and self.calls_suffice) else reason
        return rest

    @property
    def calls_suffice(self) -> bool:
        """Whether the answer so far ends with calls, each whole as the model wrote it."""
        if self.calls is None or not self.calls.found:
            return False
        if not self.matches or (self.constrained is not None and self.constrained.cuts):
            return False
        return self.calls.forced or self.calls.whole

    def free(self) -> None:
        """Free the grammar's state, which may be large: garbage is collected late."""
        self.constrained = self.sample.constrained = None

    @property
    def ended(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self.constrained is not None and self.constrained.ended

    @property
    def incomplete(self) -> StopReason | None:
        """The stop reason, if the answer ended before its grammar allowed it; else None."""
        return None if self.matches else self.stop_reason

    @property
    def matches(self) -> bool:
        """Whether the answer may end here by its grammar, if there is one."""
        return self.constrained is None or (self.constrained.complete and not self.following)

    def foresee(self, rows: int | None) -> None:
        """Tell the grammar how many tokens the answer may still have, at the pace so far. rows: free KV rows, None if
        the policy evicts others."""
        if self.constrained is None:
            return
        watch, counts = self.watch, dict[StopReason, int]()
        if self.request.max_tokens is not None:
            counts["length"] = self.request.max_tokens - self.generated
        if rows is not None:
            counts["capacity"] = rows
        now, begun = time.perf_counter(), self.first_token_at
        if begun is not None and self.generated >= _PACED:
            if watch.limits.deadline is not None:
                counts["time"] = _whole(watch.limits.deadline - now, (now - begun) / self.generated)
            if watch.limits.energy is not None and self.prefill_joules is not None:
                spent = watch.reading.joules - watch.first.joules
                counts["energy"] = _whole(watch.limits.energy - spent, (spent - self.prefill_joules) / self.generated)
        self.limit = min(counts, key=lambda reason: counts[reason], default="length")
        self.constrained.left = counts.get(self.limit)

    def most_ahead(self) -> int:
        """The number of tokens that may run before budgets are checked again."""
        most = self.request.max_tokens
        limits = (None if most is None else most - self.generated, self.sample.most_alike(self.generated))
        return self.watch.affordable(min([_MOST_AHEAD, *(each for each in limits if each is not None)]))

    @property
    def tokens(self) -> Tokens:
        prefix = 0 if self.request.follow_up else self.model.prefix_rows
        known, unread = self.prompt.known, not self.prompt.ended
        return Tokens(known, self.generated, self.reused, self.ran, unread, self.unasked - len(self.following), prefix)

    @property
    def looked(self) -> Looks | None:
        """What its pictures and sounds cost; None if none was encoded."""
        found = self.prompt.looks or self.model.looks.since(self.looks)
        return found if found.pictures or found.sounds else None

    @property
    def is_typical(self) -> bool:
        """Whether the decoding speed is representative: a caller that is slow to ask for pieces lowers it."""
        decoded = _span(self.first_token_at, self.last_token_at)
        return not decoded or self.held + self.thinking.held <= _MOST_HELD * decoded

    def timings(self, load_s: float) -> Timings:
        chosen = self.generated - self.tokens.forced  # one alone, and what its grammar adds, have no speed
        return Timings(
            load_s=load_s,
            ttft_s=_span(self.started, self.first_token_at),
            prefill_tok_s=_rate(self.ran, self.restored_at, self.ran_at),
            decode_tok_s=_rate(self.generated - 1 if chosen > 1 else 0, self.first_token_at, self.last_token_at),
            paused_s=self.watch.paused,
            total_s=time.perf_counter() - self.started,
            before_s=self.request.time_spent,
            budget_s=self.request.time,
            prepared_s=self.prepared.seconds,
        )

    def energy(self) -> Energy:
        joules, reading = self.watch.joules(), self.watch.reading
        decode = None if self.prefill_joules is None else joules - self.prefill_joules
        return Energy(
            joules=joules,
            budget=self.request.energy,
            before=self.request.energy_spent,
            prefill=joules if self.prefill_joules is None else self.prefill_joules,
            decode=decode,
            per_token=None if decode is None or not self.generated else decode / self.generated,
            source=reading.source,
            kind=reading.kind,
            scope=reading.scope,
            samples=reading.samples - self.watch.first.samples,
            watts=joules / (time.perf_counter() - self.started),
            watts_limit=self.watch.limits.power,
            prepared=self.prepared.joules,
        )


def _whole(left: float, each: float) -> int:
    """Tokens that a budget has room for, with a reserve."""
    return int(_RESERVED * left / each) if each > 0 else _MOST_AHEAD


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _rate(count: int, start: float | None, end: float | None) -> float | None:
    seconds = _span(start, end)
    return count / seconds if seconds and count > 0 else None

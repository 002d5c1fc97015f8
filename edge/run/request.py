"""A request: one prompt and how to answer it, from a caller or a protocol to the loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.errors import InputError, UnsupportedError
from edge.grammar.grammar import Grammar
from edge.model.chat.parts import MEDIA
from edge.model.chat.thinking import Think
from edge.model.model import Model
from edge.model.parts.prompt import Prompt
from edge.options import Options
from edge.records import dataclass
from edge.run.arguments import (
    check_function,
    check_grammar,
    check_limit,
    check_media,
    check_number,
    check_prompt,
    check_sampling,
    check_stop,
    check_text,
    check_top,
)
from edge.run.budgets.governor import RunLimits
from edge.run.report import Cited, Pruned
from edge.run.sampling.sampler import Processor
from edge.run.sequences.snapshots import Outline, changed_opening
from edge.sampling import SamplingParams
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.model.chat.media_parts import Medium

DEFAULT_MAX_TOKENS = 512
MOST_BEAMS, MOST_PENALTY, MOST_VOTES = 64, 100, 64
INTERACTIVE, TOOLS, TITLES = range(3)
"""Classes of requests: for a person who waits, for programs, for background work."""

Text = str | Iterable[str] | IntArray | Prompt
Messages = Sequence[Mapping[str, Any]]
Picture = Any  # what `edge.Image` takes, or an Image
Heard = Any  # what `edge.Sound` takes, or a Sound
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chat:
    """A whole conversation as a prompt, in the form of OpenAI's API. Fields are those of `Model.chat_prompt`."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel: bool = True  # whether an answer may have several calls
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    continues: bool = True  # a last message of the assistant is the beginning of the answer

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True)
class Request:
    """Fields are explained at `Session.stream`. Raises InputError for arguments of the wrong type."""

    prompt: Text | Chat
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    sampling: SamplingParams | Mapping[str, Any] | None = None  # the model's file sets what a mapping leaves out
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    system: str | None = None
    raw: bool = False
    follow_up: bool = False
    think: Think = Think()
    time: float | None = None  # seconds, of which `time_spent` are spent; None: the session's budget
    energy: float | None = None  # joules, likewise
    time_spent: float = 0.0
    energy_spent: float = 0.0
    keep_text: bool = True
    grammar: Grammar | None = None
    logprobs: int | None = None
    logits_processor: Processor | None = None
    beams: int | None = None
    length_penalty: float = 1.0
    vote: int | None = None
    skeleton: bool | str = False  # `outline` of Session.stream
    priority: int = INTERACTIVE  # in a queue: a class; the lowest goes first
    tenant: Hashable = None  # only requests of the same tenant share rows of earlier prompts
    sources: tuple[Cited, ...] = ()  # passages of documents in the prompt, for the report
    pruned: Pruned | None = None  # what --prune left out, likewise
    evict: bool = True  # whether a server may evict rows of a prompt that is longer than the cache

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", check_limit(self.max_tokens))
        check_sampling(self.sampling)
        check_grammar(self.grammar)
        check_top("logprobs", self.logprobs)
        check_function("logits_processor", self.logits_processor)
        check_stop(self.stop)
        check_text("system", self.system)
        self._check_beams()
        self._check_branches()
        numbers = {"time_limit": self.time, "energy_limit": self.energy}
        for name, value in {**numbers, "time_spent": self.time_spent, "energy_spent": self.energy_spent}.items():
            check_number(name, value)
        if not isinstance(self.prompt, Prompt | Chat):
            object.__setattr__(self, "prompt", check_prompt(self.prompt))

    def _check_beams(self) -> None:
        if not isinstance(self.length_penalty, int | float) or not abs(self.length_penalty) <= MOST_PENALTY:
            raise InputError(
                f"--length-penalty must be from -{MOST_PENALTY} to {MOST_PENALTY}, not {self.length_penalty!r:.40}"
            )
        if self.beams is None:
            if self.length_penalty != 1:
                raise InputError("--length-penalty is for a search: state --beams, too")
            return
        if not isinstance(self.beams, int) or isinstance(self.beams, bool) or not 1 <= self.beams <= MOST_BEAMS:
            raise InputError(f"--beams must be a whole number from 1 to {MOST_BEAMS}, not {self.beams!r:.40}")
        given = {
            "--stop": self.stop, "a grammar": self.grammar, "logprobs": self.logprobs is not None or None,
            "tools": self.prompt.tools if isinstance(self.prompt, Prompt) else
            isinstance(self.prompt, Chat) and self.prompt.may_call,
            "logits_processor": self.logits_processor, "thinking": self.think.enabled or None,
        }  # fmt: skip
        if others := [name for name, value in given.items() if value]:
            raise InputError(f"--beams goes without {others[0]}")
        drawn = SamplingParams(**self.sampling) if isinstance(self.sampling, Mapping) else self.sampling
        if drawn is not None and (
            drawn.temperature > 0 or drawn.penalizes or drawn.dry_multiplier or drawn.logit_bias or drawn.min_tokens
        ):
            raise InputError("--beams goes without a temperature, penalties, biases and --min-tokens: it draws nothing")
        if self.max_tokens is None:
            raise InputError("--beams needs a --max-tokens")

    def _check_branches(self) -> None:
        """Raise InputError for a vote or an outline that is no number or choice, or goes with what it cannot."""
        if self.vote is None and self.skeleton is False:
            return
        if self.vote is not None and (type(self.vote) is not int or not 2 <= self.vote <= MOST_VOTES):
            raise InputError(f"--vote must be a whole number from 2 to {MOST_VOTES}, not {self.vote!r:.40}")
        if self.skeleton not in (False, True, "always"):
            raise InputError(f"outline must be True, False or 'always', not {self.skeleton!r:.40}")
        flag, outlines = ("--outline", True) if self.skeleton else ("--vote", False)
        given = {
            "--vote": outlines and self.vote is not None, "--beams": self.beams is not None,
            "logprobs": self.logprobs is not None, "a logits_processor": self.logits_processor, "tools":
            (isinstance(self.prompt, Chat) and self.prompt.may_call) or (isinstance(self.prompt, Prompt) and
            self.prompt.tools), "a grammar": outlines and self.grammar, "--stop": outlines and self.stop,
            "--raw": outlines and self.raw, "--think": outlines and self.think.enabled, "--ignore-eos":
            self.ignore_eos, "token ids": outlines and isinstance(self.prompt, np.ndarray),
        }  # fmt: skip
        if others := [name for name, value in given.items() if value]:
            raise InputError(f"{flag} goes without {others[0]}")

    def within(self, options: Options) -> Request:
        """The request with the session's budgets, where it states none of its own."""
        time = options.time if self.time is None else self.time
        return replace(self, time=time, energy=options.energy if self.energy is None else self.energy)

    def stated(self, budget: str) -> str | None:
        """A budget that ended the answer, if the request itself, before `within`, states it."""
        return budget if {"time": self.time, "energy": self.energy}.get(budget) is not None else None

    def limits(self, options: Options, started: float) -> RunLimits:
        """The limits of a generation that began at `started`, in seconds on `time.perf_counter`."""
        return RunLimits(
            deadline=None if self.time is None else started + self.time - self.time_spent,
            energy=None if self.energy is None else max(0.0, self.energy - self.energy_spent),
            memory=options.memory,
            power=options.power,
            max_temp=options.max_temp,
        )

    def encode(self, model: Model) -> Prompt:
        """Tokenize. Raises InputError for an empty text, UnsupportedError for an unknown mode of thinking."""
        if isinstance(self.prompt, Prompt):
            return self.prompt
        if isinstance(self.prompt, Chat):
            chat = self.prompt
            return model.chat_prompt(
                chat.messages, tools=chat.tools, think=self.think, tool_choice=chat.tool_choice,
                parallel_tool_calls=chat.parallel, variables=chat.variables or None, continues=chat.continues,
            )  # fmt: skip
        if isinstance(self.prompt, np.ndarray):
            if self.think.chosen:
                raise UnsupportedError("--think needs a chat template, and token ids go without one")
            return Prompt([self.prompt])
        if self.follow_up:
            return model.follow_up(self.prompt, self.think, raw=self.raw)
        return model.prompt(self.prompt, system=self.system, raw=self.raw, think=self.think)

    def places(self, model: Model, thinks: bool | None, *, shared: bool) -> Outline:
        """The prompt's outline, by its `thinks`. shared: whether other conversations may share its system prompt."""
        if thinks is None:
            return Outline()
        opening = changed_opening(model, self.think)
        system = model.system_rows(self.system, self.think) if shared and not self.follow_up else 0
        return Outline(system, opening and opening[0])


def prompt_of(
    prompt: Text | None,
    messages: Messages | None,
    tools: Tools | None,
    tool_choice: str | Mapping[str, Any] | None,
    system: str | None,
    *,
    parallel: bool,
    continues: bool,
    images: Sequence[Picture] | None = None,
    sounds: Sequence[Heard] | None = None,
) -> Text | Chat:
    """The prompt of a request, from the arguments of a call. continues: whether it continues raw text or the
    conversation in the cache, which excludes messages, tools and media. Raises InputError."""
    media = check_media(images, sounds)
    if messages is None and not tools and not media:
        if prompt is None:
            raise InputError("there is no prompt: give a text, tokens or messages")
        return prompt
    if continues:
        raise InputError(
            "messages, tools, pictures and sounds go through the chat template from the beginning: leave raw and "
            "follow_up out"
        )
    if messages is None:
        if not isinstance(prompt, str):
            what = f"{media[0].kind}s" if media else "tools"
            raise InputError(f"a prompt with {what} must be text or messages, not {prompt!r:.60}")
        messages = [user_message(prompt, media)]
    elif prompt is not None:
        raise InputError("give a prompt or messages, not both")
    elif media:
        raise InputError("messages have pictures and sounds as parts of contents: leave images and sounds out")
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return Chat(messages, tools, tool_choice, parallel)


def user_message(text: str, media: Sequence[Medium]) -> dict[str, Any]:
    """A message of the user, with pictures and sounds before its text."""
    shown = [{"type": MEDIA[each.kind], MEDIA[each.kind]: each} for each in media]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}

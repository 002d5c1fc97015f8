"""A request: the arguments of `Session.stream`, checked and parsed before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from edge.errors import InputError, UnsupportedError
from edge.grammar.grammar import Grammar
from edge.model.model import Model
from edge.model.prompt import Prompt
from edge.model.thinking import Think
from edge.options import Options
from edge.records import dataclass
from edge.run.arguments import (
    check_function,
    check_grammar,
    check_limit,
    check_number,
    check_prompt,
    check_sampling,
    check_text,
    check_texts,
    check_top,
)
from edge.run.budgets.governor import RunLimits
from edge.run.sampling.sampler import Processor
from edge.run.sequences.snapshots import Outline, changed_opening
from edge.sampling import SamplingParams
from edge.types import IntArray

DEFAULT_MAX_TOKENS = 512
MOST_BEAMS, MOST_PENALTY = 64, 100

Text = str | Iterable[str] | IntArray | Prompt
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Request:
    """Fields are explained at `Session.stream`. Raises InputError for arguments of the wrong type."""

    prompt: Text
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    sampling: SamplingParams | None = None
    stop: str | Sequence[str] | None = None
    ignore_eos: bool = False
    system: str | None = None
    raw: bool = False
    follow_up: bool = False
    think: Think = Think()
    time: float | None = None  # seconds, of which `time_spent` are spent
    energy: float | None = None  # joules, likewise
    time_spent: float = 0.0
    energy_spent: float = 0.0
    keep_text: bool = True
    grammar: Grammar | None = None
    logprobs: int | None = None
    logits_processor: Processor | None = None
    beams: int | None = None
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_tokens", check_limit(self.max_tokens))
        check_sampling(self.sampling)
        check_grammar(self.grammar)
        check_top("logprobs", self.logprobs)
        check_function("logits_processor", self.logits_processor)
        check_texts("stop", self.stop)
        check_text("system", self.system)
        self._check_beams()
        numbers = {"time_limit": self.time, "energy_limit": self.energy}
        for name, value in {**numbers, "time_spent": self.time_spent, "energy_spent": self.energy_spent}.items():
            check_number(name, value)
        if not isinstance(self.prompt, Prompt):
            object.__setattr__(self, "prompt", check_prompt(self.prompt))

    def _check_beams(self) -> None:
        if not isinstance(self.length_penalty, int | float) or not abs(self.length_penalty) <= MOST_PENALTY:
            raise InputError(
                f"--length-penalty must be from -{MOST_PENALTY} to {MOST_PENALTY}, not {self.length_penalty!r:.40}"
            )
        if self.beams is None:
            return
        if not isinstance(self.beams, int) or isinstance(self.beams, bool) or not 1 <= self.beams <= MOST_BEAMS:
            raise InputError(f"--beams must be a whole number from 1 to {MOST_BEAMS}, not {self.beams!r:.40}")
        given = {
            "--stop": self.stop, "a grammar": self.grammar, "logprobs": self.logprobs is not None or None,
            "tools": isinstance(self.prompt, Prompt) and self.prompt.tools,
            "logits_processor": self.logits_processor, "thinking": self.think.enabled or None,
        }  # fmt: skip
        if others := [name for name, value in given.items() if value]:
            raise InputError(f"--beams goes without {others[0]}")
        drawn = self.sampling
        if drawn is not None and (
            drawn.temperature > 0 or drawn.penalizes or drawn.dry_multiplier or drawn.logit_bias or drawn.min_tokens
        ):
            raise InputError("--beams goes without a temperature, penalties, biases and --min-tokens: it draws nothing")
        if self.max_tokens is None:
            raise InputError("--beams needs a --max-tokens")

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
        if isinstance(self.prompt, np.ndarray):
            if self.think.chosen:
                raise UnsupportedError("--think needs a chat template, and token ids go without one")
            return Prompt([self.prompt])
        if self.follow_up:
            return model.follow_up(self.prompt, self.think, raw=self.raw)
        return model.prompt(self.prompt, system=self.system, raw=self.raw, think=self.think)

    def outline(self, model: Model, thinks: bool | None, *, shared: bool) -> Outline:
        """The prompt's outline, by its `thinks`. shared: whether other conversations may share its system prompt."""
        if thinks is None:
            return Outline()
        opening = changed_opening(model, self.think)
        system = model.system_rows(self.system, self.think) if shared and not self.follow_up else 0
        return Outline(system, opening and opening[0])


def prompt_of(
    model: Model,
    prompt: Text | None,
    messages: Messages | None,
    tools: Tools | None,
    tool_choice: str | Mapping[str, Any] | None,
    system: str | None,
    think: Think | str | bool | int | None,
    *,
    parallel: bool,
    continues: bool,
) -> Text:
    """The prompt of a generation: as given, or made from messages. continues: whether it continues raw text or the
    conversation in the cache, which excludes messages and tools.

    Raises InputError and UnsupportedError.
    """
    if messages is None and not tools:
        if prompt is None:
            raise InputError("there is no prompt: give a text, tokens or messages")
        return prompt
    if continues:
        raise InputError(
            "messages and tools go through the chat template from the beginning: leave raw and follow_up out"
        )
    if messages is None:
        if not isinstance(prompt, str):
            raise InputError(f"a prompt with tools must be text or messages, not {prompt!r:.60}")
        messages = [{"role": "user", "content": prompt}]
    elif prompt is not None:
        raise InputError("give a prompt or messages, not both")
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return model.chat_prompt(messages, tools=tools, think=think, tool_choice=tool_choice, parallel_tool_calls=parallel)

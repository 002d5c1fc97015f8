"""The options of an answer as keywords of functions, for type checkers.

Written by `python docs/cli.py` from `Session.stream`: edit its parameters, not this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from edge.grammar.grammar import Grammar
from edge.model.chat.thinking import Think
from edge.run.grounding import Grounded, Grounds
from edge.run.hooks import OnCall, OnLogprob, OnPrefill, OnThought
from edge.run.request import Heard, Messages, Picture, Tools
from edge.run.sampling.sampler import Processor
from edge.sampling import SamplingParams


class AnswerKeywords(TypedDict, total=False):
    """See `edge.run.session.Session.stream`."""

    messages: Messages | None
    images: Sequence[Picture] | None
    sounds: Sequence[Heard] | None
    tools: Tools | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    max_tokens: int | None
    sampling: SamplingParams | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    system: str | None
    raw: bool
    follow_up: bool
    think: Think | str | bool | int | None
    time_limit: float | None
    energy_limit: float | None
    time_spent: float
    energy_spent: float
    keep_text: bool
    grammar: Grammar | None
    logprobs: int | None
    logits_processor: Processor | None
    on_logprob: OnLogprob | None
    beams: int | None
    length_penalty: float
    vote: int | None
    outline: bool | str
    on_prefill: OnPrefill | None
    on_thought: OnThought | None
    on_call: OnCall | None
    documents: Grounds | Grounded | None

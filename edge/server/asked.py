"""The internal form of a request, into which each protocol translates its own."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from edge.grammar.grammar import Grammar
from edge.model.thinking import Think
from edge.records import dataclass

Priority = Literal["interactive", "tools", "background"]
PRIORITIES: tuple[Priority, ...] = ("interactive", "tools", "background")


@dataclass(frozen=True)
class Chat:
    """A conversation in the form of OpenAI's API."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: Any = None
    parallel: bool = True  # whether an answer may have several tool calls
    variables: dict[str, Any] = field(default_factory=dict)  # of the template
    continues: bool = True  # a last message of the assistant is the beginning of the answer


Text = str | tuple[int, ...]
"""A text without a chat template, in which control tokens are recognized, or token ids."""


@dataclass(frozen=True)
class Asked:
    """A request: a prompt, and how to answer it. None: the server's default."""

    model: str
    prompt: Chat | Text
    choices: int = 1
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams; omitted ones are the model's
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    think: Think = Think()
    logprobs: int | None = None  # number of alternatives for each token; None: no logprobs
    grammar: Grammar | None = None
    time: float | None = None  # seconds
    energy: float | None = None  # joules
    evict: bool = False  # whether rows of a prompt may be evicted that is longer than the cache
    priority: Priority = "interactive"
    ignored: tuple[str, ...] = ()  # what the request has and the answer goes without
    tenant: str = ""  # requests of one tenant may reuse rows of each other's prompts

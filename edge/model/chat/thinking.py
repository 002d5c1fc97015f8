"""Thinking models: the marks around their thoughts, and the user's thinking options.

A family is found by its closing mark in the chat template. To add one: an entry in FAMILIES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from edge.budget import format_joules, parse_joules
from edge.errors import InputError
from edge.records import dataclass

EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True)
class Family:
    """Models whose thoughts have the same marks."""

    opening: str  # before a thought
    closing: str  # after a thought
    empty: str | None  # an empty thought, after which the model answers at once; None if unknown
    cut: str  # ends a thought early
    others: Mapping[str, bool] = field(default_factory=dict)  # further marks; True: thoughts follow
    headed: str | None = None  # ends the header that every part has: text before the first one is not the answer
    again: str = ""  # ends a thought early, up to the header of the next part
    end: str | None = None  # ends an answer, but not a thought
    farewells: Mapping[str, str] = field(default_factory=dict)  # sentence before `cut`, by architecture

    @property
    def marks(self) -> dict[str, bool]:
        """All marks, with whether thoughts follow them."""
        return {self.opening: True, self.closing: False, **self.others}

    def state(self, text: str) -> bool | None:
        """Whether the last mark in a template's text leaves the model thinking; None without marks."""
        found = [(at, opens) for mark, opens in self.marks.items() if (at := text.rfind(mark.rstrip())) >= 0]
        return max(found)[1] if found else None

    def emptied(self, text: str) -> str | None:
        """The text with an empty thought at its end."""
        if self.empty is None:
            return None
        begun, opening = text.rstrip(), self.opening.rstrip()
        return (begun.removesuffix(opening) if begun.endswith(opening) else text) + self.empty

    def early_end(self, architecture: str) -> str:
        """The text that makes a model of this architecture stop thinking."""
        said = (sentence for name, sentence in self.farewells.items() if architecture.startswith(name))
        return next(said, "") + self.cut


_QWEN = "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now."

FAMILIES = (
    Family(  # Qwen 3 and 3.5, SmolLM3, MiniCPM5, DeepSeek, LFM2.5, GLM, Nemotron and others
        opening="<think>",
        closing="</think>",
        empty="<think>\n\n</think>\n\n",
        cut="\n</think>\n\n",
        farewells={"qwen3": _QWEN},  # section 4.3 of the Qwen3 technical report, arXiv:2505.09388
    ),
    Family(  # Gemma 4
        opening="<|channel>thought\n",
        closing="<channel|>",
        empty="<|channel>thought\n<channel|>",
        cut="\n<channel|>",
    ),
    Family(  # gpt-oss, in OpenAI's harmony format
        opening="<|channel|>analysis<|message|>",
        closing="<|channel|>final<|message|>",
        empty="<|channel|>final<|message|>",
        cut="<|end|><|start|>assistant<|channel|>final<|message|>",
        others={"<|channel|>commentary<|message|>": True, "<|start|>assistant": True},
        headed="<|message|>",
        again="<|end|><|start|>assistant",
        end="<|end|>",
    ),
    Family(  # Ministral 3 and Magistral, whose system prompt asks for thoughts
        opening="[THINK]",
        closing="[/THINK]",
        empty=None,
        cut="[/THINK]",
    ),
)


def find_family(template: str) -> Family | None:
    """The family of a chat template, None for models that do not think."""
    return next((family for family in FAMILIES if family.closing in template), None)


@dataclass(frozen=True)
class Think:
    """The user's thinking options."""

    enabled: bool | None = None  # None: the template's default
    tokens: int | None = None  # budget, after which the model is made to answer
    joules: float | None = None  # budget, likewise
    effort: str | None = None  # one of EFFORTS, for templates that know them

    @classmethod
    def parse(cls, value: Think | str | bool | int | None) -> Think:
        """Parse `on`, `off`, `256` or 256 (tokens), `5J`, `low`; True, False and None, too. Raises InputError."""
        if isinstance(value, cls):
            return value
        text = "" if value is None else {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"
        text = text.strip()
        if text in ("", "on", "off"):
            return cls(enabled={"": None, "on": True, "off": False}[text])
        if text in EFFORTS:
            return cls(effort=text)
        if re.fullmatch("[0-9]{1,9}", text):
            return cls(enabled=int(text) > 0, tokens=int(text) or None)
        if re.fullmatch(r"[0-9.]+\s*[A-Za-z]+", text):
            return cls(enabled=True, joules=parse_joules(text, "--think"))
        raise InputError(
            f"--think {value!r:.40} is not understood: on, off, a number of tokens (256), joules (5J), or "
            f"{', '.join(EFFORTS)}"
        )

    @property
    def chosen(self) -> bool:
        """Whether any option was chosen."""
        return self != Think()

    @property
    def mode(self) -> str:
        """The mode for rendering a template: `on`, `off`, an effort, or `default`."""
        return self.effort or {None: "default", True: "on", False: "off"}[self.enabled]

    def __str__(self) -> str:
        if self.tokens is not None or self.joules is not None:
            return f"{self.tokens} tokens" if self.joules is None else format_joules(self.joules)
        return self.mode

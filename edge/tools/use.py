"""The tools of one answer: which may be called, whether one must be, and how the model writes calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge.errors import InputError
from edge.json_schema import MALFORMED
from edge.records import dataclass
from edge.tools.formats import ToolFormat
from edge.tools.lark import call_grammar
from edge.tools.parser import ToolParser
from edge.values import brief

AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True)
class ToolUse:
    """The tools of one answer. tools: as in OpenAI's protocol, checked. only: the one function that must be called.
    required: some function must be called. parallel: several calls may follow each other. thinks: the model may think
    first. limited: the prompt has further tools, which this answer may not call."""

    form: ToolFormat
    tools: Sequence[Mapping[str, Any]]
    only: str | None = None
    required: bool = False
    parallel: bool = True
    thinks: bool = True
    limited: bool = False

    @property
    def forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.required or self.only is not None

    @property
    def constrains(self) -> bool:
        """Whether a grammar holds for the answer: tools must be called, one is `strict`, or not all may be called."""
        return self.forced or self.limited or any(tool["function"].get("strict") for tool in self.tools)

    @property
    def retyped(self) -> bool:
        """Whether the grammar takes a schema for an object's that states something else."""
        stated = [(tool["function"].get("parameters") or {}).get("type", "object") for tool in self.tools]
        return any(str(each).lower() != "object" for each in stated)

    def parser(self) -> ToolParser:
        return ToolParser(self.form, self.tools)

    def grammar(self, tokens: Mapping[str, int]) -> str | None:
        """The grammar of the answer in Lark's notation; None if none holds.

        tokens: special tokens of the vocabulary, by their text. Raises InputError for malformed schemas.
        """
        if not self.constrains:
            return None
        parallel = self.parallel and self.only is None
        try:
            return call_grammar(
                self.form, self.tools, tokens=tokens, name=self.only, required=self.forced, parallel=parallel,
                thinks=self.thinks,
            )  # fmt: skip
        except MALFORMED:
            raise InputError("the JSON schema of a tool's parameters is malformed", "tools") from None


def wrong_schema(number: int, why: str) -> InputError:
    """The error that a tool's schema is wrong, which names its place in a request."""
    where = f"tools[{number}].function.parameters"
    return InputError(f"{where}: {why}", where)


def parse_allowed(choice: object, names: Sequence[str]) -> tuple[object, Sequence[str]]:
    """A `tool_choice` among the tools that it allows, and their names: by default all. Raises InputError."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, names
    inner = choice.get("allowed_tools", choice)  # of chats; the responses API has them beside the type
    inner = inner if isinstance(inner, Mapping) else {}
    tools = inner.get("tools")
    listed = [each for each in tools if isinstance(each, Mapping)] if isinstance(tools, list) else []
    functions = [each.get("function", each) for each in listed if each.get("type", "function") == "function"]
    allowed = [each.get("name") for each in functions if isinstance(each, Mapping)]
    kept = [name for name in names if name in allowed]
    if names and not kept:
        raise InputError(f"tool_choice allows none of the tools: choose from {', '.join(names)}", "tool_choice")
    return inner.get("mode", AUTO), kept


def parse_choice(choice: object, names: Sequence[str]) -> tuple[str | None, bool, bool]:
    """Parse a `tool_choice`: the only function, whether a call is required, whether any is allowed. Raises
    InputError."""
    if choice is None or choice == AUTO:
        return None, False, True
    if choice == NONE:
        return None, False, False
    only: Any = None
    if choice == REQUIRED:
        found = bool(names)
    else:
        inner = choice.get("function", choice) if isinstance(choice, Mapping) else {"name": choice}
        only = inner.get("name") if isinstance(inner, Mapping) else None
        found = isinstance(only, str) and only in names
    if not found:
        wanted = "auto, none, required, or the name of a tool"
        known = ", ".join(names) or "there are none"
        raise InputError(f"tool_choice must be {wanted} ({known}), not {brief(choice)}", "tool_choice")
    return only, True, True

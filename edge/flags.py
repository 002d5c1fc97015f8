"""How an option is defined: as the field of a dataclass, which carries what people see of it.

Flags of the command line, variables of the environment, keywords and their documentation are made from such fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from edge.errors import KEYWORDS

PROMPT, BUDGETS, CACHE, SAMPLING, ENGINE, OUTPUT = "Prompt", "Budgets", "KV cache", "Sampling", "Engine", "Output"
GROUPS = (PROMPT, BUDGETS, CACHE, SAMPLING, ENGINE, OUTPUT)
"""Groups of options in the help of commands, in their order."""

KEYWORDS.update({
    "--at": "contexts", "--device": "device", "--force": "force=True", "--host": "host", "--max-tokens": "max_tokens",
    "--port": "port", "--quant": "quant", "--raw": "raw=True", "--stop": "stop", "--system": "system",
    "--think": "think", "--tokens": "max_tokens",
})  # fmt: skip
"""Flags whose Python twins are no options, but keywords of single functions."""

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """How people see an option. names: of the flag; empty for an option of Python alone. group: in the help.

    default: as people write it; None where something else decides, which `help` says. typed: what the command line
    takes; None: the type of the field. parse: makes the value of what people write, and raises InputError. twin:
    whether a variable of the environment stands for the flag. low, high: the range of a number.
    """

    names: tuple[str, ...]
    help: str
    group: str = ""
    default: Any = None
    typed: Any = None
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None
    twin: bool = True
    low: float = -math.inf
    high: float = math.inf

    @property
    def name(self) -> str:
        """The long name: `--max-tokens`."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def variable(self) -> str | None:
        """EDGE_KV_POLICY of `--kv-policy`."""
        return "EDGE_" + self.name[2:].replace("-", "_").upper() if self.names and self.twin else None


def option(default: Any, *names: str, help: str, unset: bool = False, **more: Any) -> Any:
    """A dataclass field that is an option. default: as people write it; unset: the command line has none."""
    flag = Flag(names, help, default=None if unset else default, **more)
    value = flag.parse(default) if flag.parse and default is not None else default
    return field(default=value, metadata={"flag": flag})


def named_in_errors(kind: type[T]) -> type[T]:
    """A dataclass whose fields are options: errors call them by flags or by keywords (`edge.errors.worded`)."""
    KEYWORDS.update({flag.name: name for name, flag in flags_of(kind).items() if flag.names})
    return kind


def flags_of(kind: Any) -> dict[str, Flag]:
    """The options among a dataclass's fields, by the fields' names."""
    return {each.name: each.metadata["flag"] for each in fields(kind) if "flag" in each.metadata}

"""Definition of options as dataclass fields with metadata.

Command-line flags, environment variables, keywords and their documentation are derived from such fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar

from edge.errors import KEYWORDS
from edge.records import dataclass

PROMPT, BUDGETS, CACHE, SAMPLING, ENGINE, SERVER, OUTPUT = (
    "Prompt", "Budgets", "KV cache", "Sampling", "Engine", "Server", "Output"
)  # fmt: skip
GROUPS = (PROMPT, BUDGETS, CACHE, SAMPLING, ENGINE, SERVER, OUTPUT)
"""Groups of options in the help of commands, in their order."""

KEYWORDS.update({
    "--at": "contexts", "--beam-size": "beam_size", "--beams": "beams", "--best-of": "best_of", "--device": "device",
    "--dimensions": "dimensions",
    "--audio": "sounds", "--force": "force=True", "--host": "host", "--image": "images", "--include": "include",
    "--instruction": "instruction", "--language": "language", "--length-penalty": "length_penalty",
    "--limit": "limit", "--max-tokens": "max_tokens",
    "--num-fewshot": "num_fewshot", "--outline": "outline",
    "--pooling": "pooling", "--port": "port", "--prompt-name": "prompt_name",
    "--quant": "quant", "--rate": "rate", "--raw": "raw=True", "--stop": "stop", "--system": "system",
    "--think": "think", "--timestamps": "timestamps", "--tokens": "max_tokens", "--truncate": "truncate=True",
    "--vad": "vad", "--vote": "vote",
})  # fmt: skip
"""Flags whose Python twins are no options, but keywords of single functions."""

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """The public side of an option."""

    names: tuple[str, ...]  # of the flag; empty: an option of Python alone
    help: str
    group: str = ""  # in the help
    default: Any = None  # as people write it; None: something else decides, which `help` says
    typed: Any = None  # type on the command line; None: the field's
    parse: Callable[[Any], Any] | None = None  # converts text to the value, and raises InputError
    written: str = ""  # type in Python, where that is not the field's
    metavar: str | None = None
    twin: bool = True  # whether an environment variable stands for the flag
    low: float = -math.inf  # of a number's range
    high: float = math.inf  # of a number's range
    apps: bool = True  # whether exported models have the option, too

    @property
    def name(self) -> str:
        """The long name: `--max-tokens`."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def range(self) -> str:
        return f"from {self.low} to {self.high}" if math.isfinite(self.high) else f"{self.low} or more"

    @property
    def variable(self) -> str | None:
        """The environment variable: EDGE_KV_POLICY of `--kv-policy`."""
        return "EDGE_" + self.name[2:].replace("-", "_").upper() if self.names and self.twin else None


def option(default: Any, *names: str, help: str, unset: bool = False, **more: Any) -> Any:
    """A dataclass field that is an option. default: as people write it; unset: the command line has no default."""
    flag = Flag(names, help, default=None if unset else default, **more)
    value = flag.parse(default) if flag.parse and default is not None else default
    return field(default=value, metadata={"flag": flag})


def named_in_errors(kind: type[T]) -> type[T]:
    """Mark a dataclass of options: errors name them as flags or as keywords (`edge.errors.worded`)."""
    KEYWORDS.update({flag.name: name for name, flag in flags_of(kind).items() if flag.names})
    return kind


def flags_of(kind: Any) -> dict[str, Flag]:
    """The options among a dataclass's fields, by field name."""
    return {each.name: each.metadata["flag"] for each in fields(kind) if "flag" in each.metadata}

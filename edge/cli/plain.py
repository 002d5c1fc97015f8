"""Arguments of `edge run` in their plain forms, read without typer, whose import is a seventh of the start.

A form is plain if it means one thing: whole names of flags, each once; values that do not begin with `-`; numbers of
digits. For all others, for help and errors, and if a variable of the environment stands for a flag, `read_plainly`
returns None, and typer reads the arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from edge.cli.groups import NOT_OF_RUN, AnswerOptions, Output, PromptOptions
from edge.flags import flags_of
from edge.options import Options
from edge.records import dataclass
from edge.sampling import SamplingParams

_GROUPS: tuple[Any, ...] = (PromptOptions, AnswerOptions, Options, SamplingParams, Output)
_MOST_DIGITS = 15  # of a number that float64 holds exactly


@dataclass(frozen=True)
class Arguments:
    """Those of `edge run`: MODEL, PROMPT, and by group the options that are stated."""

    model: str
    text: str | None
    stated: dict[Any, dict[str, Any]]


def read_plainly(arguments: Sequence[str]) -> Arguments | None:
    """The arguments behind `edge run`; None unless they are plain."""
    if sys.platform == "win32":  # where typer expands patterns of files
        return None
    flags: dict[str, tuple[Any, str, Any]] = {}
    for group in _GROUPS:
        for each in fields(group):
            flag = each.metadata.get("flag")
            if flag is not None and flag.names and each.name not in NOT_OF_RUN:
                if flag.variable and flag.variable in os.environ:
                    return None
                kind = str(each.type).removesuffix(" | None") if flag.typed is None else flag.typed.__name__
                flags.update(dict.fromkeys(flag.names, (group, each.name, kind)))
    stated: dict[Any, dict[str, Any]] = {group: {} for group in _GROUPS}
    texts, left = list[str](), iter(arguments)
    for word in left:
        if not word.startswith("-") or word == "-":
            texts.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in flags or (equals and not name.startswith("--")):
            return None
        group, field, kind = flags[name]
        if kind != "bool" and not equals:
            value = next(left, "-")
        read = _read(kind, value, bool(equals))
        if read is None or (field in stated[group] and kind != "list[str]"):
            return None
        stated[group][field] = stated[group].get(field, []) + read if kind == "list[str]" else read
    if len(texts) not in (1, 2):
        return None
    return Arguments(texts[0], texts[1] if texts[1:] else None, stated)


def _read(kind: str, value: str, joined: bool) -> Any:
    """The value of a flag; None unless it is plain. joined: by `=`."""
    if kind == "bool":
        return None if joined else True
    if value.startswith("-"):
        return None
    digits = value.replace(".", "", kind == "float")
    if kind in ("int", "float") and not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
        return None
    readers: dict[str, Any] = {"str": str, "int": int, "float": float, "Path": Path, "list[str]": lambda text: [text]}
    return readers[kind](value) if kind in readers else None


def run_plainly(arguments: Arguments) -> None:
    """`edge run` with these arguments."""
    from edge.cli.answering import answer_prompt
    from edge.errors import speaking

    question, answer, options, sampling, output = (arguments.stated[group] for group in _GROUPS)
    options = {name: options[name] for name in flags_of(Options) if name in options}  # as typer has them
    with speaking("flags"):
        answer_prompt(
            arguments.model, arguments.text, PromptOptions(**question), AnswerOptions(**answer),
            Options.parse(**options),
            {name: flag.default for name, flag in flags_of(SamplingParams).items()} | sampling, Output(**output),
        )  # fmt: skip

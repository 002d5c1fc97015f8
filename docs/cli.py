"""Writes docs/cli.md, the reference of the commands, from the commands themselves, and the types of the same options as
keywords of Python, edge/keywords.py, from their fields: python docs/cli.py"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from edge.cli.commands import app
from edge.cli.terminal.help import environment_page
from edge.options import written_types
from edge.run.session import Session

PAGE = Path(__file__).with_name("cli.md")
KEYWORDS = Path(__file__).parents[1] / "edge" / "keywords.py"
ANSWERS = KEYWORDS.parent / "run" / "keywords.py"

_KEYWORDS = '''\
"""The options of a run as keywords of functions, for type checkers.

Written by `python docs/cli.py` from `edge/options.py`: edit the fields there, not this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from edge.kv.policy import Policy
from edge.model.adapters.lora_file import LoraFile


class Keywords(TypedDict, total=False):
    """See `edge.options.Options`."""

'''

_ANSWERS = '''\
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

'''

_INTRODUCTION = """\
# Commands

Written by `python docs/cli.py` from the commands themselves: edit the help texts under `edge/cli/`, not this page.

MODEL is a GGUF file, a folder that `edge convert` wrote, or the name of an installed model such as `smollm2-135m`.
`edge COMMAND --help` prints a command's options. Options that several commands share are described once, under
[Shared options](#shared-options), and can also be [set in the environment](#environment). [run.md](run.md#exit-codes)
describes exit codes, stdout and stderr.
"""


def page(root: Any) -> str:
    """The whole reference, as Markdown."""
    commands = list(_commands(root))
    parts = [_INTRODUCTION, _table(["command", "purpose"], [_summary(*each) for each in commands])]
    for name, command in commands:
        parts.append(_section(name, command))
    parts += [
        "## Shared options\n",
        *_shared(command for _, command in commands),
        "## Environment\n",
        environment_page(root),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def keywords() -> dict[Path, str]:
    """The modules with the types of options, and of those of an answer, as TypedDicts."""
    answer = {each.name: each.annotation for each in list(inspect.signature(Session.stream).parameters.values())[2:]}
    return {KEYWORDS: _KEYWORDS + _fields(written_types()), ANSWERS: _ANSWERS + _fields(answer)}


def _fields(types: dict[str, str]) -> str:
    return "".join(f"    {name}: {kind}\n" for name, kind in types.items())


def _commands(group: Any, path: str = "edge") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with what a user types for it."""
    for name, command in group.commands.items():
        typed = f"{path} {name}"
        if hasattr(command, "commands"):
            if any(each.name not in ("help", "json") for each in command.params) or command.invoke_without_command:
                yield typed, command
            yield from _commands(command, typed)
        else:
            yield typed.removesuffix(" of"), command  # `edge profile MODEL` runs the subcommand `of`


def _summary(name: str, command: Any) -> list[str]:
    first = inspect.cleandoc(command.help or "").split("\n\n")[0].replace("\n", " ")
    return [f"[`{name}`](#{name.replace(' ', '-')})", first.split(". ")[0].rstrip(".")]


def _section(name: str, command: Any) -> str:
    """One command: its purpose, arguments and own options, and the names of those that it shares."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    own = [each for each in options if not each.envvar]
    usage = " ".join([name, *(_placeholder(each) for each in arguments), *["[OPTIONS]"] * bool(options)])
    lines = [f"## {name}\n", f"```text\n{usage}\n```\n", _paragraphs(command.help or "")]
    explained = [[f"`{_placeholder(each)}`", each.help] for each in arguments if each.help]
    explained += [[_names(each), _meaning(each)] for each in own]
    if explained:
        lines.append(_table(["argument or option", "meaning"], explained))
    if shared := [each for each in options if each.envvar]:
        lines.append("Shared options: " + ", ".join(f"`{_long(each)}`" + _default(each) for each in shared) + ".\n")
    return "\n".join(lines)


def _shared(commands: Iterable[Any]) -> Iterator[str]:
    """Options that have a twin in the environment mean the same in every command that has them."""
    groups: dict[str, dict[str, list[str]]] = {}
    for option in (each for command in commands for each in command.params):
        if getattr(option, "envvar", None):
            title = getattr(option, "rich_help_panel", None) or "Other"
            groups.setdefault(title, {}).setdefault(option.name, [_names(option), option.help])
    for title, rows in groups.items():
        yield f"### {title}\n"
        yield _table(["option", "meaning"], list(rows.values()))


def _paragraphs(text: str) -> str:
    """A command's help; its examples are indented and become blocks of code."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).replace("\b", "").split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        if lines and all(line.startswith("  ") for line in lines):
            paragraphs.append("\n".join(["```text", *(line.strip() for line in lines), "```"]))
        else:
            paragraphs.append(" ".join(lines))
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _names(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    return ", ".join(f"`{name}`" for name in names) + (f" {option.metavar}" if option.metavar else "")


def _long(option: Any) -> str:
    return next((name for name in option.opts if name.startswith("--")), str(option.opts[0]))


def _placeholder(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return str(name if argument.required else f"[{name}]")


def _meaning(option: Any) -> str:
    return str(option.help) + _default(option) + (" (required)" if option.required else "")


def _default(option: Any) -> str:
    value = getattr(option.default, "value", option.default)
    shown = value is not None and value is not False and not callable(value) and value not in ("", (), [], 0, 0.0)
    return f" (default: {value})" if shown else ""


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    for module, text in keywords().items():
        module.write_text(text, encoding="utf-8")
    PAGE.write_text(page(typer.main.get_command(app)), encoding="utf-8")

"""Help in plain text: options in groups, `edge help`, and the page of environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import typer.core

from edge.cli.terminal.show import table
from edge.errors import InputError
from edge.flags import GROUPS, OUTPUT

ENVIRONMENT = "environment"
_WHOLE = 1000  # characters, more than any sentence has
# Flags that people state again to add to the first; elsewhere the last one counts.
_ONCE = {"--prefix": "a run has one", "--lora": "one flag takes several adapters, with commas between them"}
_ADVICE = re.compile(r": (?:use|choose another) (--[a-z-]+)[^:,]*$")

# Variables without an option: folders, the instruction set, and the GPU.
_OTHERS = {
    "EDGE_CACHE": "The folder of compiled kernels, repacked weights and the history of runs (edge cache list).",
    "EDGE_CACHE_LIMIT": "Most that the cache may hold, such as 4GiB (default: 16GiB).",
    "EDGE_DEVICES": "The folder of your device profiles (edge devices).",
    "EDGE_GPU": "The GPU to use, by a part of its name or such as wgpu:0; off hides all (edge devices).",
    "EDGE_HISTORY": "0 remembers no runs to predict others from; a folder remembers them there.",
    "EDGE_INDEXES": "The folder of indexes of your documents (edge index).",
    "EDGE_ISA": "Instruction set of the native engine, such as avx2 or generic (default: the CPU's best).",
    "EDGE_SENSORS": "A folder with the device's sys and proc, for containers that have them elsewhere.",
    "EDGE_TUNING": "The folder of your tuning records (edge tune).",
}


class Command(typer.core.TyperCommand):
    """Lists options under the headings of their groups: those of the command alone first, output last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name, advice in _ONCE.items():
            if sum(each == name or each.startswith(f"{name}=") for each in args) > 1:
                raise InputError(f"{name} is stated twice: {advice}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", "Options", *GROUPS)}
        for param in self.get_params(ctx):
            kind = "Arguments" if param.param_type_name == "argument" else "Options"
            title = OUTPUT if param.name == "help" else getattr(param, "rich_help_panel", None) or kind
            if (record := param.get_help_record(ctx)) is not None:
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(typer.core.TyperGroup):
    """Lists commands with the whole first sentence of each, which click would cut."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = [(name, each.get_short_help_str(limit=_WHOLE)) for name, each in commands.items() if each]
        with formatter.section("Commands"):
            formatter.write_dl(shown)


def help(
    context: typer.Context,
    topic: Annotated[list[str] | None, typer.Argument(metavar="COMMAND", help="A command, or environment.")] = None,
) -> None:
    """Explain a command, or with `environment`, the variables that stand for options."""
    root: Any = context.find_root().command
    if topic == [ENVIRONMENT]:
        print(environment_page(root))
    else:
        root.main([*(topic or []), "--help"], prog_name="edge", standalone_mode=False)


def environment_page(root: Any) -> str:
    """Two tables: options that have a twin in the environment, and the variables of other things."""
    twins = {param.envvar: param for _, param in options_of(root) if param.envvar}
    rows = [[name, next(each for each in param.opts if each[:2] == "--")] for name, param in twins.items()]
    return "\n".join([
        "An option that means the same in every command can be set in the environment; a flag goes before it.",
        "A switch is on at 1 and off at 0; EDGE_STOP takes several texts with blanks between.",
        "",
        table(["variable", "option"], rows, left=2),
        "",
        table(["variable", "what it does"], [[name, said] for name, said in _OTHERS.items()], left=2),
    ])  # fmt: skip


def options_of(command: Any, path: str = "edge") -> Iterator[tuple[str, Any]]:
    """Every option of a command and of those below it, with the path of its command."""
    for param in command.params:
        if param.param_type_name == "option":
            yield path, param
    for name, each in getattr(command, "commands", {}).items():
        yield from options_of(each, f"{path} {name}")


def fitting(message: str, arguments: list[str], root: Any) -> str:
    """An error's message, less the advice to use an option that the command lacks: engines give advice without knowing
    the command."""
    advice = _ADVICE.search(message)
    if advice is None:
        return message
    command = _command_of(arguments, root)
    known = {name for _, option in options_of(command) for name in option.opts}
    if command.name == "tune":
        known.discard("--backend")  # which takes our own engines only
    return message if advice[1] in known else message[: advice.start()]


def naming_variable(message: str, arguments: list[str], root: Any) -> str:
    """An error's message, which begins with the name of an option, with that of its variable instead if the option was
    set in the environment."""
    for _, option in options_of(_command_of(arguments, root)):
        stated = any(each.startswith(name) for each in arguments for name in option.opts)
        if option.envvar and os.environ.get(option.envvar) and not stated:
            names = "|".join(re.escape(name.removeprefix("--")) for name in option.opts if name.startswith("--"))
            message = re.sub(rf"^(--)?({names})(?=[ :=])", option.envvar, message)
    return message


def _command_of(arguments: list[str], root: Any) -> Any:
    command = root
    for name in arguments:
        command = getattr(command, "commands", {}).get(name, command)
    return command

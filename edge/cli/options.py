"""Options as flags: those of `edge.options` in groups, and those that only the command line has.

A command whose parameter is a group of options, as in `options: Annotated[Options, o.without("keep")]`, is decorated
with `command`, which spreads it into a flag for each option.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_type_hints

import typer

from edge.cli.groups import AnswerOptions as AnswerOptions
from edge.cli.groups import Output
from edge.errors import InputError
from edge.flags import Flag, flags_of
from edge.options import Options
from edge.records import dataclass
from edge.sampling import SamplingParams


def flag(*names: str, help: str, group: str | None = None, **more: Any) -> Any:
    """A typer option of one command."""
    return typer.Option(*names, help=help, rich_help_panel=group, **more)


def output(help: str) -> Any:
    """The option of what a command writes, which is no empty text."""
    return flag("-o", "--output", help=help, metavar="PATH", parser=_path)


def _path(text: str) -> Path:
    if not text:
        raise InputError("-o must be a path, not ''")
    return Path(text)


def _typer_option(shown: Flag) -> Any:
    return flag(
        *shown.names, help=shown.help, group=shown.group, metavar=shown.metavar, envvar=shown.variable,
        show_envvar=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """A command's share of a group of options. only: their names, None for all. defaults: those of this command."""

    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)

    def parameters(self, group: Any) -> dict[str, inspect.Parameter]:
        """A parameter of a command for each option, by its name, as typer wants them."""
        types, found = get_type_hints(group), {}
        for name, shown in flags_of(group).items():
            if shown.names and name not in self.without and (self.only is None or name in self.only):
                default = self.defaults.get(name, shown.default)
                typed = types[name] if shown.typed is None else shown.typed
                value: Any = Optional[typed] if default is None else typed  # noqa: UP045
                hint = Annotated[value, _typer_option(shown)]
                kind = inspect.Parameter.KEYWORD_ONLY
                found[name] = inspect.Parameter(name, kind, default=default, annotation=hint)
        return found


def only(*names: str, **defaults: Any) -> Selection:
    return Selection(names, defaults=defaults)


def without(*names: str, **defaults: Any) -> Selection:
    return Selection(None, names, defaults)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Spread each parameter that is a group of options into a flag for each of them."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        made, *marks = get_args(hints[name]) or [hints[name]]
        group = next((each for each in (made, *marks) if isinstance(each, type) and is_dataclass(each)), None)
        if group is None:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))
            continue
        selection = next((each for each in marks if isinstance(each, Selection)), Selection())
        flags = selection.parameters(group)
        groups[name] = (getattr(group, "parse", group) if made is group else dict, list(flags))
        parameters += flags.values()

    @functools.wraps(function)
    def spread(**values: Any) -> None:
        for name, (make, flags) in groups.items():
            values[name] = make(**{each: values.pop(each) for each in flags})
        function(**values)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {each.name: each.annotation for each in parameters}
    return spread


Sampling = Annotated[dict[str, Any], SamplingParams]
"""The stated fields of SamplingParams, None for the others, which the model's file may set."""

LIMITS = (
    "time", "energy", "power", "max_temp", "keep", "prompt_cache", "prompt_cache_size", "sequences", "speculate",
    "draft", "prefix", "mmproj", "image_tokens",
)  # fmt: skip
"""Options that measuring commands lack: limits would distort the measurements, and they run one sequence."""
MEASURED = without(*LIMITS, "provider", "chat_template")

_MODEL = typer.Argument(
    metavar="MODEL", help="A GGUF file, a folder of edge convert, or an installed model: smollm2-135m."
)
ModelArgument = Annotated[str, _MODEL]
OptionalModelArgument = Annotated[str | None, _MODEL]
Threads = Annotated[int | None, _typer_option(flags_of(Options)["threads"])]
NativeKVDtype = Annotated[str, flag("--kv-dtype", help="f16, int8, int4 or f32.")]
_OUTPUT = flags_of(Output)
Json = Annotated[bool, _typer_option(_OUTPUT["json"])]
Quiet = Annotated[bool, _typer_option(_OUTPUT["quiet"])]
Verbose = Annotated[bool, _typer_option(_OUTPUT["verbose"])]


def stated(context: typer.Context, but: Collection[str]) -> str | None:
    """The first option on the command line that is not among `but`, by names of parameters. Those of the environment do
    not count: they are for all commands."""
    for each in context.command.params:
        source = context.get_parameter_source(str(each.name))
        if each.name not in but and source is not None and source.name == "COMMANDLINE":
            return each.opts[-1]
    return None


def parse_numbers(flag: str, text: str, least: int = 0) -> list[int]:
    """Each once, in their order. Raises InputError for a text that is no number, or one below `least`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts):
        raise InputError(f"{flag} takes numbers separated by commas, {least} at least, such as 512,4096, not {text!r}")
    return list(dict.fromkeys(int(part) for part in parts))

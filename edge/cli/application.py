"""The commands of `edge`, by the places of their functions: each is imported and built when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from edge.cli.terminal.help import Command, Group
from edge.errors import speaking

_COMMANDS = {
    "run": "run:run", "chat": "chat.command:chat", "serve": "serve:serve", "embed": "documents.embed:embed",
    "rank": "documents.rank:rank",
    "transcribe": "transcribe:transcribe", "index": "documents.index:index", "ask": "documents.ask:ask",
    "pull": "pull:pull", "plan": "plan:plan", "bench": "measuring.bench:bench", "tune": "measuring.tune:tune",
    "search": "measuring.search:search",
    "compile": "making.compile:compile", "export": "making.export:export",
    "export-adapter": "making.export_adapter:export_adapter", "serve-site": "making.serve_site:serve_site",
    "convert": "making.convert:convert", "quantize": "making.quantize:quantize", "inspect": "inspect:inspect",
    "help": "terminal.help:help",
}  # fmt: skip
_GROUPS = {
    "eval": "measuring.evaluate:evaluate", "profile": "measuring.profile:profile", "models": "models:models",
    "cache": "cache:cache", "devices": "devices:devices",
}  # fmt: skip


def is_command(name: str) -> bool:
    return name in _COMMANDS or name in _GROUPS


def application(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application with the command that the arguments call; with all commands if they call none, or `edge help`,
    which explains the others."""
    called = arguments[0] if arguments else ""
    alone = is_command(called) and called != "help"
    app = typer.Typer(
        name="edge",
        cls=Group,
        help="Run language models on this device, inside a stated budget.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: half the start-up time
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, place in _COMMANDS.items():
        if name == called or not alone:
            app.command(name, cls=Command)(_found(place))
    for name, place in _GROUPS.items():
        if name == called or not alone:
            app.add_typer(_found(place), name=name)
    app.callback(invoke_without_command=True)(_options)
    return app


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"edge.cli.{module}"), name)


def _version(wanted: bool) -> None:
    if wanted:
        from edge.storage.versions import edge_version

        print(f"edge {edge_version()}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Run language models on this device, inside a stated budget."""
    context.with_resource(speaking("flags"))
    if context.invoked_subcommand is None:
        print(context.get_help())

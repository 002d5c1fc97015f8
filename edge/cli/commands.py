"""All commands of `edge`: one file each, put together here."""

from __future__ import annotations

from typing import Annotated

import typer

from edge.cli.cache import cache
from edge.cli.chat.command import chat
from edge.cli.devices import devices
from edge.cli.embed import embed
from edge.cli.inspect import inspect
from edge.cli.making.compile import compile
from edge.cli.making.convert import convert
from edge.cli.making.export import export
from edge.cli.making.export_adapter import export_adapter
from edge.cli.making.quantize import quantize
from edge.cli.making.serve_site import serve_site
from edge.cli.measuring.bench import bench
from edge.cli.measuring.evaluate import evaluate
from edge.cli.measuring.profile import profile
from edge.cli.measuring.tune import tune
from edge.cli.models import models
from edge.cli.plan import plan
from edge.cli.pull import pull
from edge.cli.run import run
from edge.cli.serve import serve
from edge.cli.terminal.help import Command, Group, help
from edge.errors import speaking

app = typer.Typer(
    name="edge",
    cls=Group,
    help="Run language models on this device, inside a stated budget.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the start-up time
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run, chat, serve, embed, pull, plan, bench, tune, compile, export, export_adapter, serve_site, convert, quantize,
    inspect, help,
):  # fmt: skip
    app.command(cls=Command)(command)
app.add_typer(evaluate, name="eval")
app.add_typer(profile, name="profile")
app.add_typer(models, name="models")
app.add_typer(cache, name="cache")
app.add_typer(devices, name="devices")


def _version(wanted: bool) -> None:
    if wanted:
        from edge.storage.versions import edge_version

        print(f"edge {edge_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
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

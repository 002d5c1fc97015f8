"""The `edge` command: one file per subcommand; errors become one line and an exit code here.

Exit codes: 0 done, 2 bad input, 3 the budget cannot be met, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from edge.cli.bench import bench
from edge.cli.chat import chat
from edge.cli.devices import devices
from edge.cli.evaluate import evaluate
from edge.cli.plan import plan
from edge.cli.run import run
from edge.errors import EdgeError

app = typer.Typer(
    name="edge",
    help="Run language models on this device, inside a stated budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, chat, plan, bench, devices):
    app.command()(command)
app.add_typer(evaluate, name="eval")


def _version(wanted: bool) -> None:
    if wanted:
        from edge.session import edge_version

        print(f"edge {edge_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Run language models on this device, inside a stated budget."""


def main() -> None:
    """Entry point of the `edge` command."""
    try:
        app(standalone_mode=True)
    except EdgeError as error:
        print(f"edge: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader has left (`edge run … | head`): that is its right. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        print("edge: out of memory: state a smaller --memory or --max-kv-size", file=sys.stderr)
        sys.exit(3)

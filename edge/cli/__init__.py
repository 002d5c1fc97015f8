"""The `edge` command: one file per subcommand; errors become one line and an exit code here.

Exit codes: 0 done, 2 bad input, 3 the budget cannot be met, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from edge.cli.bench import bench
from edge.cli.cache import cache
from edge.cli.chat import chat
from edge.cli.compile import compile
from edge.cli.convert import convert
from edge.cli.devices import devices
from edge.cli.evaluate import evaluate
from edge.cli.inspect import inspect
from edge.cli.plan import plan
from edge.cli.profile import profile
from edge.cli.quantize import quantize
from edge.cli.run import run
from edge.cli.signals import interrupted, terminate
from edge.cli.tune import tune
from edge.errors import EdgeError

app = typer.Typer(
    name="edge",
    help="Run language models on this device, inside a stated budget.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the start-up time
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, chat, plan, bench, tune, compile, convert, quantize, inspect):
    app.command()(command)
app.add_typer(evaluate, name="eval")
app.add_typer(profile, name="profile")
app.add_typer(cache, name="cache")
app.add_typer(devices, name="devices")


def _version(wanted: bool) -> None:
    if wanted:
        from edge.versions import edge_version

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
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Entry point of the `edge` command: every failure that a user can cause becomes one line and an exit code."""
    signal.signal(signal.SIGTERM, terminate)
    try:
        status = app(standalone_mode=False)
        sys.exit(interrupted() if status == 130 else status)  # which typer makes of an interrupt
    except EdgeError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(interrupted())
    except BrokenPipeError:
        # The reader has left (`edge run … | head`): that is its right. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _fail("out of memory: state a smaller --memory or --max-kv-size", 3)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's own errors: unknown options, missing arguments
        if usage is None:
            raise
        _fail(f"{usage().rstrip('.')} (see edge {_subcommand()}--help)", 2)


def _subcommand() -> str:
    names = {info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands}
    names |= {info.name for info in app.registered_groups}
    return f"{sys.argv[1]} " if len(sys.argv) > 1 and sys.argv[1] in names else ""


def _fail(message: str, code: int) -> NoReturn:
    print(f"edge: {message}", file=sys.stderr)
    sys.exit(code)

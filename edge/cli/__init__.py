"""The `edge` command: errors become one line and an exit code here. `application.py` puts the subcommands together.

Exit codes: 0 done, 2 bad input, 3 the budget cannot be met, 74 stdout cannot be written, 130 interrupted (Ctrl-C), 141
the reader of stdout has left, 143 terminated (SIGTERM).
"""

from __future__ import annotations

import os
import sys

from edge.cli.terminal.signals import interrupted, leave_at_once, raise_interrupts, was_interrupted

TYPE_CHECKING = False  # typing is not imported here: see signals.py
if TYPE_CHECKING:
    from collections.abc import Callable

_YES = ("1", "true", "t", "yes", "y", "on")  # values of EDGE_JSON that click takes for true
_OBJECTS = 20_000  # between collections of garbage: what imports make stays, and 700 would be a tenth of the start


def main() -> None:
    """Entry point of the `edge` command."""
    _leave(run_command())


def run_command() -> int:
    """The command of sys.argv: every failure that a user can cause becomes one line and an exit code."""
    leave_at_once()  # before the imports: they take a tenth of a second, in which a Ctrl-C may come
    import gc

    gc.set_threshold(_OBJECTS)
    from edge.cli.terminal.streams import give_up_output, open_streams
    from edge.errors import OutputError

    open_streams()
    try:
        command = _command()
        raise_interrupts()
        status = command()
        sys.stdout.flush()
        code = interrupted() if status == 130 else status or 0  # typer's status for an interrupt
    except KeyboardInterrupt:
        code = interrupted()
    except Exception as error:
        # C code may drop the exception of a signal's handler and fail with one of its own
        code = interrupted() if was_interrupted() else _code_of(error)
    leave_at_once()
    try:
        sys.stdout.flush()
    except OutputError:
        give_up_output()
    return code


def _command() -> Callable[[], int | None]:
    """The command that sys.argv calls."""
    if sys.argv[1:2] == ["run"]:
        from edge.cli.plain import read_plainly, run_plainly

        if (arguments := read_plainly(sys.argv[2:])) is not None:
            return lambda: run_plainly(arguments)
    from contextlib import ExitStack

    with ExitStack() as beside:
        if sys.argv[1:2] == ["plan"] or (sys.argv[1:2] == ["models"] and "--fits" in sys.argv):
            import edge.run.starting.loading  # noqa: F401 - as runs do: plans leave out what else is imported
            from edge.devices.memory.beyond import beyond_a_run

            beside.enter_context(beyond_a_run(anew=True))
        from edge.cli.application import application

        app = application(sys.argv[1:])
    return lambda: app(standalone_mode=False)


def _code_of(error: Exception) -> int:
    """The exit code of an error, which is reported in a line. Raises it again if it is a fault of ours."""
    from typer import Abort

    from edge.cli.application import is_command
    from edge.cli.terminal.streams import ReaderLeftError
    from edge.errors import BudgetError, EdgeError

    match error:
        case ReaderLeftError():
            return error.exit_code
        case BudgetError():
            return _fail(error, error.exit_code, smallest=error.smallest)
        case EdgeError():
            return _fail(error, error.exit_code)
        case MemoryError():
            return _fail(error, 3, "out of memory: state a smaller --memory or --max-kv-size")
        case OSError():  # of a file, or of the device
            return _fail(error, 2, f"{error.filename}: {error.strerror}" if error.filename else str(error))
        case Abort():
            return interrupted()
    usage = getattr(error, "format_message", None)  # click's own errors: unknown options, missing arguments
    if usage is None:
        raise error
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if context and param is not None and getattr(context.get_parameter_source(param.name), "name", "") == "ENVIRONMENT":
        error.param_hint = param.envvar  # type: ignore[attr-defined]
    if context:
        command = context.command_path.removeprefix(context.find_root().command_path).removesuffix(" of")
    else:  # click's parser of options has none
        command = f" {sys.argv[1]}" if is_command(sys.argv[1]) else ""
    said = usage().rstrip(".").replace("Recognized values: , ", "Recognized values: ")  # click's first one is empty
    return _fail(error, 2, f"{said} (see edge{command} --help)")


def _leave(code: int) -> None:
    """End the process without taking the interpreter apart, which takes a tenth of a second."""
    import atexit
    import threading

    if any(each is not threading.main_thread() and not each.daemon for each in threading.enumerate()):
        sys.exit(code)  # which waits for them
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fail(error: Exception, code: int, message: str | None = None, **more: object) -> int:
    """Report an error to people on stderr and, under --json, to programs on stdout."""
    from contextlib import suppress

    import typer.main

    from edge.cli.application import application
    from edge.cli.terminal.help import fitting, naming_variable
    from edge.cli.terminal.show import note, print_json, printable
    from edge.errors import EdgeError, OutputError, shortened

    message = shortened(printable(message or str(error), but=""))  # one line, whatever a file is called
    if isinstance(error, EdgeError):
        root = typer.main.get_command(application(sys.argv[1:]))
        message = naming_variable(fitting(message, sys.argv[1:], root), sys.argv[1:], root)
    note(f"edge: {message}")
    if "--json" in sys.argv or os.environ.get("EDGE_JSON", "").lower() in _YES:
        kind = type(error).__name__ if isinstance(error, (EdgeError, MemoryError, OSError)) else "UsageError"
        with suppress(OutputError):
            print_json({"error": {"type": kind, "message": message, "exit_code": code, **more}})
    return code

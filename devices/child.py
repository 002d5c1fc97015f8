"""Processes of our own that talk in lines of JSON: their crash, their memory and their threads are not this one's.

The parent calls `run_child`, the module that it names calls `serve`. The request is one line on the child's stdin,
which stays open: when it ends, the parent is gone, and so is the child. Linux ends it at once, whatever it is doing. On
stdout come messages (objects of any keys), and at last {"result": ...} or {"error": its message, "type": its class in
edge.errors}.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from edge import errors
from edge.errors import EdgeError, EngineError

Message = dict[str, Any]
Say = Callable[[Message], None]

_LAST_WORDS = 200  # characters of them
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def run_child(
    module: str,
    request: object,
    hear: Say,
    *,
    failure: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float | None = None,
) -> Any:
    """What the program MODULE answers to a request that JSON can say. hear: is called with every message before.

    environment: added to ours. folder: where it works (None: where we do). timeout: seconds. It imports what we import
    and nothing from where it works, leads a session of its own (Ctrl-C is for us to handle), and is ended with all that
    it started, however this function is left.
    Raises the child's EdgeError; EngineError if it ended without an answer: `failure`, its status and last words.
    """
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            _command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            encoding="utf-8", env={**os.environ, **(environment or {})}, cwd=folder, start_new_session=True,
        )  # fmt: skip
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _kill(child)

        timer = threading.Timer(timeout or 0, give_up)
        timer.daemon = True
        try:
            if timeout is not None:
                timer.start()
            assert child.stdin is not None
            assert child.stdout is not None
            with suppress(BrokenPipeError):  # it died: see below
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
            for line in child.stdout:
                message = json.loads(line) if line.endswith("\n") else {}  # cut off: it died
                if "error" in message:
                    raise _error(message)
                if "result" in message:
                    return message["result"]
                if message:
                    hear(message)
            if late.is_set():
                raise EngineError(f"{failure}: it took more than {timeout:g} s")
            raise EngineError(f"{failure}: it ended with status {child.wait()}: {_last_words(said)}")
        finally:
            timer.cancel()
            _end(child)


def _command(module: str) -> list[str]:
    """Python that runs a module as `-m` does, but finds modules where we do from the beginning.

    `-m` would look in the working folder first, where anything may lie, and Python 3.10 cannot be told otherwise.
    """
    places = [os.path.abspath(place) for place in sys.path]
    start = f"from edge.devices.child import start; start({module!r}, {os.getpid()})"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {places!r}; {start}"]


def start(module: str, parent: int) -> None:
    """What a child does first: it ties its life to its parent's, and becomes the module."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def serve(work: Callable[[Any, Say], object]) -> None:
    """Answer the parent's request with what work(request, say) returns, or with the EdgeError that it raises.

    Other errors end the process as usual; everything printed meanwhile goes to stderr.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: Message) -> None:
        out.write(json.dumps(message, allow_nan=False) + "\n")
        out.flush()

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        say({"result": work(request, say)})
    except EdgeError as error:
        say({"error": str(error), "type": type(error).__name__})


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):  # not through sys.stdin, whose lock this thread would hold when Python ends
            pass
    os._exit(1)


def _error(message: Message) -> EdgeError:
    kind = getattr(errors, str(message["type"]), EngineError)
    error = EdgeError.__new__(kind if isinstance(kind, type) and issubclass(kind, EdgeError) else EngineError)
    Exception.__init__(error, message["error"])  # not every type is made of a message alone
    return error


def _last_words(said: IO[bytes]) -> str:
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:_LAST_WORDS] if lines else "no reason given"


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and its children: it leads a session of its own."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()


def _end(child: subprocess.Popen[str]) -> None:
    _kill(child)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # it no longer needs the rest of the request
            if pipe:
                pipe.close()

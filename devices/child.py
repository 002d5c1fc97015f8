"""Child processes that exchange JSON lines with this one, which isolates their crashes, memory and threads.

The parent calls `run_child`, and the module that it names calls `serve`. The request is one line on the child's stdin,
which stays open: its end tells the child that the parent is gone, so the child exits (Linux kills it at once). The
child writes messages (objects of any keys) to stdout, and finally {"result": ..., "peak": peak resident set in bytes}
or {"error": message, "type": class name in edge.errors}.

A memory budget holds for this process and its child together, and a deadline for both: `room_for_children` states
them, `run_child` keeps them.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from edge import errors
from edge.budget import format_bytes
from edge.devices.memory import memory_use
from edge.devices.platform import wait_for_end
from edge.errors import BudgetError, EdgeError, EngineError
from edge.records import dataclass

if TYPE_CHECKING:
    import subprocess

Message = dict[str, Any]
Say = Callable[[Message], None]

_log = logging.getLogger("edge")

_RESERVE = 6 << 20  # added to an advised budget, for what this process does meanwhile

_LAST_WORDS = 200  # characters of the child's last line that are quoted
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass
class Room:
    """The memory budget of this process and its children, in bytes, and the time at which children end."""

    limit: int | None = None  # None: no budget
    deadline: float | None = None  # of time.perf_counter()
    most: int = 0  # peak of both together; 0: no child ran


_ROOM: ContextVar[Room | None] = ContextVar("room", default=None)


@contextmanager
def room_for_children(limit: int | None, deadline: float | None = None) -> Iterator[Room]:
    """Limit this process and the children that start within this block to `limit` bytes in all. The peak of an outer
    block counts here, too, and its deadline holds.

    deadline: the value of time.perf_counter() at which children are killed.
    """
    outer = _ROOM.get()
    room = Room(limit, outer.deadline if outer and deadline is None else deadline, children_peak())
    token = _ROOM.set(room)
    try:
        yield room
    finally:
        _ROOM.reset(token)
        if outer:
            outer.most = max(outer.most, room.most)


def children_peak() -> int:
    """Peak bytes of this process and its children within the innermost `room_for_children` block; 0 outside."""
    room = _ROOM.get()
    return room.most if room else 0


def run_child(
    module: str,
    request: object,
    hear: Say,
    *,
    failure: str,
    takes: int = 0,
    purpose: str = "",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout: float | None = None,
) -> Any:
    """Run a module in a child process and return its answer to a JSON request. hear: called with every message before
    it.

    takes: the child's peak memory in bytes; a larger one is logged as a warning. purpose: why a first run starts it,
    for messages. environment: added to ours. folder: its working folder (default: ours). timeout: seconds. The child
    imports what we import and nothing from its working folder; it leads a session of its own, since Ctrl-C is ours to
    handle, and is killed with all its children however this function ends.

    Raises the child's EdgeError; BudgetError if the memory budget has no room for it, or if the deadline comes before
    its end; EngineError if it ended without an answer: `failure`, its exit status and last words.
    """
    import subprocess
    import tempfile

    room = _ROOM.get() or Room()
    own = memory_use().rss
    if takes and room.limit is not None and own + takes > room.limit:
        raise _no_room(own, takes, room.limit, purpose)
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            _command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            encoding="utf-8", env={**os.environ, **(environment or {})}, cwd=folder, start_new_session=True,
        )  # fmt: skip
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _kill(child)

        left = None if room.deadline is None else max(0.0, room.deadline - time.perf_counter())
        ends = min((each for each in (timeout, left) if each is not None), default=None)
        timer = threading.Timer(ends or 0, give_up)
        timer.daemon = True
        try:
            if ends is not None:
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
                    own = max(own, memory_use().rss)
                    room.most = max(room.most, own + message["peak"])
                    if takes and message["peak"] > takes:
                        _log.warning(
                            "a process that %s took %s, planned were %s",
                            purpose, format_bytes(message["peak"]), format_bytes(takes),
                        )  # fmt: skip
                    return message["result"]
                if message:
                    hear(message)
            if late.is_set() and ends == left:
                work = purpose or "prepares the model"
                raise BudgetError(f"no answer: --time was over while a first run {work}: run it once without --time")
            if late.is_set():
                raise EngineError(f"{failure}: it took more than {timeout:g} s")
            raise EngineError(f"{failure}: it ended with status {child.wait()}: {_last_words(said)}")
        finally:
            timer.cancel()
            _end(child)


def _no_room(own: int, takes: int, limit: int, purpose: str) -> BudgetError:
    needed = -(-(own + takes + _RESERVE) >> 20) << 20
    return BudgetError(
        f"needs {format_bytes(needed)}, the memory budget is {format_bytes(limit)}: a first run {purpose} in a process "
        f"of its own, which takes {format_bytes(takes)}: the smallest that fits is --memory {needed >> 20}MiB; later "
        "runs need less",
        smallest=needed,
    )


def _command(module: str) -> list[str]:
    """A Python command that runs a module as `-m` does, but with our module search path from the beginning.

    `-m` would search the working folder first, which may hold anything; Python 3.10 has no option against that.
    """
    places = [os.path.abspath(place) for place in sys.path]
    start = f"from edge.devices.child import start; start({module!r}, {os.getpid()})"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {places!r}; {start}"]


def start(module: str, parent: int) -> None:
    """The child's entry point: tie its life to its parent's, then run the module."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent was gone before
            os._exit(1)
    elif sys.platform == "win32":
        threading.Thread(target=_end_after, args=[parent], name="parent", daemon=True).start()
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
    if sys.platform != "win32":
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        with errors.speaking("any"):
            answer = work(request, say)
        say({"result": answer, "peak": memory_use().peak})
    except EdgeError as error:
        say({"error": str(error), "type": type(error).__name__})


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):  # not through sys.stdin, whose lock this thread would hold when Python ends
            pass
    os._exit(1)


def _end_after(parent: int) -> None:
    """For Windows, where a thread that reads a pipe blocks others that query it, such as libraries while they load."""
    wait_for_end(parent)
    os._exit(1)


def _error(message: Message) -> EdgeError:
    kind = getattr(errors, str(message["type"]), EngineError)
    error = EdgeError.__new__(kind if isinstance(kind, type) and issubclass(kind, EdgeError) else EngineError)
    Exception.__init__(error, errors.worded(str(message["error"])))  # some types' constructors take other arguments
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
        with suppress(OSError):  # the child no longer needs the rest of the request
            if pipe:
                pipe.close()

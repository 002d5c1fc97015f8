"""Runs jobs in processes of their own, and leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from typing import IO, Any

from edge import errors
from edge.errors import EdgeError, EngineError
from edge.profiling.job import Job
from edge.profiling.progress import OnStep


def run_in_child(job: Job, on_step: OnStep) -> dict[str, Any]:
    """The child's result. Raises its EdgeError, or EngineError if it died."""
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "edge.profiling.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, encoding="utf-8",
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # not an edge/ of the user's folder
            start_new_session=True,
        )  # fmt: skip
        try:
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # it died: see below
                child.stdin.write(json.dumps(asdict(job)) + "\n")
                child.stdin.flush()
            return _listen(child, said, job, on_step)
        finally:
            _end(child)


def _listen(child: subprocess.Popen[str], errors_file: IO[bytes], job: Job, on_step: OnStep) -> dict[str, Any]:
    assert child.stdout is not None
    result: dict[str, Any] | None = None
    for line in child.stdout:
        said = json.loads(line)
        if "error" in said:
            raise _error(said)
        if "result" in said:
            result = said["result"]
            break
        on_step(said["doing"], said["share"])
    if result is not None:
        return result
    status = child.wait()
    errors_file.seek(0)
    words = [line for line in errors_file.read().decode(errors="replace").splitlines() if line.strip()]
    last = words[-1][:200] if words else "no reason given"
    raise EngineError(f"the {job.engine} engine ended with status {status} while it was measured ({last})")


def _error(said: dict[str, Any]) -> EdgeError:
    kind = getattr(errors, str(said["type"]), EngineError)
    error = EdgeError.__new__(kind if isinstance(kind, type) and issubclass(kind, EdgeError) else EngineError)
    Exception.__init__(error, said["error"])  # not every type is made of a message alone
    return error


def _end(child: subprocess.Popen[str]) -> None:
    """With all that it started: it leads a session of its own."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # what it was to be told is not needed any more
            if pipe:
                pipe.close()

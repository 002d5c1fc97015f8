"""`edge serve` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and its address."""
    command = [sys.executable, "-m", "edge", "serve", *arguments, "--port", "0", "--json", "-q"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            if not line:
                raise AssertionError(process.communicate()[1])
            yield process, json.loads(line)["url"]
        finally:
            process.kill()


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Its address."""
    with started(*arguments) as (_, url):
        yield url

"""Lines that a library writes to stderr on its own, left out."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

_lock = Lock()


@contextmanager
def without_lines(unwanted: re.Pattern[bytes]) -> Iterator[None]:
    """Leave out lines in which `unwanted` is found and that are written to stderr's descriptor within the block.
    Others, of other threads, follow behind it."""
    with _lock, tempfile.TemporaryFile() as held:
        try:
            own = os.dup(2)
        except OSError:  # there is no stderr
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(own, 2)
            held.seek(0)
            others = [line for line in held if not unwanted.search(line)]
            with suppress(OSError):
                os.write(own, b"".join(others))
            os.close(own)

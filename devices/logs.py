"""Suppress log lines of libraries that a command's own output replaces."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_from(level: int, name: str) -> Iterator[None]:
    """Suppress the lines of a logger, and of those below it, that are less severe than `level`."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)

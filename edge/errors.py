"""The one tree of errors: every failure a user can cause has a type and a one-line message that says what to do."""

from __future__ import annotations


class EdgeError(Exception):
    """Base of all errors that edge raises on purpose. `exit_code` is what the CLI returns."""

    exit_code = 2


class InputError(EdgeError):
    """An argument, option or file name is wrong."""


class ModelFormatError(EdgeError):
    """A model file is damaged, truncated, or not what it claims to be."""


class UnsupportedError(EdgeError):
    """The request is valid, but this engine or this version cannot do it."""


class MissingExtraError(EdgeError):
    """An optional dependency is not installed; the message names the pip command."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} is not installed: pip install 'edge-runtime[{extra}]'")


class EngineError(EdgeError):
    """An engine failed while it ran a valid request."""


class CacheError(EdgeError):
    """The cache folder cannot be written, or has no room."""


class OutputError(EdgeError):
    """What was asked for cannot be written to stdout: a full disk, a closed stream."""

    exit_code = 74  # EX_IOERR of sysexits.h; 1 is what a traceback gives


class BudgetError(EdgeError):
    """The stated budget cannot be met. `smallest` is the smallest memory budget (bytes) that would, if known."""

    exit_code = 3

    def __init__(self, message: str, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest

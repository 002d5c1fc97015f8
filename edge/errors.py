"""Error types: every failure that a user can cause has one, with a one-line message that says what to do."""

from __future__ import annotations

import re

_ECHOED = 200  # characters of foreign text that a message quotes
_MOST = 2000  # of any message
_LONG = re.compile(rf"(?<!\w)'[^']{{{_ECHOED},}}'(?!\w)|(?<!\w)\"[^\"]{{{_ECHOED},}}\"(?!\w)|\S{{{_ECHOED + 1},}}")


def shortened(message: str) -> str:
    """The message with the middle of overlong parts omitted: of quoted text, of a word, of the whole."""
    return _middle_out(_LONG.sub(lambda found: _middle_out(found[0], _ECHOED), message), _MOST)


def _middle_out(text: str, most: int) -> str:
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


class EdgeError(Exception):
    """Base of all errors that edge raises on purpose. `exit_code` is what the CLI returns."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


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


class BusyError(EdgeError):
    """The session is busy: it runs one generation at a time, in the process that loaded it."""


class CacheError(EdgeError):
    """The cache folder cannot be written, or has no room."""


class DownloadError(EdgeError):
    """A model cannot be downloaded: no connection, no such repository, no access, or not what the Hub lists."""


class OutputError(EdgeError):
    """The output cannot be written to stdout: a full disk, a closed stream."""

    exit_code = 74  # EX_IOERR of sysexits.h; a traceback exits with 1


class BudgetError(EdgeError):
    """The stated budget cannot be met. `smallest` is the smallest memory budget (bytes) that would, if known."""

    exit_code = 3

    def __init__(self, message: str, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest

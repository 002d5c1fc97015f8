"""Error types: every failure that a user can cause has one, with a one-line message that says what to do.

Messages in the source name flags, with `=` before a value that is a word: `use --kv-policy=streaming`. They are
reworded for the caller: a program reads `use kv_policy="streaming"`, a terminal `use --kv-policy streaming`. Arguments
after a command's name, as in `edge run --raw`, stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

_ECHOED = 200  # characters of foreign text that a message quotes
_MOST = 2000  # of any message
# Patterns that few runs need are compiled where they are used: `re` caches them.
_LONG = rf"(?<!\w)'[^']{{{_ECHOED},}}'(?!\w)|(?<!\w)\"[^\"]{{{_ECHOED},}}\"(?!\w)|\S{{{_ECHOED + 1},}}"


KEYWORDS: dict[str, str] = {}
"""Keywords of the Python API by their flags; `edge.flags` fills it in."""

STATED_ONCE: set[str] = set()
"""Those that a run or a server is started with; requests to a server have fields for the others."""

_MENTION = (
    r"(?P<command>\bedge [a-z][a-z-]*\b[^,;:()]*)"
    r"|(?<![\w-])(?P<flag>--[a-z][a-z-]*)"
    r"(?:=(?P<word>\S+?)(?=[,.:;)]*(?:\s|$))|[ ](?P<number>-?\d[\w.]*(?:[ ](?:[KMGT]iB|m?J)\b)?))?"
)
Language = Literal["keywords", "flags", "requests", "any"]
_language: Language = "keywords"


@contextmanager
def speaking(language: Language) -> Iterator[None]:
    """Word the errors that any thread creates within this block for programs ("keywords"), for the command line
    ("flags"), or for the requests of a server that was started there ("requests"). "any" leaves them as they are, for
    another process to word."""
    global _language
    before, _language = _language, language
    try:
        yield
    finally:
        _language = before


def worded(message: str) -> str:
    """The message in the caller's language."""
    return message if _language == "any" else re.sub(_MENTION, _mention, message)


def _mention(found: re.Match[str]) -> str:
    flag, word, number = found["flag"], found["word"], found["number"]
    if flag not in KEYWORDS:
        return found[0]
    value = word or number
    if _language == "flags" or (_language == "requests" and flag in STATED_ONCE):
        return flag if value is None else f"{flag} {value}"
    if value is None:
        return KEYWORDS[flag]
    return f"{KEYWORDS[flag]}={value}" if re.fullmatch(r"-?[\d.]+", value) else f'{KEYWORDS[flag]}="{value}"'


def shortened(message: str) -> str:
    """The message with the middle of overlong parts omitted: of quoted text, of a word, of the whole."""
    return _middle_out(re.sub(_LONG, lambda found: _middle_out(found[0], _ECHOED), message), _MOST)


def _middle_out(text: str, most: int) -> str:
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def did_you_mean(name: str, known: Iterable[str], most: int = 2, at_least: float = 0.6) -> str:
    """The hint "did you mean a or b?" of known names that are similar, in any letter case; "" if there are none.

    at_least: the similarity, of 1.
    """
    from difflib import get_close_matches  # here: names that exist need none

    said = {each.lower(): each for each in known}
    near = [said[found] for found in get_close_matches(name.lower(), said, most, at_least)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def several(number: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class EdgeError(Exception):
    """The base of all errors that edge raises on purpose. `exit_code` is the CLI's exit status."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(worded(message)))


class InputError(EdgeError):
    """An argument, option or file name is wrong. param: the field of a request to a server that is."""

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelFormatError(EdgeError):
    """A model file is damaged, truncated, or not what it claims to be."""


class UnsupportedError(EdgeError):
    """The request is valid, but this engine or this version cannot do it."""


class MissingExtraError(EdgeError):
    """An optional dependency is not installed; the message names the pip command."""

    def __init__(self, what: str, extra: str, more: str = "") -> None:
        super().__init__(f"{what} is not installed: pip install 'edge-runtime[{extra}]'{more}")


class EngineError(EdgeError):
    """An engine failed while it ran a valid request."""


class BusyError(EdgeError):
    """The session is busy: it runs one generation at a time, in the process that loaded it."""


class CacheError(EdgeError):
    """The cache folder cannot be written, or has no room."""


class DownloadError(EdgeError):
    """A model cannot be downloaded: no connection, no such repository, no access, or content unlike the Hub's listing.
    reached: whether a server answered."""

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class IncompleteError(EdgeError):
    """An answer was cut before its grammar allowed the end. reason: what cut it, a stop reason; text: the answer so
    far."""

    exit_code = 4

    def __init__(self, message: str, reason: str = "", text: str = "") -> None:
        super().__init__(message)
        self.reason, self.text = reason, text


NOT_FINITE = "the model produced NaN logits: its weights are damaged or overflow"
MEMORY_SHORT = "memory is short: close other programs, or state a smaller --max-kv-size"


class ShortMemoryError(EdgeError):
    """An answer was cut since memory is short, or since the run took more than its memory budget."""

    exit_code = 5


class OutputError(EdgeError):
    """The output cannot be written to stdout: a full disk, a closed stream."""

    exit_code = 74  # EX_IOERR of sysexits.h; a traceback exits with 1


class BudgetError(EdgeError):
    """The stated budget cannot be met. `smallest`: the smallest sufficient memory budget in bytes, if known. `param`:
    the budget, if a request stated it."""

    exit_code = 3

    def __init__(self, message: str, smallest: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.smallest, self.param = smallest, param

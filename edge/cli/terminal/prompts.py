"""Sources of prompts."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO, TypeVar

from edge.cli.terminal.show import note
from edge.devices.platform import has_input
from edge.devices.regular import NO_TEXT, check_file
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.media.picture import Image
    from edge.media.recording import Sound
    from edge.model.chat.media_parts import Medium

T = TypeVar("T")
PATIENCE_S = 2.0  # for the first byte of a pipe
_MOST_HELD = 2_000_000  # characters of a file in a conversation: more tokens than any model has positions for
_BLOCK = 64 << 10  # characters read at a time: a prompt of any length is tokenized while it is read


def read_media(images: Sequence[str], sounds: Sequence[str]) -> list[Medium]:
    """The pictures of --image and the sounds of --audio. Raises InputError."""
    if "-" in images and "-" in sounds:
        raise InputError("stdin has one picture or one sound: name a file for the other")
    return [*read_pictures(images), *read_sounds(sounds)]


def read_pictures(sources: Sequence[str]) -> list[Image]:
    """The pictures of --image: files, or stdin for `-`. Raises InputError."""
    if not sources:
        return []
    from edge.media.picture import MOST_FILE, Image  # here: few runs see pictures

    if sources.count("-") > 1:
        raise InputError("--image - reads stdin, which has one picture: state it once")
    if "-" in sources and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("--image - reads a picture from stdin: pipe one in")
    return [
        Image(sys.stdin.buffer.read(MOST_FILE)) if each == "-" else _named(Image, each, "--image") for each in sources
    ]


def read_sounds(sources: Sequence[str]) -> list[Sound]:
    """The sounds of --audio: files, or stdin for `-`. Raises InputError."""
    if not sources:
        return []
    from edge.media.recording import MOST_FILE, Sound  # here: few runs hear

    if sources.count("-") > 1:
        raise InputError("--audio - reads stdin, which has one sound: state it once")
    if "-" in sources and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("--audio - reads a sound from stdin: pipe one in")
    return [
        Sound(sys.stdin.buffer.read(MOST_FILE)) if each == "-" else _named(Sound, each, "--audio") for each in sources
    ]


def _named(make: Callable[[str], T], source: str, flag: str) -> T:
    try:
        return make(source)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None


def read_prompt(given: Sequence[str], file: Path | None, *, alone: bool = False) -> str | Iterator[str]:
    """The prompt: in blocks if it comes from a file or from stdin. Raises InputError.

    given: the arguments of the command line; `-` stands for stdin. A file's text, or piped text, goes before a given
    prompt. alone: stdin has something else.
    """
    prompts = [each for each in given if each != "-"]
    if len(prompts) > 1:
        raise InputError("give the prompt once: with -p, or after MODEL")
    if file is not None:
        if "-" in given:
            raise InputError("read a file (--file) or stdin (-), not both")
        return _before(read_text(file), prompts[0]) if prompts else read_text(file)
    stdin: TextIO | None = None if alone else sys.stdin
    if stdin is None or stdin.isatty():
        if prompts and len(given) == 1:
            return prompts[0]
        raise InputError("no prompt: give one after MODEL, with --file, or on stdin; edge chat holds a conversation")
    if not prompts:
        return _blocks(stdin.buffer, "stdin")
    if prompts[0] and ("-" in given or _has_text(stdin)):
        return _before(_blocks(stdin.buffer, "stdin", may_be_empty=True), prompts[0])
    return prompts[0]


def _has_text(stdin: TextIO) -> bool:
    """Whether stdin is a file or a pipe with data. A pipe that a parent left open, as under ssh or in a subprocess that
    inherits it, may stay silent forever: the wait for its first byte is limited."""
    try:
        kind = os.fstat(stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed
        return False
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return stat.S_ISREG(kind)
    heard = has_input(stdin, PATIENCE_S)
    if not heard:
        note(
            f"nothing came on stdin for {PATIENCE_S:g} s: answering the prompt alone "
            "(an argument - waits for stdin, </dev/null does not)"
        )
    return heard


def _before(blocks: Iterator[str], prompt: str) -> Iterator[str]:
    """The text, an empty line, the prompt."""
    end = ""
    for block in blocks:
        end = (end + block)[-2:]
        yield block
    yield "\n" * (2 - len(end) + len(end.rstrip("\n")) if end else 0) + prompt


def read_text(path: Path) -> Iterator[str]:
    """A UTF-8 text file in blocks; bytes that are not UTF-8 become U+FFFD. Raises InputError, also for NUL bytes in the
    first block, which no text has."""
    check_file(path)
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} cannot be read ({os.strerror(errno.EACCES)})")
    return _blocks(path, str(path))


def read_whole(path: Path) -> str:
    """A UTF-8 text file that is held in memory, as `read_text` reads it. Raises InputError, also if it is too long."""
    text = ""
    for block in read_text(path):
        text += block
        if len(text) > _MOST_HELD:
            raise InputError(f"{path} is longer than {_MOST_HELD:,} characters: edge run -f reads files of any length")
    return text


def lines_of(path: Path | None) -> list[str]:
    """The lines of a text file, or of stdin, without line ends, as editors count them: a form feed ends none. Raises
    InputError."""
    if path is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("there is no text: name some, or a file of them, or pipe them in")
    blocks = read_text(path) if path else _blocks(sys.stdin.buffer, "stdin")
    return [line.rstrip("\n") for line in io.StringIO("".join(blocks), newline=None)]


def read_lines() -> Iterator[str]:
    """Lines of stdin as they arrive, without line ends; none if it is closed. Raises InputError."""
    if sys.stdin is None:
        return
    try:
        for line in sys.stdin:
            yield line.rstrip("\n")
    except OSError as error:
        raise InputError(f"stdin cannot be read ({error.strerror})") from None


def _blocks(source: BinaryIO | Path, what: str, *, may_be_empty: bool = False) -> Iterator[str]:
    empty = True
    try:
        # Opened here: blocks that nobody reads hold no file.
        binary = open(source, "rb") if isinstance(source, Path) else source  # noqa: SIM115 - the wrapper closes it
        with io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="") as text:
            while block := text.read(_BLOCK):
                if empty and "\0" in block:
                    raise InputError(f"{what} {NO_TEXT}")
                empty = False
                yield block
    except OSError as error:
        raise InputError(f"{what} cannot be read ({error.strerror})") from None
    if empty and not may_be_empty:
        raise InputError(f"{what} is empty")

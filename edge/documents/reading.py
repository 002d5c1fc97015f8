"""Files as blocks of text with their places: plain text, Markdown, HTML, and PDF by the extra `pdf`."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import PurePath
from typing import Any, Literal

from edge.errors import InputError, MissingExtraError
from edge.records import dataclass

Unit = Literal["line", "page"]

_HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$")
_RULE = re.compile(r" {0,3}(=+|-+|~+|\*+|\^+)[ \t]*$")  # below a heading, in Markdown and reStructuredText
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_RULE_LEVELS = "=-~*^"


@dataclass(frozen=True)
class Block:
    """A paragraph, a heading or a piece of code. place: its first line, or its page, from 1. level: of a heading, from
    1; else 0. verbatim: code, whose lines are kept."""

    text: str
    place: int
    level: int = 0
    verbatim: bool = False


@dataclass(frozen=True)
class Document:
    """A file as text. unit: that of the blocks' places."""

    title: str
    blocks: tuple[Block, ...]
    unit: Unit = "line"


def read_document(name: str, data: bytes) -> Document:
    """The blocks of a file. name: of the file, whose ending tells its format; unknown endings are plain text.

    Raises InputError for a file that is no text, or a damaged or encrypted PDF; MissingExtraError.
    """
    path = PurePath(name)
    read = READERS.get(path.suffix.lower(), _read_plain)
    try:
        return read(path.stem, data)
    except InputError as error:
        raise InputError(f"{name} {error}") from None


def _decoded(data: bytes) -> str:
    if b"\0" in data:
        raise InputError("is no text: it has NUL bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")  # every byte is a character: words of the file can be found at least


def _lines(text: str) -> list[str]:
    """Lines as editors count them: a form feed ends none."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _read_plain(stem: str, data: bytes) -> Document:
    return Document(stem, tuple(_paragraphs(_lines(_decoded(data)), 1)))


def _paragraphs(lines: Iterable[str], first: int) -> Iterator[Block]:
    """Blocks between blank lines; those whose lines are all indented are verbatim. first: the number of the first
    line."""
    found, begun = list[str](), first
    for number, line in enumerate([*lines, ""], first):
        if line.strip():
            if not found:
                begun = number
            found.append(line.rstrip())
        elif found:
            verbatim = all(each[:4] == "    " or each[:1] == "\t" for each in found)
            yield Block("\n".join(found), begun, verbatim=verbatim)
            found = []


def _read_marked(stem: str, data: bytes) -> Document:
    """Markdown, and reStructuredText as far as its headings go."""
    blocks = tuple(_marked(_lines(_decoded(data))))
    title = next((each.text for each in blocks if each.level == 1), stem)
    return Document(title, blocks)


def _marked(lines: list[str]) -> Iterator[Block]:
    start = number = 0
    while number < len(lines):
        line = lines[number]
        fence, heading, below = _FENCE.match(line), _HEADING.match(line), _underlined(lines, number)
        if not (fence or heading or below):
            number += 1
            continue
        yield from _paragraphs(lines[start:number], start + 1)
        if fence:
            mark, end = fence[1], number + 1
            while end < len(lines) and not (
                lines[end].strip().startswith(mark) and not lines[end].strip().strip(mark[0])
            ):
                end += 1
            if code := "\n".join(lines[number + 1 : end]).strip("\n"):
                yield Block(code, number + 2, verbatim=True)
            start = number = end + 1
        elif heading:
            if heading[2]:
                yield Block(heading[2], number + 1, len(heading[1]))
            start = number = number + 1
        else:
            yield Block(line.strip(), number + 1, below)
            start = number = number + 2
    yield from _paragraphs(lines[start:], start + 1)


def _underlined(lines: list[str], number: int) -> int:
    """The level of a line that a rule makes a heading; 0 of others."""
    before, line, below = (lines[each] if 0 <= each < len(lines) else "" for each in range(number - 1, number + 2))
    rule = _RULE.fullmatch(below)
    if rule is None or len(rule[1]) < 3 or before.strip() or not line.strip() or _RULE.fullmatch(line):
        return 0
    return 1 + _RULE_LEVELS.index(rule[1][0])


_ENDS = {
    "address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl", "dt",
    "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav",
    "ol", "p", "pre", "section", "summary", "table", "title", "tr", "ul",
}  # fmt: skip
"""Elements that begin and end a block."""
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
_UNREAD = {"script", "style", "template", "svg", "math"}


class _Html(HTMLParser):
    """Collects blocks. Text in elements of `unread` is left out."""

    def __init__(self, unread: set[str]) -> None:
        super().__init__(convert_charrefs=True)
        self.title, self.blocks = "", list[Block]()
        self._unread, self._text, self._place = unread, list[str](), 1
        self._level = self._left_out = self._verbatim = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._left_out += tag in self._unread
        if tag in _ENDS:
            self._end()
        elif tag in ("td", "th"):
            self._text.append(" ")
        if tag in _HEADINGS:
            self._level = int(tag[1])
        self._verbatim += tag == "pre"
        self._in_title = self._in_title or tag == "title"

    def handle_endtag(self, tag: str) -> None:
        self._left_out = max(0, self._left_out - (tag in self._unread))
        if tag in _ENDS:
            self._end()
        if tag in _HEADINGS:
            self._level = 0
        self._verbatim = max(0, self._verbatim - (tag == "pre"))
        if tag == "title":
            self._in_title = False

    def handle_data(self, data: str) -> None:
        if self._left_out:
            return
        if not self._text:
            self._place = self.getpos()[0] + len(data[: len(data) - len(data.lstrip())].split("\n")) - 1
        if self._text or data.strip():
            self._text.append(data)

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        text, self._text = "".join(self._text), []
        text = text.strip("\n") if self._verbatim else " ".join(text.split())
        if not text.strip():
            return
        if self._in_title:
            self.title = self.title or " ".join(text.split())
        else:
            self.blocks.append(Block(text, self._place, self._level, bool(self._verbatim)))


def _read_html(stem: str, data: bytes) -> Document:
    text = _decoded(data)
    for unread in ({*_UNREAD, "nav"}, {"script", "style"}):  # an element that nothing ends would hide all behind it
        parser = _Html(unread)
        parser.feed(text)
        parser.close()
        if parser.blocks:
            break
    first = next((each.text for each in parser.blocks if each.level == 1), stem)
    return Document(parser.title or first, tuple(parser.blocks))


def _read_pdf(stem: str, data: bytes) -> Document:
    try:
        from pypdf import PdfReader
    except ModuleNotFoundError:
        raise MissingExtraError("pypdf, which reads PDF files,", "pdf") from None
    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of every small fault that it mends
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InputError("is encrypted: save it without a password")
        title = str((reader.metadata or {}).get("/Title") or "").strip() or stem
        pages = [page.extract_text() for page in reader.pages]
    except InputError:
        raise
    except Exception as error:  # of many kinds, for damaged files
        raise InputError(f"cannot be read as a PDF ({type(error).__name__}: {error!s:.80})") from None
    blocks = (Block(each.text, page) for page, text in enumerate(pages, 1) for each in _paragraphs(_lines(text), 1))
    return Document(title, tuple(blocks), "page")


READERS: dict[str, Callable[[str, bytes], Document]] = {
    ".txt": _read_plain, ".text": _read_plain, ".md": _read_marked, ".markdown": _read_marked, ".rst": _read_marked,
    ".html": _read_html, ".htm": _read_html, ".xhtml": _read_html, ".pdf": _read_pdf,
}  # fmt: skip
"""The readers by the endings of files; of a folder, files with other endings are passed over."""

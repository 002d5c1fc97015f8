"""Segments of a transcript, and its forms: text, SubRip, WebVTT, JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from edge.devices.regular import read_regular
from edge.errors import InputError
from edge.records import dataclass
from edge.run.speech.words import Word

Format = Literal["text", "srt", "vtt", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Segment:
    """A part of a transcript, with the names of openai-whisper.

    start, end: seconds in the sound. tokens: with timestamps. avg_logprob, compression_ratio, no_speech_prob,
    temperature: of the window it was found in. words: None unless they were asked for.
    """

    id: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `--format json` prints it."""
        found = asdict(self)
        for name in ("avg_logprob", "compression_ratio", "no_speech_prob"):
            found[name] = round(found[name], 4)
        found["words"] = None if self.words is None else [word_dict(word) for word in self.words]
        return {name: value for name, value in found.items() if value is not None}


def word_dict(word: Word) -> dict[str, Any]:
    start, end = round(word.start, 3), round(word.end, 3)
    return {"word": word.word, "start": start, "end": end, "probability": round(word.probability, 4)}


def check_format(form: str) -> Format:
    """Raises InputError."""
    for each in FORMATS:
        if each == form:
            return each
    raise InputError(f"--format must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, not {form!r:.40}")


def is_transcript(path: Path, form: Format) -> bool:
    """Whether a file can be a transcript in this form, by its beginning; any text can be one without times. Empty files
    can be, too. Raises InputError."""
    try:
        head = read_regular(path, 4096)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    begins = {"text": b"", "srt": b"1\n", "vtt": b"WEBVTT", "json": b'{"id": 0, '}[form]
    return not head or (head.startswith(begins) and b"\0" not in head)


class Writer:
    """Writes a transcript in a form, a segment at a time. by_words: a line or a caption for each word; timed: text with
    times before it."""

    def __init__(self, form: Format, *, by_words: bool = False, timed: bool = False) -> None:
        self._form, self._by_words, self._timed = form, by_words, timed
        self._count = 0
        self.heading = "WEBVTT\n\n" if form == "vtt" else ""

    def write(self, segment: Segment) -> str:
        """The lines of a segment."""
        if self._form == "json":
            return json.dumps(segment.to_dict(), ensure_ascii=False) + "\n"
        parts = [(segment.start, segment.end, segment.text.strip())]
        if self._by_words and segment.words is not None:
            parts = [(word.start, word.end, word.word.strip()) for word in segment.words]
        return "".join(self._part(*part) for part in parts)

    def _part(self, start: float, end: float, text: str) -> str:
        self._count += 1
        if self._form == "text":
            return f"[{clock_of(start)} - {clock_of(end)}] {text}\n" if self._timed else f"{text}\n"
        arrow = f"{clock_of(start, comma=self._form == 'srt')} --> {clock_of(end, comma=self._form == 'srt')}"
        text = text.replace("-->", "->")  # which would begin a caption
        return f"{self._count}\n{arrow}\n{text}\n\n" if self._form == "srt" else f"{arrow}\n{text}\n\n"


def clock_of(seconds: float, *, comma: bool = False) -> str:
    """A time such as 01:02:03.450; with a comma, as SubRip has it."""
    milliseconds = round(seconds * 1000)
    whole, part = divmod(milliseconds, 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{',' if comma else '.'}{part:03}"

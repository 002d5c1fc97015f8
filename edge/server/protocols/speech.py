"""POST /v1/audio/transcriptions and /v1/audio/translations: what is said in a sound, by a model that hears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import Any, Literal

from starlette.responses import Response

from edge.errors import BudgetError
from edge.model.whisper.languages import LANGUAGES
from edge.records import dataclass
from edge.run.request import Request
from edge.run.session import Session
from edge.run.speech.segments import Segment, word_dict
from edge.run.speech.segments import Writer as Forms
from edge.server.events import Event, Said, Transcribed
from edge.server.http import event
from edge.server.hub import Work
from edge.server.models.worker import Job
from edge.server.protocols.fields import said
from edge.server.refusal import RefusedError

_SEGMENT, _TOKEN, _WORD = 2048, 40, 400  # bytes that a segment, each of its tokens and of its words take until sent
CUT = "Edge-Cut"  # the header of a transcript whose sound ended early, as usage.edge.cut in JSON
_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


@dataclass(frozen=True, kw_only=True)
class TranslationBody:
    """POST /v1/audio/translations: multipart/form-data"""

    file: bytes = field(metadata={"help": "A sound: WAV, FLAC, OGG, MP3, M4A or WebM."})
    model: str | None = said("A name of /v1/models; the first model without it.")
    prompt: str | None = said("Text that might have come before: names, style.")
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = said("json by default.")
    temperature: str | None = said("From 0 to 1; 0, the default, tries higher ones where a text fails.")
    stream: Literal["true", "false", "True", "False", "1", "0"] | None = said("Send the text in pieces.")

    @property
    def streams(self) -> bool:
        return self.stream in ("true", "True", "1")


@dataclass(frozen=True, kw_only=True)
class TranscriptionBody(TranslationBody):
    """POST /v1/audio/transcriptions: multipart/form-data"""

    language: str | None = said("The code of the language, such as en; detected by default.")
    timestamp_granularities: list[Literal["word", "segment"]] | None = said(
        "word: verbose_json with words, captions for each word."
    )


def translate(body: TranslationBody, headers: Any, tenant: str) -> list[Request]:
    """One request, which stands for the sound. Raises RefusedError."""
    if body.streams and body.response_format not in (None, "json", "text"):
        message = f"a stream has no response_format {body.response_format}: use json"
        raise RefusedError(400, message, param="response_format", code="invalid_value")
    if _by_words(body) and body.response_format in (None, "json", "text"):
        message = (
            "timestamp_granularities word is for response_format verbose_json, srt and vtt: choose one, or leave it out"
        )
        raise RefusedError(400, message, param="timestamp_granularities", code="invalid_value")
    _temperature(body)
    return [Request("sound", tenant=tenant)]


def work_of(body: TranslationBody) -> Work:
    return partial(_hear, body=body)


def _hear(numbered: Sequence[tuple[int, Request]], session: Session, job: Job, *, body: TranslationBody) -> None:
    """Transcribe. Runs in the worker's thread."""
    ((choice, _),) = numbered
    heard = session.transcribe(
        body.file,
        language=body.language if isinstance(body, TranscriptionBody) else None,
        translate=not isinstance(body, TranscriptionBody),
        prompt=body.prompt,
        temperature=_temperature(body) or None,
        timestamps="words" if _by_words(body) else "segments",
        keep_text=False,
    )
    try:
        for segments in heard.windows():
            for segment in segments:
                size = _SEGMENT + _TOKEN * len(segment.tokens) + _WORD * len(segment.words or ())
                job.flow.claim.add("answers", size)
                job.flow.put(Said(choice, segment))
            if job.cancelled:
                return
    finally:
        heard.close()
    report = heard.report
    if report is None or report.cut:
        raise BudgetError(f"the transcript ends after {heard.heard.seconds:.0f} s of sound, by the server's budgets")
    job.flow.put(
        Transcribed(choice, report.language or "", report.sound.whole_s or 0.0, report.energy.joules, heard.cut)
    )


def _by_words(body: TranslationBody) -> bool:
    return isinstance(body, TranscriptionBody) and "word" in (body.timestamp_granularities or ())


def _temperature(body: TranslationBody) -> float:
    try:
        found = float(body.temperature or 0)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        why = f"temperature must be a number from 0 to 1, not {body.temperature!r:.40}"
        raise RefusedError(400, why, param="temperature", code="invalid_value")
    return found


class Writer:
    """Writes the response."""

    def __init__(self, model: str, body: TranslationBody) -> None:
        self._body, self._text = body, list[str]()
        self._end: Transcribed | None = None

    def chunks(self, each: Event) -> list[bytes]:
        """Server-sent events of a stream, in OpenAI's form."""
        if isinstance(each, Transcribed):
            self._end = each
        if not isinstance(each, Said):
            return []
        text = each.segment.text if self._text else each.segment.text.lstrip()
        self._text.append(text)
        return [event({"type": "transcript.text.delta", "delta": text})]

    def last(self) -> list[bytes]:
        done = {"type": "transcript.text.done", "text": "".join(self._text), **self._usage()}
        return [event(done), b"data: [DONE]\n\n"]

    def failed(self, error: RefusedError) -> list[bytes]:
        return [event(error.body()), b"data: [DONE]\n\n"]

    def whole(self, events: list[Event]) -> Any:
        segments = [each.segment for each in events if isinstance(each, Said)]
        self._end = next(each for each in events if isinstance(each, Transcribed))
        text, form = "".join(each.text for each in segments).strip(), self._body.response_format or "json"
        if form in ("text", "srt", "vtt"):
            forms = Forms("srt" if form == "srt" else "vtt", by_words=_by_words(self._body))
            written = text + "\n" if form == "text" else forms.heading + "".join(map(forms.write, segments))
            return Response(written, media_type=_TYPES[form], headers={CUT: "true"} if self._end.cut else {})
        return {"text": text, **(self._verbose(segments) if form == "verbose_json" else {}), **self._usage()}

    def _verbose(self, segments: list[Segment]) -> dict[str, Any]:
        assert self._end is not None
        wanted = getattr(self._body, "timestamp_granularities", None) or ["segment"]
        words = [word_dict(word) for each in segments for word in each.words or ()]
        found: dict[str, Any] = {
            "task": "transcribe" if isinstance(self._body, TranscriptionBody) else "translate",
            "language": LANGUAGES.get(self._end.language, self._end.language),  # its name, as OpenAI has it
            "duration": self._end.seconds,
        }
        if "segment" in wanted:
            found["segments"] = [{"seek": 0, **each.to_dict()} for each in segments]
        return {**found, **({"words": words} if "word" in wanted else {})}

    def _usage(self) -> dict[str, Any]:
        if self._end is None:
            return {}
        edge = {"joules": round(self._end.joules, 3), **({"cut": True} if self._end.cut else {})}
        return {"usage": {"type": "duration", "seconds": round(self._end.seconds + 0.499), "edge": edge}}

"""A transcript of a sound: window by window, each from where the text of the last one ended, as `transcribe.py` of
openai-whisper goes through a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from edge.errors import InputError
from edge.media.sound import SoundStream
from edge.records import dataclass
from edge.run.senses.hearing import Listener
from edge.run.speech.beams import GREEDY, Beams
from edge.run.speech.decoding import TEMPERATURES, Decoded, Decoder, Pay
from edge.run.speech.rules import STEP_S, TokenRules
from edge.run.speech.segments import Segment
from edge.run.speech.voice import SHORTEST, voices
from edge.run.speech.windows import FRAME_S, Windows
from edge.run.speech.words import Word, align, typical

Times = Literal["words", "segments"]
Voice = Literal["energy", "silero", "none"]

FORGOTTEN = 0.5  # temperature above which a text is no prompt for the next
BEFORE = 30  # frames before a voice with which a window begins
STILL = 300  # frames of silence that are passed over; shorter pauses stay in their window
ENCODING = 8  # positions that cost about what a token does: the encoder runs them together


@dataclass(frozen=True)
class Settings:
    """How a sound is transcribed. language: a code such as "en"; None: the likeliest of the first window with a voice.
    times: of words or segments. prompt: text that might have come before, for names and style. voice: how silence is
    found, which is passed over. continued: whether a window's text is the prompt of the next. temperatures: tried in
    turn."""

    language: str | None = None
    translate: bool = False
    times: Times = "segments"
    prompt: str = ""
    voice: Voice = "energy"
    continued: bool = True
    temperatures: tuple[float, ...] = TEMPERATURES
    beams: Beams = GREEDY

    def check(self, listener: Listener) -> None:
        """Raises InputError for what the model cannot do."""
        whisper = listener.whisper
        if self.language is not None and whisper.multilingual and self.language not in whisper.languages:
            raise InputError(f"--language {self.language!r:.40} is not among {', '.join(whisper.languages)}")
        if self.language not in (None, "en") and not whisper.multilingual:
            raise InputError(f"this model knows English alone: leave --language {self.language!r:.40} out")
        if self.translate and not whisper.multilingual:
            raise InputError("this model knows English alone, and translates nothing: use one without .en in its name")
        if self.times == "words" and not whisper.alignment:
            raise InputError("this model's file names no heads for the times of words: use --timestamps=segments")
        if not self.temperatures or not all(0 <= each <= 1 for each in self.temperatures):
            raise InputError(f"temperatures must be from 0 to 1, not {self.temperatures!r:.60}")


@dataclass(frozen=True)
class Place:
    """How far a transcript has come, from which another run can go on. seek: the frame of the next window. before:
    tokens of the text before. count: segments so far. spoken: seconds at which the last word ended."""

    seek: int = 0
    before: tuple[int, ...] = ()
    count: int = 0
    spoken: float = 0.0
    language: str | None = None
    certainty: float | None = None  # of the language, its probability


@dataclass
class Heard:
    """Counts of a transcript. seconds: of the sound so far; silent: those that were passed over."""

    seconds: float = 0.0
    silent: float = 0.0
    waited: float = 0.0  # seconds, for the sound
    windows: int = 0
    tokens: int = 0
    again: int = 0  # windows that needed a higher temperature


def transcribe(
    listener: Listener, sound: SoundStream, settings: Settings, pay: Pay, heard: Heard, place: Place | None = None
) -> Iterator[tuple[Place, list[Segment]]]:
    """Yield the segments of each window, with the place behind it. pay: is called before each pass. heard: is kept up
    to date. place: where an earlier run ended.

    Raises InputError, and what `pay` raises.
    """
    settings.check(listener)
    whisper = listener.whisper
    windows, rules = Windows(sound, whisper.mels, whisper.frames), TokenRules(whisper, listener.tokenizer)
    decoder = Decoder(listener, rules, settings.temperatures, settings.beams)
    if place is None:
        asked = listener.tokenizer.encode(" " + settings.prompt.strip(), start=False) if settings.prompt.strip() else ()
        place = Place(before=tuple(map(int, asked)), language=settings.language if whisper.multilingual else "en")
    place = replace(place, seek=windows.skip(place.seek))
    while frames := _open(windows, place.seek, heard):
        quiet = _quiet(windows, place.seek, frames, settings.voice)
        if quiet:
            place = replace(place, seek=place.seek + quiet)
            heard.silent += quiet * FRAME_S
            heard.seconds = place.seek * FRAME_S
            yield place, []
            continue
        pay(whisper.positions // ENCODING)
        listener.encode(windows.mel(place.seek, frames))
        heard.windows += 1
        if place.language is None:
            likely = decoder.detect_language(pay)
            best = max(likely, key=lambda code: likely[code])
            place = replace(place, language=best, certainty=likely[best])
        opening = _opening(listener, place.language, settings)
        found = decoder.decode(place.before, opening, place.seek, pay)
        heard.tokens += len(found.tokens)
        heard.again += found.temperature > settings.temperatures[0]
        place, segments = _window(listener, settings, place, found, frames, opening)
        heard.seconds = place.seek * FRAME_S
        yield place, segments


def _open(windows: Windows, seek: int, heard: Heard) -> int:
    try:
        return windows.open(seek)
    finally:
        heard.waited = windows.waited


def _quiet(windows: Windows, seek: int, frames: int, voice: Voice) -> int:
    """Frames to pass over: all without a voice, but for those at the end in which one may begin, or a long silence
    before the first."""
    if voice == "none":
        return 0
    found, goes_on = voices(samples := windows.samples(seek, frames)), windows.go_on(seek + frames)
    if found and voice == "silero":
        from edge.run.speech.silero import spoken  # here: it needs an extra

        found = spoken(samples, goes_on)
    if not found:
        return max(1, frames - BEFORE - SHORTEST) if goes_on else frames
    before = found[0][0] - BEFORE
    return before if before >= STILL else 0


def _opening(listener: Listener, language: str | None, settings: Settings) -> list[int]:
    whisper = listener.whisper
    if not whisper.multilingual:
        return [whisper.sot]
    task = whisper.translate if settings.translate else whisper.transcribe
    return [whisper.sot, whisper.languages[language or "en"], task]


def _window(
    listener: Listener, settings: Settings, place: Place, found: Decoded, frames: int, opening: Sequence[int]
) -> tuple[Place, list[Segment]]:
    """The segments of a window, and the place of the next: behind the last pair of timestamps, or the whole window."""
    if found.silent:
        return replace(place, seek=place.seek + frames), []
    whisper, offset = listener.whisper, place.seek * FRAME_S
    parts, passed, ended = _parts(found.tokens, whisper.first_timestamp, frames)
    segments = list[Segment]()
    for first, last, start, end in parts:
        tokens = found.tokens[first:last]
        text = listener.tokenizer.decode(token for token in tokens if token < whisper.eot)
        segments.append(
            Segment(
                place.count + len(segments), round(offset + start, 2), round(offset + end, 2), text, tokens,
                found.temperature, found.logprob, found.ratio, found.no_speech,
            )
        )  # fmt: skip
    spoken = place.spoken
    if settings.times == "words":
        segments, spoken = _timed(listener, place, found, parts, segments, frames, opening)
        until = segments[-1].end if segments else 0.0
        if not ended and until > offset:  # the words' times are closer to the truth
            passed = max(1, min(frames, round((until - offset) / FRAME_S)))
    kept = [each for each in segments if each.text.strip() and each.start < each.end]
    kept = [replace(each, id=place.count + number) for number, each in enumerate(kept)]
    before = (*place.before, *(token for each in kept for token in each.tokens))
    if not settings.continued or found.temperature > FORGOTTEN:
        before = ()
    before = before[-(whisper.context // 2 - 1) :]
    return replace(place, seek=place.seek + passed, before=before, count=place.count + len(kept), spoken=spoken), kept


def _parts(tokens: Sequence[int], first: int, frames: int) -> tuple[list[tuple[int, int, float, float]], int, bool]:
    """The segments of a window: their first token, the one behind the last, start and end in seconds; the frames that
    they cover; and whether the last one ends before the window does. first: the first timestamp."""
    times = [token >= first for token in tokens]
    whole = times[-2:] == [False, True]  # one timestamp at the end: nothing is said behind it
    cuts = [place for place in range(1, len(tokens)) if times[place - 1] and times[place]]
    if not cuts:
        last = next((token - first for token in reversed(tokens) if token >= first), 0)
        end = last * STEP_S if last else frames * FRAME_S
        return ([(0, len(tokens), 0.0, end)] if tokens else []), frames, whole
    if whole:
        cuts.append(len(tokens))
    found, start = list[tuple[int, int, float, float]](), 0
    for cut in cuts:
        found.append((start, cut, (tokens[start] - first) * STEP_S, (tokens[cut - 1] - first) * STEP_S))
        start = cut
    passed = frames if whole else round((tokens[start - 1] - first) * STEP_S / FRAME_S)
    return found, max(1, min(frames, passed)), whole


def _timed(
    listener: Listener, place: Place, found: Decoded, parts: Sequence[tuple[int, int, float, float]],
    segments: Sequence[Segment], frames: int, opening: Sequence[int],
) -> tuple[list[Segment], float]:  # fmt: skip
    """The segments with times of words, from which theirs are set, and when the last of them ended."""
    end = listener.whisper.eot
    chosen = [place for first, last, *_ in parts for place in range(first, last) if found.tokens[place] < end]
    tokens, logprobs = [found.tokens[each] for each in chosen], [found.logprobs[each] for each in chosen]
    words = align(listener, opening, tokens, logprobs, frames, place.language or "en")
    offset, spoken, timed, taken = place.seek * FRAME_S, place.spoken, list[Segment](), 0
    median, most = typical(words)
    for segment in segments:
        wanted, own = sum(token < end for token in segment.tokens), list[Word]()
        while taken < len(words) and sum(word.tokens for word in own) < wanted:
            word = words[taken]
            own.append(replace(word, start=round(offset + word.start, 2), end=round(offset + word.end, 2)))
            taken += 1
        if own:
            _shorten_first(own, spoken, median, most)
            segment = _settled(segment, own, median)
            spoken = segment.end
        timed.append(replace(segment, words=tuple(own)))
    return timed, spoken


def _shorten_first(words: list[Word], spoken: float, median: float, most: float) -> None:
    """The first words after a pause do not reach into it."""
    first = words[0]
    second = words[1] if len(words) > 1 else None
    if first.end - spoken <= 4 * median:
        return
    if first.end - first.start > most or (second and second.end - first.start > 2 * most):
        if second and second.end - second.start > most:
            border = max(second.end / 2, second.end - most)
            words[1] = replace(second, start=border)
            first = replace(first, end=border)
        words[0] = replace(first, start=max(0.0, first.end - most))


def _settled(segment: Segment, words: list[Word], median: float) -> Segment:
    """Times of a segment are those of its words, unless a first or last word is much longer than the segment says."""
    first, last = words[0], words[-1]
    if segment.start < first.end and segment.start - 0.5 > first.start:
        words[0] = replace(first, start=max(0.0, min(first.end - median, segment.start)))
    else:
        segment = replace(segment, start=first.start)
    last = words[-1]
    if segment.end > last.start and segment.end + 0.5 < last.end:
        words[-1] = replace(last, end=max(last.start + median, segment.end))
    else:
        segment = replace(segment, end=last.end)
    return segment

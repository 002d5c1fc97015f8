"""`edge transcribe`: what is said in a sound, as text or captions."""

from __future__ import annotations

import time as clock
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.cli import options as o
from edge.cli.terminal.show import note, print_json, printable, progress
from edge.flags import ENGINE, OUTPUT, PROMPT
from edge.options import Options

if TYPE_CHECKING:
    from edge.media.sound import SoundStream
    from edge.run.speech.resume import Unfinished
    from edge.run.speech.segments import Format, Segment
    from edge.run.speech.transcription import Transcription

MODEL = "whisper-base"


@o.command
def transcribe(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="WAV, FLAC, OGG, MP3, M4A, WebM; - is a WAV or raw samples on stdin."),
    ],
    model: Annotated[
        str, o.flag("-m", "--model", group=ENGINE, metavar="MODEL", help="A Whisper model: a file or a name.")
    ] = MODEL,
    language: Annotated[
        str | None, o.flag("-l", "--language", group=PROMPT, help="Its code, such as en (default: detected).")
    ] = None,
    translate: Annotated[bool, o.flag("--translate", group=PROMPT, help="Write English, whatever is spoken.")] = False,
    prompt: Annotated[
        str | None, o.flag("-p", "--prompt", group=PROMPT, help="Text that might have come before: names, style.")
    ] = None,
    beam_size: Annotated[
        int,
        o.flag("--beam-size", group=PROMPT, help="Texts that are searched at once; 1: the likeliest token is taken."),
    ] = 1,
    best_of: Annotated[
        int, o.flag("--best-of", group=PROMPT, help="Texts that are drawn where the first fails; the best is taken.")
    ] = 1,
    timestamps: Annotated[
        str | None, o.flag("--timestamps", group=OUTPUT, help="Of segments or of words: before text, and in captions.")
    ] = None,
    form: Annotated[
        str, o.flag("--format", group=OUTPUT, help="text, srt, vtt, or json: an object for each segment.")
    ] = "text",
    output: Annotated[
        Path | None,
        o.flag(
            "-o", "--output", group=OUTPUT, metavar="DIR", help="Write NAME.txt, .srt … there; go on if interrupted."
        ),
    ] = None,
    force: Annotated[
        bool, o.flag("--force", group=OUTPUT, help="Write transcripts anew that are already there.")
    ] = False,
    rate: Annotated[
        int | None, o.flag("--rate", group=PROMPT, help="Stdin is raw: mono, 16 bits, this many samples per second.")
    ] = None,
    vad: Annotated[
        str | None,
        o.flag("--vad", group=PROMPT, help="What is passed over: by energy (the default), silero (an extra), or none."),
    ] = None,
    silence: Annotated[
        bool, o.flag("--silence", group=PROMPT, help="The same as --vad none: silence and steady noise are heard, too.")
    ] = False,
    *,
    options: Annotated[
        Options, o.only("memory", "gpu_memory", "time", "energy", "power", "max_temp", "backend", "threads", "kv_dtype")
    ],
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Write what is said in sounds. Segments go to stdout as they are found, progress and the report to stderr.

    \b
      edge transcribe talk.wav
      edge transcribe interview.mp3 --language de --translate --format srt > interview.srt
      edge transcribe lectures/*.flac -o transcripts --format vtt --timestamps words
      arecord -q -f S16_LE -r 16000 -t raw | edge transcribe - --rate 16000

    With -o, the same command goes on where an earlier one was interrupted: transcripts that are there stay.
    """
    from edge.cli.terminal.fetching import fetch_missing
    from edge.cli.terminal.signals import Terminated, ended_by_signals
    from edge.devices.power import find_meter
    from edge.errors import InputError
    from edge.model.structure.spec import deaf
    from edge.run.speech.asked import Asked
    from edge.run.speech.segments import check_format
    from edge.run.starting.loading import load
    from edge.run.starting.opening import open_model

    started, wanted = clock.perf_counter(), check_format(form)
    check_files(files, rate)
    targets = [None if output is None else _target(output, each, wanted, force=force) for each in files]
    if len({*targets}) < len(targets) and output is not None:
        raise InputError("two of the files have the same name, and would get the same transcript: give them one by one")
    for target in targets:
        _spare_sounds(target, files)
    if json and output is None and wanted != "text":
        raise InputError(
            f"--format={form} is of a transcript on stdout or in files, --json of the report: leave one out"
        )
    if silence and vad not in (None, "none"):
        raise InputError(f"--silence is --vad=none, and not --vad={vad}: leave one out")
    asked: dict[str, Any] = {
        "language": language, "translate": translate, "prompt": prompt, "vad": "none" if silence else vad or "energy",
        "timestamps": timestamps or "segments", "beam_size": beam_size, "best_of": best_of,
    }  # fmt: skip
    Asked(**asked).settings()
    if not force:
        files, targets = _missing(files, targets, quiet=quiet)
        if not files:
            return
    meter = find_meter()
    first = meter.read().joules
    with ExitStack() as opened_sounds, progress(enabled=not quiet) as shown:
        sounds = _first_sound(files, opened_sounds)
        fetch_missing(model, options, shown, quiet=quiet)
        opened = open_model(model)
        if opened.spec.ears is None:
            raise deaf(opened.name)
        parts = [
            None if target is None else _unfinished(target, file, opened.path, wanted, asked, force=force)
            for file, target in zip(files, targets, strict=True)
        ]
        if beam_size > 1:
            from edge.run.speech.plan import beside

            options = beside(opened.file, options, beam_size)
        with load(
            opened, options, meter=meter, on_load=lambda part, doing="": shown.step("loading")(part, 1.0)
        ) as session:
            failed = 0  # of several sounds; the others are still transcribed
            for file, target, kept in zip(files, targets, parts, strict=True):
                spent = clock.perf_counter() - started, max(0.0, meter.read().joules - first)
                with ended_by_signals(session), kept or nullcontext():
                    heard = session.transcribe(
                        sounds.pop(file, file), rate=rate if file == "-" else None, time_spent=spent[0],
                        energy_spent=spent[1], place=kept.place if kept else None, keep_text=json,
                        on_progress=lambda done, whole: shown.step("hearing")(done, whole) if whole else None, **asked,
                    )  # fmt: skip
                    printed = not json and target is None
                    try:
                        found = _write(heard, shown, wanted, timestamps, kept, print_it=printed)
                    except InputError as error:
                        if len(files) == 1:
                            raise
                        shown.clear()
                        note(f"edge: {error}")
                        failed += 1
                        continue
                shown.clear()
                _finish(heard, file, target, kept, found, wanted, timestamps, json=json, quiet=quiet, verbose=verbose)
                if session.terminated:
                    raise Terminated
                if heard.stop_reason == "interrupted":
                    raise KeyboardInterrupt
            if failed:
                raise InputError(f"{failed} of {len(files)} sounds have no transcript: see above")


def check_files(files: list[str], rate: int | None) -> None:
    """Raise InputError for files that are not there, before a model is loaded."""
    from edge.devices.regular import check_file
    from edge.errors import InputError

    if files.count("-") > 1:
        raise InputError("stdin (-) is read once")
    if rate is not None and "-" not in files:
        raise InputError("--rate is of raw samples on stdin: give - as the file")
    for each in files:
        if not each:
            raise InputError("the name of a file is empty")
        if each != "-":
            check_file(Path(each))


def _first_sound(files: list[str], opened: ExitStack) -> dict[str, SoundStream]:
    """The first of the files that is a sound, open until `opened` is left; none where stdin comes before it. Raises
    InputError, MissingExtraError if none is, before a model is fetched or loaded."""
    from edge.errors import InputError
    from edge.media.sound import open_sound

    refused: InputError | None = None
    for each in files:
        try:
            return {} if each == "-" else {each: opened.enter_context(open_sound(each))}
        except InputError as error:
            refused = refused or error
    if refused:
        raise refused
    return {}


def _target(folder: Path, file: str, form: Format, *, force: bool) -> Path:
    from edge.devices.output import check_file, check_parent
    from edge.errors import InputError
    from edge.run.speech.segments import is_transcript

    if not folder.is_dir():
        check_parent(folder)
        if folder.exists():
            raise InputError(f"{folder} is no folder: -o names the folder of transcripts")
        folder.mkdir()
    target = folder / f"{'stdin' if file == '-' else Path(file).stem}.{'txt' if form == 'text' else form}"
    check_file(target, force=True)
    if force and target.exists() and not is_transcript(target, form):
        raise InputError(f"{target} is no transcript, and stays: choose another -o")
    return target


def _missing(
    files: list[str], targets: list[Path | None], *, quiet: bool
) -> tuple[list[str], list[Path | None]]:  # fmt: skip
    """The sounds without a transcript, and their targets."""
    there = [target is not None and target.exists() for target in targets]
    for target in (target for target, is_there in zip(targets, there, strict=True) if is_there and not quiet):
        note(f"{target} is there, and stays: --force writes it anew")
    left = [pair for pair, is_there in zip(zip(files, targets, strict=True), there, strict=True) if not is_there]
    return [file for file, _ in left], [target for _, target in left]


def _spare_sounds(target: Path | None, files: list[str]) -> None:
    """Raise InputError if a transcript, or what is kept until it is whole, would be written over a sound."""
    from edge.errors import InputError

    for written in [] if target is None else [target, target.with_name(f"{target.name}.part")]:
        for file in files:
            if file != "-" and written.exists() and written.samefile(file):
                raise InputError(f"{written} is one of the sounds, and would be overwritten: choose another -o")


def _unfinished(
    target: Path, file: str, model: Path, form: Format, asked: dict[str, Any], *, force: bool
) -> Unfinished | None:  # fmt: skip
    """What an earlier run of the same command left; None for stdin, which does not come again."""
    from edge.run.speech.resume import Unfinished

    if file == "-":
        return None
    status, own = Path(file).stat(), model.stat()
    key = {"sound": [file, status.st_size, status.st_mtime_ns], "model": [str(model), own.st_size, own.st_mtime_ns]}
    return Unfinished(target, {**key, **asked}, force=force)


def _write(
    heard: Transcription, shown: Any, form: Format, timestamps: str | None, kept: Unfinished | None, *, print_it: bool
) -> list[Segment]:  # fmt: skip
    """Go through a sound. Returns the segments that are neither printed nor kept: a microphone has no end."""
    from edge.run.speech.segments import Writer

    writer = Writer(form, by_words=timestamps == "words", timed=timestamps is not None)
    found: list[Segment] = []
    if print_it:
        print(writer.heading, end="", flush=True)
    for segments in heard.windows():
        if kept:
            kept.add(heard.place, segments)
        elif not print_it:
            found += segments
        for each in segments:
            shown.clear()
            if print_it:
                print(printable(writer.write(each)), end="", flush=True)
    return found


def _finish(
    heard: Transcription, file: str, target: Path | None, kept: Unfinished | None, found: list[Segment], form: Format,
    timestamps: str | None, *, json: bool, quiet: bool, verbose: bool,
) -> None:  # fmt: skip
    """Write the file and the report. Raises IncompleteError, ShortMemoryError for a transcript that a budget cut."""
    from edge.devices.output import write_whole
    from edge.errors import several
    from edge.lab.report.speech import speech_line, speech_lines
    from edge.run.speech.report import check_whole
    from edge.run.speech.segments import Writer

    report = heard.report
    assert report is not None
    whole = report.stop_reason == "eos"
    if kept and json:
        found = list(kept.segments())
    if target is not None and whole:
        writer = Writer(form, by_words=timestamps == "words", timed=timestamps is not None)
        write_whole(target, writer.heading + "".join(map(writer.write, kept.segments() if kept else found)))
    if kept and whole:
        kept.finish()
    if json:
        text = "".join(each.text for each in found).strip()
        told = {**report.to_dict(), "text": text, "segments": [each.to_dict() for each in found]}
        print_json({"file": file, **told})
    elif not quiet:
        if target is not None and whole:
            note(f"{target} ({several(heard.place.count, 'segment')})")
        note("\n".join((speech_lines if verbose else speech_line)(report)))
        if heard.cut:
            note(f"({file} is cut off: it ends before its header or its last page says)")
    check_whole(report, kept=kept is not None)

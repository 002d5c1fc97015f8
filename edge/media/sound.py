"""Sounds as mono samples at 16 kHz, read in pieces, so that memory does not grow with their length."""

from __future__ import annotations

import io
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from edge.devices.regular import check_file
from edge.errors import InputError, MissingExtraError
from edge.media.av import EXTRA, Opened, container_of
from edge.media.mel import RATE
from edge.media.resample import Resampler
from edge.media.stderr import without_lines
from edge.media.wav import OtherWavError, WavFormat, read_header
from edge.types import AnyArray, FloatArray

LOWEST, HIGHEST = 1000, 768000  # rates, samples per second
_MOST_CHANNELS = 64
_BLOCK_S = 0.1  # a pipe is read in such parts
_FILE_BLOCK_S = 1.0
_FORMATS = "edge reads WAV, FLAC, OGG, MP3, M4A and WebM; ffmpeg -i FILE sound.wav makes WAV of others"

_MAGICS = (b"RIFF", b"RF64", b"fLaC", b"OggS")
_OF_SNDFILE = (*_MAGICS, b"FORM", b"caff", b".snd", b"ID3")  # the first bytes of most that it reads, and MPEG's below
_LAST_PAGE = 1 << 16  # bytes of an OGG's largest page

_POLL_S = 0.1  # between two calls of `check` while a pipe is empty

Close = Callable[[], None]
Check = Callable[[], None]
Source = str | Path | bytes | AnyArray


class SoundStream:
    """A sound that is read from its beginning to its end, once.

    seconds: its length, None if that is known only at its end. cut: whether it ended before the length that its header
    states, or an OGG before its last page, once it has been read. check: is called before each block is read; what it
    raises ends the reading.
    """

    check: Check | None = None

    def __init__(
        self, blocks: Iterator[FloatArray], name: str, seconds: float | None = None, close: Close | None = None,
        *, cut: bool = False,
    ) -> None:  # fmt: skip
        """blocks: float32 [n], mono at 16 kHz. cut: see the class; known beforehand."""
        self.name, self.seconds, self.cut = name, seconds, cut
        self._blocks, self._close = blocks, close
        self._held: FloatArray = np.empty(0, np.float32)
        self._given = 0

    def __enter__(self) -> SoundStream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._close:
            self._close()

    def read(self, count: int) -> FloatArray:
        """The next samples, float32: `count`, fewer only at the end. Waits for a pipe. Raises InputError for damage."""
        parts, size = [self._held], self._held.size
        while size < count:
            if self.check:
                self.check()
            block = next(self._blocks, None)
            if block is None:
                self.cut |= self.seconds is not None and (self._given + size) / RATE < self.seconds - 0.1
                break
            parts.append(block)
            size += block.size
        held = np.concatenate(parts)
        self._held = held[count:]
        self._given += min(count, size)
        return held[:count]


def open_sound(source: Source | SoundStream, *, rate: int | None = None, check: Check | None = None) -> SoundStream:
    """Open a file, its content, an array, or stdin.

    source: a path, or "-" for stdin; bytes, the content of a file; or samples: float from -1 to 1, or integers, [n] or
        [n, channels]. Channels are averaged, other rates resampled to 16 kHz. A sound that is open already stays so.
    rate: samples per second of an array (16000 if None). Of bytes and stdin: they are raw samples of 16 bits, mono,
        little endian, without a header. A file states its own.
    check: is called while the sound is read, and while stdin has nothing to read; what it raises ends that.

    Raises InputError for what is no sound or is damaged, MissingExtraError for what needs libsndfile.
    """
    sound = source if isinstance(source, SoundStream) else _open(source, rate, check)
    sound.check = check
    return sound


def _open(source: Source, rate: int | None, check: Check | None) -> SoundStream:
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int) or not LOWEST <= rate <= HIGHEST):
        raise InputError(f"--rate must be from {LOWEST} to {HIGHEST} samples per second, not {rate!r:.40}")
    if isinstance(source, np.ndarray):
        return _of_array(source, rate or RATE)
    if isinstance(source, bytes | bytearray | memoryview):
        if rate is not None and source[:4] in _MAGICS:
            raise InputError("the bytes are a file, which states its own rate: it is given for raw samples only")
        return _of_file(io.BytesIO(source), "the sound", rate)
    if not isinstance(source, str | Path) or not str(source):
        raise InputError(f"a sound must be a path, bytes or an array, not {source!r:.60}")
    if str(source) == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is no sound on stdin: pipe a WAV file in, or raw samples with --rate")
        file = cast(BinaryIO, _Pipe(sys.stdin.fileno(), check)) if check else sys.stdin.buffer
        return _of_file(file, "stdin", rate, block_s=_BLOCK_S)
    path = Path(source)
    if rate is not None:
        raise InputError(f"{path}: a file states its own rate, which is given for arrays and raw bytes only")
    check_file(path)
    try:
        file = open(path, "rb")  # noqa: SIM115 - the sound closes it
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return _of_file(file, str(path), rate, close=file.close)
    except BaseException:
        file.close()
        raise


class _Pipe:
    """Stdin, a wait for which can be ended. On Windows, which polls sockets alone, a wait ends with the next bytes."""

    def __init__(self, number: int, check: Check) -> None:
        self._raw, self._check = io.FileIO(number, closefd=False), check

    def read(self, count: int) -> bytes:
        """As a buffered file: fewer bytes only at the end."""
        found = bytearray()
        while len(found) < count:
            self._check()
            if sys.platform != "win32" and not select.select([self._raw], [], [], _POLL_S)[0]:
                continue
            part = self._raw.read(count - len(found))
            if part is None:  # it does not block, and another process took the bytes
                continue
            if not part:
                break
            found += part
        return bytes(found)


def _of_array(samples: AnyArray, rate: int) -> SoundStream:
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and not 0 < samples.shape[1] <= _MOST_CHANNELS):
        raise InputError(f"samples must be [n] or [n, channels], not {list(samples.shape)}")
    if samples.dtype.kind not in "fiu":
        raise InputError(f"samples must be numbers, not {samples.dtype}")
    whole = samples.reshape(samples.shape[0], *samples.shape[1:] or (1,))
    step = int(rate * _FILE_BLOCK_S)

    def blocks() -> Iterator[FloatArray]:
        for start in range(0, whole.shape[0], step):
            part = whole[start : start + step]
            if part.dtype.kind == "f":
                yield part.astype(np.float32)
            else:
                bounds = np.iinfo(part.dtype)
                middle = (bounds.max + 1) / 2 if part.dtype.kind == "u" else 0
                yield ((part - float(middle)) / (middle or bounds.max + 1)).astype(np.float32)

    return SoundStream(_mono(blocks(), "the array", rate), "the array", whole.shape[0] / rate)


def _of_file(
    file: BinaryIO, name: str, rate: int | None, *, block_s: float = _FILE_BLOCK_S, close: Close | None = None
) -> SoundStream:  # fmt: skip
    if rate is not None:
        return _of_wav(file, WavFormat(rate, 1, 2, False), name, block_s, close)
    if name != "stdin":
        magic = file.read(12)
        if not magic:
            raise InputError(f"{name} is empty")
        file.seek(0)
        if magic[8:12] != b"WAVE" or magic[:4] not in (b"RIFF", b"RF64"):
            container = container_of(magic)
            return _of_container(file, container, name, close) if container else _of_sndfile(file, name, close)
    try:
        form = read_header(file, name)
    except OtherWavError as error:
        if name == "stdin":
            raise InputError(f"{error}: stdin takes PCM") from None
        file.seek(0)
        return _of_sndfile(file, name, close)
    except InputError as error:
        if name != "stdin":
            raise
        raise InputError(f"{error}: stdin takes WAV, or raw samples of 16 bits with --rate") from None
    return _of_wav(file, form, name, block_s, close)


def _of_wav(
    file: BinaryIO, form: WavFormat, name: str, block_s: float, close: Close | None
) -> SoundStream:  # fmt: skip
    _check(form.rate, form.channels, name)
    frame, left = form.width * form.channels, None if form.frames is None else form.frames
    step = max(1, int(form.rate * block_s))

    def blocks() -> Iterator[FloatArray]:
        waiting = left
        while waiting is None or waiting > 0:
            try:
                data = file.read(frame * (step if waiting is None else min(step, waiting)))
            except OSError as error:
                raise InputError(f"{name} cannot be read ({error.strerror})") from None
            if len(data) < frame:
                return
            found = form.decode(data)
            waiting = None if waiting is None else waiting - found.shape[0]
            yield found

    seconds = None if form.frames is None else form.frames / form.rate
    return SoundStream(_mono(blocks(), name, form.rate), name, seconds, close)


def _of_sndfile(file: BinaryIO, name: str, close: Close | None) -> SoundStream:
    """By libsndfile. Its errors become InputError."""
    try:
        import soundfile
    except ImportError:
        head = file.read(4)
        if not head.startswith(_OF_SNDFILE) and not (head[:1] == b"\xff" and head[1:2] >= b"\xe0"):
            raise InputError(f"{name} is no sound that can be read: {_FORMATS}") from None
        raise MissingExtraError(
            f"{name} is no WAV of PCM, and soundfile, which reads other sounds,", "sounds"
        ) from None
    except OSError as error:  # the library itself
        raise InputError(f"libsndfile cannot be loaded ({error}): edge reads WAV of PCM without it") from None
    ends = _ends(file)
    try:
        with _quiet():
            opened: Any = soundfile.SoundFile(file)
    except (RuntimeError, ValueError, TypeError) as error:
        why = _first_line(error)
        why = "" if "does not exist" in why else f" ({why})"  # libsndfile's word for an MP3 without a frame
        raise InputError(f"{name} is no sound that can be read{why}: {_FORMATS}") from None
    closing = _closing(opened, opened.samplerate, opened.channels, name, close)
    step = max(1, int(opened.samplerate * _FILE_BLOCK_S))

    def blocks() -> Iterator[FloatArray]:
        while True:
            try:
                with _quiet() if opened.format in ("MP3", "MPEG") else nullcontext():
                    found = opened.read(step, dtype="float32", always_2d=True)
            except (RuntimeError, ValueError) as error:
                raise InputError(f"{name} is damaged ({_first_line(error)})") from None
            if not len(found):
                return
            yield found

    known = 0 < opened.frames < 1 << 48
    seconds = opened.frames / opened.samplerate if known else None
    return SoundStream(_mono(blocks(), name, opened.samplerate), name, seconds, closing, cut=not ends)


def _of_container(file: BinaryIO, container: str, name: str, close: Close | None) -> SoundStream:
    try:
        opened = Opened(file, container, name)
    except ImportError:
        raise MissingExtraError(f"the reader of such sounds ({name})", EXTRA) from None
    closing = _closing(opened, opened.rate, 1, name, close)

    def blocks() -> Iterator[FloatArray]:
        yield from opened.blocks()
        stream.cut |= opened.cut

    stream = SoundStream(_mono(blocks(), name, opened.rate), name, opened.seconds, closing)
    return stream


def _closing(opened: Any, rate: int, channels: int, name: str, close: Close | None) -> Close:
    """What closes a reader, then its file. Closes both and raises InputError for a sound of another kind."""
    held = ExitStack()
    if close:
        held.callback(close)
    held.callback(opened.close)
    try:
        _check(rate, channels, name)
    except BaseException:
        held.close()
        raise
    return held.close


_quiet = partial(without_lines, re.compile(rb"libmpg123|^Note: |^Warning: |^\s*$"))  # libmpg123 writes such lines


def _ends(file: BinaryIO) -> bool:
    """Whether a file is whole, as far as its last page says it: an OGG ends with a whole page that is marked as the
    last (RFC 3533, section 6)."""
    whole, end = file.read(4) != b"OggS", file.seek(0, io.SEEK_END)
    if not whole:
        file.seek(max(0, end - _LAST_PAGE))
        tail = file.read()
        at = tail.rfind(b"OggS")
        page = tail[max(0, at) :]
        whole = len(page) > 26 and bool(page[5] & 4) and len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
    file.seek(0)
    return whole


def _mono(blocks: Iterator[FloatArray], name: str, rate: int) -> Iterator[FloatArray]:
    """Blocks [n, channels] of any rate as blocks [n] at 16 kHz. Raises InputError for NaN and infinity."""
    resampler = None if rate == RATE else Resampler(rate, RATE)
    for block in blocks:
        mono = block.mean(axis=1, dtype=np.float32) if block.shape[1] > 1 else block[:, 0]
        if not np.isfinite(mono).all():
            raise InputError(f"{name} has samples that are no numbers: NaN or infinity")
        mono = np.clip(mono, -1.0, 1.0)
        yield resampler.push(mono) if resampler else mono
    if resampler:
        yield resampler.end()


def _check(rate: int, channels: int, name: str) -> None:
    if not LOWEST <= rate <= HIGHEST:
        raise InputError(f"{name} has {rate:,} samples per second: {LOWEST:,} to {HIGHEST:,} are read")
    if not 0 < channels <= _MOST_CHANNELS:
        raise InputError(f"{name} has {channels:,} channels: {_MOST_CHANNELS} are the most")


def _first_line(error: Exception) -> str:
    text = str(getattr(error, "error_string", "") or error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")

"""Sounds in containers that libsndfile does not read, such as voice memos of phones and recordings of browsers, by PyAV
(FFmpeg). The container is known by its first bytes, and no other is tried: some open further files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from edge.errors import InputError
from edge.types import FloatArray

EXTRA = "more-sounds"
_BLOCK = 1 << 14  # samples of a channel that are given at once, at least


def container_of(head: bytes) -> str | None:
    """FFmpeg's name of a file's container by its first 12 bytes; None for others."""
    if head[4:8] == b"ftyp":
        return "mov"  # m4a, mp4, 3gp
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"  # mka, webm
    if head[:4] == b"0&\xb2u":
        return "asf"  # wma
    if head[:2] in (b"\xff\xf1", b"\xff\xf9"):
        return "aac"
    return "amr" if head[:6] == b"#!AMR\n" else None


class Opened:
    """The first sound of a container. seconds: None if it does not say. cut: damage ended it early. Raises InputError
    for what has no sound, ImportError without PyAV."""

    cut = _any = False

    def __init__(self, file: BinaryIO, container: str, name: str) -> None:
        import av  # here: few sounds need it

        av.logging.set_level(av.logging.PANIC)
        self._av: Any = av
        self._name = name
        try:
            self._file: Any = av.open(file, format=container, metadata_errors="replace")
        except (av.FFmpegError, ValueError) as error:
            raise InputError(f"{name} is no sound that can be read ({_word(error)})") from None
        if not self._file.streams.audio:
            self._file.close()
            raise InputError(f"{name} has no sound in it")
        self._stream: Any = self._file.streams.audio[0]
        context: Any = self._stream.codec_context
        if context is None or not context.sample_rate:
            self._file.close()
            raise InputError(f"{name} has a sound of a form that is not known")
        self.rate = int(context.sample_rate)
        ticks, whole = self._stream.duration, self._file.duration
        seconds = float(ticks * self._stream.time_base) if ticks else whole / av.time_base if whole else 0.0
        self.seconds = seconds if 0 < seconds < 1e9 else None

    def close(self) -> None:
        self._file.close()

    def blocks(self) -> Iterator[FloatArray]:
        """Samples, float32 [n, 1]: means of the channels."""
        held, count, form = list[FloatArray](), 0, None
        resampler: Any = None
        try:
            for frame in self._file.decode(self._stream):
                if form != (form := (frame.format.name, frame.layout.name, frame.sample_rate)):
                    resampler = self._av.AudioResampler(format="fltp", layout=frame.layout, rate=self.rate)
                for part in resampler.resample(frame):
                    held.append(part.to_ndarray().mean(axis=0, dtype=np.float32)[:, None])
                    count += part.samples
                    self._any = True
                if count >= _BLOCK:
                    yield np.concatenate(held)
                    held, count = [], 0
        except (self._av.FFmpegError, ValueError) as error:
            if not self._any:
                raise InputError(f"{self._name} is damaged ({_word(error)})") from None
            self.cut = True
        if held:
            yield np.concatenate(held)


def _word(error: Exception) -> str:
    return str(getattr(error, "strerror", "") or error).partition("\n")[0].rstrip(".")[:120] or type(error).__name__

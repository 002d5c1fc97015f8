"""Sounds of prompts: files, bytes and arrays, whose length and hash are known before a model hears them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from edge.errors import InputError
from edge.media.mel import RATE
from edge.media.sound import SoundStream, Source, open_sound
from edge.types import AnyArray, FloatArray

MOST_FILE = 256 << 20  # bytes
MOST_S = 3 * 3600  # seconds
_STEP = RATE  # samples that are read at a time
_DATA_URL = re.compile(r"data:(?:audio/[\w.+-]+)?(?:;[\w.+=-]+)*;base64,", re.IGNORECASE)
_BLANKS = dict.fromkeys(map(ord, " \t\r\n"))


class Sound:
    """A sound for a model that hears: a path, the bytes of a file (WAV, FLAC, OGG, MP3, M4A, WebM), or an array of
    samples: float from -1 to 1, or integers, [n] or [n, channels].

    rate: samples per second of an array (16000 if None); of bytes: these are raw samples of 16 bits, mono.

    samples: their number at 16 kHz, mono, as models hear them. The sound is read once for it, and again when it is
    heard; samples are not kept. Raises InputError for what is no sound, empty, damaged or too long, MissingExtraError
    for what needs libsndfile or PyAV.
    """

    kind: Literal["sound"] = "sound"

    def __init__(self, source: Source, rate: int | None = None) -> None:
        if isinstance(source, bytes | bytearray | memoryview):
            source = bytes(source)
        elif isinstance(source, str | Path):
            source = Path(source).expanduser() if str(source) else source
            if isinstance(source, Path) and source.is_file() and source.stat().st_size > MOST_FILE:
                raise InputError(
                    f"{source} has {source.stat().st_size >> 20} MiB, and a sound {MOST_FILE >> 20} at most"
                )
        if isinstance(source, np.ndarray) and not source.size:
            raise InputError("the sound has no samples: it is empty")
        self._source, self._rate = source, rate
        self.name = str(source) if isinstance(source, Path) else "the sound"
        self.samples, self._hash = 0, b""
        self.samples, self._hash = self._measured()
        if not self.samples:
            raise InputError(f"{self.name} has no samples: it is empty")

    @classmethod
    def of(cls, source: object) -> Sound:
        """The sound of a message's part: a Sound, what Sound takes, or a data URL. Raises InputError."""
        if isinstance(source, Sound):
            return source
        if isinstance(source, str) and (head := _DATA_URL.match(source)):
            return cls(decode_base64(source[head.end() :]))
        if not isinstance(source, str | Path | bytes | bytearray | memoryview | np.ndarray):
            raise InputError(f"a sound must be a path, bytes of a file, an array or edge.Sound, not {source!r:.60}")
        return cls(bytes(source) if isinstance(source, bytearray | memoryview) else source)

    @property
    def seconds(self) -> float:
        return self.samples / RATE

    @property
    def size(self) -> str:
        """For people."""
        return f"{self.seconds:.1f} s"

    @property
    def digest(self) -> bytes:
        """SHA-256 of the samples."""
        return self._hash

    def read(self, into: FloatArray) -> None:
        """The samples, as many as fit, into the beginning of an array, float32 [n]. Raises InputError for a file that
        has changed, or can no longer be read."""
        known, at = hashlib.sha256(), 0
        for block in self._blocks():
            known.update(block.data)
            into[at : at + block.size] = block[: max(0, into.size - at)]
            at += block.size
        if known.digest() != self._hash:
            raise InputError(f"{self.name} has changed since it was named: name it again as a new sound")

    @property
    def url(self) -> str:
        """A data URL with the whole file; of an array, with a WAV file of floats."""
        source = self._source
        if isinstance(source, Path):
            self.read(np.empty(0, np.float32))  # still the same
            data = source.read_bytes()
        elif isinstance(source, bytes) and self._rate is None:
            data = source
        else:
            samples = np.empty(self.samples, np.float32)
            self.read(samples)
            data = wav_of(samples)
        return f"data:audio/*;base64,{base64.b64encode(data).decode()}".replace("/*", "/wav")

    def _measured(self) -> tuple[int, bytes]:
        count, known = 0, hashlib.sha256()
        for block in self._blocks():
            count += block.size
            known.update(block.data)
            if count > MOST_S * RATE:
                raise InputError(
                    f"{self.name} is longer than {MOST_S // 3600} hours: edge transcribe hears such sounds"
                )
        return count, known.digest()

    def _blocks(self) -> Iterator[FloatArray]:
        stream: SoundStream
        with open_sound(self._source, rate=self._rate) as stream:
            while (block := stream.read(_STEP)).size:
                yield np.ascontiguousarray(block)
            if stream.cut:
                raise InputError(f"{self.name} is cut off: it ends before its header or its last page says")


def decode_base64(text: str) -> bytes:
    """Raises InputError."""
    try:
        return base64.b64decode(text.translate(_BLANKS), validate=True)
    except (binascii.Error, ValueError):
        raise InputError("the sound's data is not base64") from None


def wav_of(samples: AnyArray) -> bytes:
    """A WAV file of float32 samples, mono at 16 kHz."""
    body = samples.astype("<f4").tobytes()
    head = np.array([16, 3 | 1 << 16, RATE, 4 * RATE, 4 | 32 << 16], "<u4").tobytes()
    size = (4 + 8 + len(head) - 4 + 8 + len(body)).to_bytes(4, "little")
    return b"RIFF" + size + b"WAVEfmt " + head + b"data" + len(body).to_bytes(4, "little") + body

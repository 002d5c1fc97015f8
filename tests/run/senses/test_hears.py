"""Sounds in conversations, against transformers (tests/golden/heard.py): what the model hears, reuses and refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from golden.sounds import SHORT, chirp
from test_architectures import require_native
from test_cli import edge as forked
from test_cli import edge_here as edge_command
from test_cli import json_here as edge_json

import edge
from edge.converters.convert import Conversion, convert
from edge.media.recording import wav_of
from edge.options import Options
from edge.prompt_cache.cache import PromptCache
from edge.run.starting.senses import open_ears_of
from edge.types import FloatArray, IntArray

TEXT, EARS = GOLDEN / "heard" / "qwen2.gguf", GOLDEN / "heard" / "qwen2audio.gguf"
VOCAB, PLACEHOLDER = 300, 290
SOUNDS = {"short": chirp(SHORT), "other": chirp(SHORT - 4000, 210.0)}
SAID: dict[str, list[tuple[str, ...]]] = {
    "one": [("user", "[short]", "What is heard?")],
    "two": [("user", "[short]", "What is it?"), ("assistant", "A tone."), ("user", "And this: ", "[other]", "?")],
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(TEXT.with_suffix(".npz")) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def session() -> Iterator[edge.Session]:
    with loaded("reference") as session:
        yield session


def loaded(backend: str, **options: Any) -> edge.Session:
    return edge.load(TEXT, backend=backend, mmproj=EARS, kv_dtype="f32", threads=1, **options)


def messages(name: str) -> list[dict[str, Any]]:
    def part(text: str) -> dict[str, Any]:
        if text[0] == "[":
            return {"type": "audio", "audio": edge.Sound(SOUNDS[text[1:-1]])}
        return {"type": "text", "text": text}

    return [{"role": role, "content": [part(each) for each in parts]} for role, *parts in SAID[name]]


def answer(session: edge.Session, said: list[dict[str, Any]], count: int = 12) -> tuple[list[int], FloatArray]:
    """The greedy tokens of an answer, and the logits behind the prompt."""
    found, first = list[int](), list[FloatArray]()

    def look(tokens: IntArray, logits: FloatArray) -> None:
        found[:] = [*tokens.tolist(), int(logits.argmax())]
        if not first:
            first.append(logits.copy())

    for _ in session.stream(messages=said, max_tokens=count, ignore_eos=True, logits_processor=look):
        pass
    return found, first[0]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tokens_logits_and_answers_are_those_of_transformers(backend: str, golden: dict[str, Any]) -> None:
    if backend == "cpu":
        require_native()
    with loaded(backend) as session:
        for name in SAID:
            said = messages(name)
            tokens = session.model.chat_prompt(said).first(None)
            np.testing.assert_array_equal(np.where(tokens >= VOCAB, PLACEHOLDER, tokens), golden[f"{name}.ids"])
            session.reset()
            found, first = answer(session, said)
            expected = golden[f"{name}.logits"]
            np.testing.assert_allclose(first, expected, atol=(2e-4, 2e-2)[backend == "cpu"] * np.abs(expected).max())
            if backend == "reference":
                assert found == golden[f"{name}.greedy"].tolist()


def test_converted_folder_hears_as_transformers(golden: dict[str, Any], tmp_path: Path) -> None:
    report = convert(GOLDEN / "heard" / "qwen2audio", tmp_path / "m.gguf", Conversion("gguf"))
    assert set(report.files) == {"m.gguf", "mmproj-m.gguf"}
    with edge.load(tmp_path / "m.gguf", backend="reference", kv_dtype="f32", threads=1) as session:
        found, first = answer(session, messages("one"))
        assert found == golden["one.greedy"].tolist()
        np.testing.assert_allclose(first, golden["one.logits"], atol=5e-3 * np.abs(golden["one.logits"]).max())


def test_onnx_folder_hears_on_onnx(golden: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    convert(TEXT, tmp_path / "folder", Conversion("onnx"))
    with edge.load(tmp_path / "folder", mmproj=EARS, kv_dtype="f32", threads=1) as session:
        assert session.plan.backend == "onnx"
        _, first = answer(session, messages("one"), count=1)
        np.testing.assert_allclose(first, golden["one.logits"], atol=5e-3 * np.abs(golden["one.logits"]).max())


@pytest.mark.parametrize("name", ["qwen3asr", "gemma4"])
def test_folders_hear_as_transformers(name: str, tmp_path: Path) -> None:
    """Whole folders: the text model, the encoder, and the template."""
    with np.load(GOLDEN / "heard" / f"{name}.npz") as arrays:
        golden = {each: values for each, values in arrays.items() if each.startswith("one.")}
    convert(GOLDEN / "heard" / name, tmp_path / "m.gguf", Conversion("gguf"))
    with edge.load(tmp_path / "m.gguf", backend="reference", kv_dtype="f32", threads=1) as session:
        said = messages("one")
        tokens = session.model.chat_prompt(said).first(None)
        np.testing.assert_array_equal(np.where(tokens >= VOCAB, PLACEHOLDER, tokens), golden["one.ids"])
        found, first = answer(session, said)
        assert found == golden["one.greedy"].tolist()
        np.testing.assert_allclose(first, golden["one.logits"], atol=5e-3 * np.abs(golden["one.logits"]).max())


def test_second_turn_reuses_first_sound(golden: dict[str, Any]) -> None:
    two = messages("two")
    with loaded("reference") as session:
        answer(session, two[:1], count=1)
        assert answer(session, two)[0] == golden["two.greedy"].tolist()
        report = session.report
        assert (report.media.sounds, report.media.pictures) == (1, 0)  # only the second was encoded
        assert report.tokens.reused >= 20  # all of the first sound


def test_another_sound_reuses_no_rows(golden: dict[str, Any]) -> None:
    one, other = messages("one"), messages("one")
    other[0]["content"][0]["audio"] = SOUNDS["short"][::-1].copy()
    with loaded("reference", prompt_cache=PromptCache(memory="4MiB")) as session:
        for said in (one, other, one):
            session.reset()
            found, _ = answer(session, said)
            assert (found == golden["one.greedy"].tolist()) == (said is one)


def test_path_bytes_and_array_are_one_sound(session: edge.Session, tmp_path: Path) -> None:
    samples = SOUNDS["other"]
    path = tmp_path / "sound.wav"
    path.write_bytes(wav_of(samples))
    sounds = [path, str(path), path.read_bytes(), samples, edge.Sound(samples, 16000), edge.Sound(path)]
    assert len({edge.Sound.of(each).digest for each in sounds}) == 1
    session.reset()
    first = "".join(session.stream("What?", sounds=[path], max_tokens=12, ignore_eos=True))
    assert first
    assert first == session.generate("What?", sounds=[samples], max_tokens=12, ignore_eos=True)
    path.write_bytes(wav_of(samples[::-1]))
    with pytest.raises(edge.InputError, match="has changed"):
        sounds[5].read(np.empty(0, np.float32))


def test_a_conversation_keeps_its_sounds_on_disk(session: edge.Session, tmp_path: Path) -> None:
    session.reset()
    talk = edge.Conversation(session)
    list(talk.say("What is it?", sounds=[SOUNDS["other"]], max_tokens=3))
    talk.save(tmp_path / "talk.json")
    [sound] = talk.sounds
    again = edge.Conversation(session)
    again.load(tmp_path / "talk.json")
    assert [each.digest for each in again.sounds] == [sound.digest]


@pytest.mark.parametrize(("part", "said"), [
    ({"input_audio": {"data": "!!!", "format": "wav"}}, "not base64"),
    ({"input_audio": {"data": "AAAA", "format": "wav"}}, "no sound that can be read"),
    ({"input_audio": {"data": "AAAA", "format": "pcm16"}}, "format must be one of"),
    ({"input_audio": {}}, "it has no sound"), ({"audio": "https://x.org/a.wav"}, "are not fetched"),
    ({"audio": "nofile.wav"}, "no such file"), ({"audio": np.zeros(0, np.float32)}, "empty"),
    ({"audio": np.array([np.nan], np.float32)}, "no numbers"), ({"audio": wav_of(np.zeros(9000))[:-9000]}, "cut off"),
])  # fmt: skip
def test_invalid_sounds_raise_one_line(session: edge.Session, part: dict[str, Any], said: str) -> None:
    content = [{"type": "input_audio" if "input_audio" in part else "audio", **part}]
    with pytest.raises(edge.InputError, match=said) as refused:
        session.model.chat_prompt([{"role": "user", "content": content}])
    assert "\n" not in str(refused.value)


def test_a_sound_that_does_not_fit_is_refused(session: edge.Session) -> None:
    with pytest.raises(edge.EdgeError, match="--max-kv-size"), loaded("reference", max_kv_size=16) as small:
        small.generate("What?", sounds=[SOUNDS["short"]], max_tokens=2)


def test_user_text_with_the_special_token_stays_text(session: edge.Session) -> None:
    tokens = session.model.chat_prompt([{"role": "user", "content": "<|AUDIO|>"}]).first(None)
    assert PLACEHOLDER not in tokens


def test_models_without_ears_refuse_sounds(tmp_path: Path) -> None:
    said = messages("one")
    with edge.load(TEXT, backend="reference", mmproj="off") as deaf, pytest.raises(edge.InputError, match="ears"):
        deaf.model.chat_prompt(said)
    with pytest.raises(edge.InputError, match="choose its own"):
        edge.load(GOLDEN / "llama-one-layer.gguf", backend="reference", mmproj=EARS)
    shutil.copy(EARS, tmp_path / "mmproj.gguf")
    with pytest.raises(edge.UnsupportedError, match="hears nothing"):
        open_ears_of(edge.open_model(TEXT), Options(mmproj=GOLDEN / "eyes" / "mmproj.gguf"))
    shutil.copy(TEXT, tmp_path / "model.gguf")
    with edge.load(tmp_path / "model.gguf", backend="reference") as found:
        assert [*found.model.senses] == ["sound"]  # the file beside it


def test_run_hears_files_and_stdin(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(wav_of(SOUNDS["short"]))
    flags = (
        "--mmproj", str(EARS), "--backend", "reference", "-p", "What is heard?", "-n", "12", "--ignore-eos", "--json",
    )  # fmt: skip
    named = edge_json("run", str(TEXT), "--audio", str(path), *flags)
    assert named["media"]["sounds"] == 1
    command = [sys.executable, "-m", "edge", "run", str(TEXT), "--audio", "-", *flags]
    piped = subprocess.run(command, input=path.read_bytes(), capture_output=True, timeout=240, check=True)
    assert json.loads(piped.stdout)["text"] == named["text"] != ""
    refused = edge_command("run", str(TEXT), "--audio", "nofile.wav", *flags)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(("sound", "tokens"), [("0.82s", 20), (None, 21)])
def test_plan_counts_the_rows_of_a_sound(sound: str | None, tokens: int, tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    path.write_bytes(wav_of(SOUNDS["short"]))
    plan = ("plan", str(TEXT), "--mmproj", str(EARS), "--json", "--device", "raspberry-pi-5", "--audio")
    found = edge_json(*plan, sound or str(path))["audio"]
    assert found["tokens"] == tokens
    assert found["seconds"] > 0
    assert found["first_token_s"] > found["seconds"]
    assert found["peak"] >= found["encoder"] > found["weights"]


def test_plan_names_rows_and_memory_a_sound_lacks() -> None:
    plan = ("plan", str(TEXT), "--mmproj", str(EARS), "--device", "raspberry-pi-5", "--max-kv-size", "256")
    told = forked(*plan, "--audio", "5m", "--memory", "90MiB").stdout  # counts the process that plans
    assert "does not fit in 256 KV rows: use --max-kv-size 7501" in told
    assert "the limit, 90 MiB, is too low for the sound" in told
    assert "KV rows: use" not in edge_command(*plan, "--audio", "2s").stdout


def test_ambiguous_and_damaged_ears_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = edge.open_model(shutil.copy(TEXT, tmp_path / "m.gguf"))
    beside = Path(shutil.copy(EARS, tmp_path / "mmproj-a.gguf"))
    shutil.copy(EARS, tmp_path / "mmproj-b.gguf")
    open_ears_of(model, Options())
    assert "mmproj-a.gguf and mmproj-b.gguf fit m.gguf" in caplog.text
    (tmp_path / "mmproj-b.gguf").unlink()
    beside.write_bytes(beside.read_bytes()[:-300])
    with pytest.raises(edge.InputError, match=r"hears nothing .*mmproj-a.gguf: the file is truncated"):
        open_ears_of(model, Options())


def test_stereo_of_another_rate_is_heard() -> None:
    samples = np.repeat(np.sin(np.arange(44100) / 9)[:, None], 2, axis=1)
    sound = edge.Sound((samples * 30000).astype(np.int16), 44100)
    assert sound.samples == 16000

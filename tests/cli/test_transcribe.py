"""`edge transcribe`: forms, files, stdin, interruptions, refusals."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from fork_server import COMMAND, forking
from speech_models import golden_whisper, tone, wav
from test_cli import edge_here as edge

from edge.media.wav import read_header

SOME = ("-l", "de", "--backend", "reference", "-q")

model = golden_whisper()


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    (path := tmp_path / "talk.wav").write_bytes(wav(tone()))
    return path


def test_transcripts_are_written_in_each_form_and_resumed(
    model: Path, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    monkeypatch.setattr("edge.media.sound.read_header", lambda *of: (read.append(of[1]), read_header(*of))[1])
    printed = edge("transcribe", str(sound), "-m", str(model), *SOME, "--format", "srt")
    assert printed.returncode == 0, printed.stderr
    assert read == [str(sound)]
    assert re.match(r"1\n00:00:00,0\d0 --> 00:00:00,\d{3}\n", printed.stdout)
    command = forking(COMMAND, "edge", "transcribe", "-", "-m", str(model), *SOME, "--format", "srt")
    piped = subprocess.run(command, input=sound.read_bytes(), capture_output=True, check=True)
    assert piped.stdout.decode() == printed.stdout
    whole = json.loads(edge("transcribe", str(sound), "-m", str(model), *SOME, "--json").stdout)
    assert (whole["language"], whole["stop_reason"], whole["sound"]["whole_s"]) == ("de", "eos", 3.1)
    assert len(whole["segments"]) == whole["segments"][-1]["id"] + 1
    out = tmp_path / "out"
    (wrong := tmp_path / "not.txt").write_text("no sound")
    assert edge("transcribe", str(wrong), "-m", str(model), *SOME, "-o", str(out)).returncode == 2
    assert list(out.iterdir()) == []
    kept = ("transcribe", str(sound), "-m", str(model), *SOME, "--format", "srt", "-o", str(out))
    cut = edge(*kept, "--time", "1ms")
    assert (cut.returncode, cut.stdout) == (4, "")
    assert "the same command goes on from there" in cut.stderr
    assert [each.name for each in out.iterdir()] == ["talk.srt.part"]
    assert edge(*kept).returncode == 0
    assert [each.name for each in out.iterdir()] == ["talk.srt"]
    transcript = out / "talk.srt"
    transcript.write_text("mine")
    again = edge(*(each for each in kept if each != "-q"))
    assert (again.returncode, again.stderr, transcript.read_text()) == (
        0, f"{transcript} is there, and stays: --force writes it anew\n", "mine",
    )  # fmt: skip
    for foreign, words in ((transcript, "is no transcript"), (out / "talk.srt.part", "is no unfinished transcript")):
        foreign.write_text("mine")
        refused = edge(*kept, "--force")
        assert (refused.returncode, refused.stderr.count("\n"), foreign.read_text()) == (2, 1, "mine")
        assert f"{foreign} {words}, and stays: choose another -o" in refused.stderr
        foreign.write_text("")
    assert edge(*kept, "--force").returncode == 0
    several = edge("transcribe", str(wrong), str(sound), "-m", str(model), *SOME, "--format", "vtt", "-o", str(out))
    assert (several.returncode, (out / "talk.vtt").exists()) == (2, True)
    assert re.search(r"not\.txt.*\n.*1 of 2 sounds have no transcript", several.stderr)
    captions = [each for each in (out / "talk.srt").read_text().splitlines() if "-->" in each]
    assert captions == [each for each in printed.stdout.splitlines() if "-->" in each]


def test_file_that_is_no_sound_is_refused_before_the_model(tmp_path: Path) -> None:
    (wrong := tmp_path / "not.txt").write_text("no sound")
    done = edge("transcribe", str(wrong), "-m", str(tmp_path / "nothing.gguf"))
    assert (done.returncode, "not.txt is no sound that can be read" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(("arguments", "words"), [
    (["nothing.wav"], "nothing.wav: no such file"),
    (["{sound}", "--format", "doc"], "--format must be text, srt, vtt or json"),
    (["{sound}", "--timestamps", "letters"], "--timestamps must be words or segments"),
    (["{sound}", "--rate", "8000"], "--rate is of raw samples on stdin"),
    (["{sound}", "-l", "xx"], "--language 'xx' is not among en, de"),
    (["{sound}", "{sound}", "-o", "{folder}"], "same name"),
    (["{sound}", "--beam-size", "1000000"], "--beam-size must be from 1 to 64"),
    (["{sound}", "--best-of", "0"], "--best-of must be from 1 to 64"),
    (["{sound}", "--vad", "silero", "--silence"], "--silence is --vad none, and not --vad silero"),
    ([""], "the name of a file is empty"), (["{sound}", "--threads", "-3"], "--threads must be from 1 to"),
    (["{sound}", "--kv-dtype", "q8_0"], "the reference engine has no KV dtype 'q8_0': choose f32"),
    (["{sound}", "--backend", "auto", "--kv-dtype", "q8_0"], "the cpu engine has no KV dtype 'q8_0': choose f16"),
    (["{sound}", "--backend", "cpu", "--kv-dtype", "int4"], "choose --kv-dtype int8"),
    (["{sound}", "--backend", "llamacpp"], "llama.cpp runs no models that hear"),
])  # fmt: skip
def test_wrong_arguments_are_refused(
    arguments: list[str], words: str, model: Path, sound: Path, tmp_path: Path
) -> None:
    given = [each.format(sound=sound, folder=tmp_path) for each in arguments]
    done = edge("transcribe", "-m", str(model), "--backend", "reference", "-q", *given)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["talk.txt", "talk.txt.part"])
def test_sounds_are_not_overwritten(name: str, model: Path, sound: Path) -> None:
    (other := sound.with_name(name)).write_bytes(sound.read_bytes())
    files = [str(other)] if name.endswith("txt") else [str(sound), str(other)]
    done = edge("transcribe", *files, "-m", str(model), *SOME, "-o", str(sound.parent))
    assert (done.returncode, other.read_bytes()) == (2, sound.read_bytes())
    assert f"{name} is one of the sounds, and would be overwritten" in done.stderr


@pytest.mark.parametrize("device", ["host", "pixel-9"])
def test_other_commands_say_that_it_hears(device: str, model: Path) -> None:
    done = edge("plan", str(model), "--device", device)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "hears: edge transcribe FILE -m MODEL is what runs it" in done.stderr

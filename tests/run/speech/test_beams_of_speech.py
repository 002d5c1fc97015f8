"""Beam search in transcripts: texts of openai-whisper, and of searches that keep no rows."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
from golden.sounds import logits
from golden_models import GOLDEN
from speech_models import tone, write_model

import edge
from edge.backends import engine_named
from edge.formats.gguf import read_gguf
from edge.media.sound import open_sound
from edge.run.senses.hearing import Listener
from edge.run.speech import decoding
from edge.run.speech.beams import Beams, search
from edge.run.speech.decoding import Decoder
from edge.run.speech.rules import TokenRules
from edge.run.speech.windows import Windows
from edge.types import FloatArray

MOST = 20


def log_softmax(scores: FloatArray) -> FloatArray:
    powers = scores - scores.max()
    return np.asarray(powers - np.log(np.exp(powers).sum()))


def test_texts_are_those_of_openai_whisper() -> None:
    golden = np.load(GOLDEN / "beams_of_whisper.npz")
    texts = np.split(golden["tokens"], np.cumsum(golden["sizes"])[:-1])
    for asked, text, total in zip(golden["asked"].tolist(), texts, golden["totals"], strict=True):
        seed, size, patience, penalty = map(int, asked)
        beams = Beams(size, patience=patience / 100, length_penalty=None if penalty < 0 else penalty / 100)
        found = search(beams, lambda of, seed=seed: log_softmax(logits(seed, of)), 0, MOST)  # type: ignore[misc]
        assert found[0] == tuple(text.tolist())
        assert found[2] == pytest.approx(total, abs=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("whisper"))


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


def test_rows_of_common_beginnings_are_used_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each text ran as a whole; and it is never less probable than the greedy one. Of the texts, no array of all
    tokens is kept: 200 kB each in Whisper's models, and a window has more than a thousand."""
    kept = list[weakref.ref[FloatArray]]()

    def counted(logits: FloatArray) -> FloatArray:
        made = log_softmax(logits)
        kept[:] = [*(each for each in kept if each() is not None), weakref.ref(made)]
        assert len(kept) <= 2
        return made

    monkeypatch.setattr(decoding, "_log_softmax", counted)
    with Listener(read_gguf(model), engine_named("reference"), threads=1, kv_dtype="f32") as listener:
        whisper, rules = listener.whisper, TokenRules(listener.whisper, listener.tokenizer)
        listener.encode(Windows(open_sound(tone()), whisper.mels, whisper.frames).mel(0, whisper.frames))
        opening = [whisper.sot, whisper.languages["en"], whisper.transcribe]
        paid = list[int]()
        found = Decoder(listener, rules, (0.0,), Beams(3)).decode((), opening, 0, paid.append)
        alone = Decoder(listener, rules, (0.0,)).decode((), opening, 0, paid.append)

        def whole(text: tuple[int, ...]) -> FloatArray:
            listener.kv.truncate(0)
            scores = listener.forward(np.array([*opening, *text], np.int32)).copy()
            rules.apply(scores, list(text))
            return log_softmax(scores)

        most = min(whisper.context // 2, whisper.context - len(opening))
        tokens, logprobs, total = search(Beams(3), whole, whisper.eot, most)
        assert found.tokens == tokens
        assert found.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert found.logprob == pytest.approx(total / (len(tokens) + 1), abs=1e-4)
        assert found.logprob >= alone.logprob - 1e-6
        assert sum(found.logprobs) <= 0


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

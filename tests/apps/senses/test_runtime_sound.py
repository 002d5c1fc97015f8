"""`edge_sound` of exported models: tokens and answers of Python's ears, which are transformers'."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import bundle_of, model_of, refused
from conftest import GOLDEN, exhaustive
from ctypes_bundle import open_bundle
from golden.sounds import LONG, SHORT, chirp
from kotlin_programs import run_with_bundle
from test_heard import open_golden_tower
from test_image import COUNT, reply, said, session_of
from test_model_file import set_field

import edge
from edge.apps.bundle import prepare
from edge.apps.enums import Finish, Role
from edge.apps.sections.eyes_file import CONFIG, FAMILIES
from edge.apps.sections.model_file import Section
from edge.apps.sections.sounds_file import SOUNDS as SOUNDS_CONFIG
from edge.backends.tvm.targets import choose_target
from edge.devices.profiles import HOST, find_profile
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import fields_of, planned_as, write_gguf
from edge.media.mel import HOP
from edge.media.resample import Resampler
from edge.options import Options

pytestmark = pytest.mark.slow

TEXT = GOLDEN / "heard" / "qwen2.gguf"
ROWS: dict[str, Any] = {"kv_dtype": "f32", "kv_policy": "streaming", "sinks": 4, "max_kv_size": 320}
CHOSEN = ROWS | {"mmproj": str(GOLDEN / "heard" / "qwen2audio.gguf")}
SOUNDS = {"short": chirp(SHORT), "other": chirp(SHORT - 4000, 210.0), "long": chirp(LONG)}


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}MARKER"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_with(marker: str, path: Path) -> Path:
    """A Llama whose template has sounds."""
    file = read_gguf(GOLDEN / "eyes" / "smolvlm.gguf")
    fields = fields_of(file) | {"tokenizer.chat_template": TEMPLATE.replace("MARKER", marker)}
    write_gguf(path, fields, planned_as(file.tensors.values()), map(file.tensor_bytes, file.tensors.values()))
    return path


def test_answers_about_sounds_are_those_of_transformers() -> None:
    """A second turn has another sound; a saved state is loaded; sounds are evicted."""
    with np.load(TEXT.with_suffix(".npz")) as arrays:
        golden = dict(arrays)
    bundle = bundle_of(str(TEXT), **CHOSEN)
    with open_bundle(bundle) as opened, session_of(opened) as session:
        session.sound(SOUNDS["short"])
        state = session.save()
        use = session.use()
        assert (use["encoder"], use["pictures"]) == (0, 4 * 32 * opened.sound_tokens(SHORT))
        assert min(use["picture_seconds"], use["picture_joules"]) > 0
        found = session.answer("What is heard?")
        assert (found[0], found[2]) == (golden["one.greedy"].tolist(), Finish.LENGTH)
        assert session.use()["rows"] == golden["one.ids"].size + COUNT - 1
        session.load(state)
        assert session.answer("What is heard?") == found
        session.rewind()
        session.sound(SOUNDS["short"])
        session.append(Role.USER, "What is it?")
        session.append(Role.ASSISTANT, "A tone.")
        refused(edge.InputError, "finite", session.sound, np.array([0, np.nan], np.float32))
        session.sound(SOUNDS["other"])
        assert session.answer("And this: ?")[2] == Finish.LENGTH
        for turn in range(8):  # rows are evicted, whole sounds at a time
            session.sound(SOUNDS["long" if turn % 2 else "short"])
            assert len(session.answer("What is it, and what is behind it? " * (1 + turn % 3))[0]) == COUNT
        assert session.use()["evicted"] > 0
        refused(edge.UnsupportedError, "no eyes", session.image, np.zeros((8, 8, 3), np.uint8))
        refused(edge.InputError, "do not fit", session.sound, np.zeros(16000 * 20, np.float32))
        refused(edge.InputError, "rate must be", opened.sound_tokens, 100, 100)


@pytest.mark.parametrize("name", ["qwen2audio", *map(exhaustive, ("ultravox", "voxtral"))])
def test_sounds_of_any_rate_and_length_are_heard_as_by_python(name: str, tmp_path: Path) -> None:
    """Windows that are full and that are not; rows are compared by the answers that depend on them."""
    mmproj, (tower, _) = GOLDEN / "heard" / f"{name}.gguf", open_golden_tower(name)
    text = TEXT if name == "qwen2audio" else text_with(tower.marker, tmp_path / "text.gguf")
    with (
        open_bundle(bundle_of(str(text), mmproj=str(mmproj), **ROWS)) as opened, session_of(opened) as session,
        edge.load(text, backend="reference", mmproj=mmproj, **ROWS) as python,
    ):  # fmt: skip
        for count, rate in ((1, 16000), (700, 16000), (16000, 16000), (16001, 16000), (52000, 44100), (11000, 8000)):
            samples = chirp(count, 130.0)
            converter = Resampler(rate, 16000)
            heard = np.concatenate([converter.push(samples), converter.end()]) if rate != 16000 else samples
            assert opened.sound_tokens(count, rate) == tower.layout(heard.size).tokens
            session.rewind()
            session.sound(samples, rate)
            expected = reply(python, said("user", heard.clip(-1, 1), "What is it?"))
            assert session.answer("What is it?")[1] == expected


@pytest.mark.parametrize(("section", "struct", "field", "value"), [
    (Section.SOUNDS, SOUNDS_CONFIG, "least", 101), (Section.SOUNDS, SOUNDS_CONFIG, "stack", 51),
    (Section.EYES, CONFIG, "family", FAMILIES.index("qwen")),
])  # fmt: skip
def test_damaged_ears_are_an_error(section: Section, struct: Any, field: str, value: int, tmp_path: Path) -> None:
    """A window has 100 frames and 50 states: neither a shortest sound nor a row takes more."""
    folder = bundle_of(str(TEXT), **CHOSEN)
    data = bytearray((folder / "model.edge").read_bytes())
    set_field(data, section, struct, field, value)
    shutil.copytree(folder, tmp_path / "bundle")
    (tmp_path / "bundle" / "model.edge").write_bytes(data)
    with (
        open_bundle(tmp_path / "bundle") as opened,
        pytest.raises(edge.ModelFormatError, match=r"damaged \(its ears\)"),
    ):
        opened.sound_tokens(1)


def test_plans_have_room_for_the_longest_sound() -> None:
    """Its samples, its spectrogram and its rows, besides what a text takes."""
    texts, both = (
        prepare(model_of(str(TEXT)), find_profile(HOST), Options().updated(**chosen), [choose_target().name])
        for chosen in (ROWS, CHOSEN)
    )
    tower, _ = open_golden_tower("qwen2audio")
    rows, samples = CHOSEN["max_kv_size"], CHOSEN["max_kv_size"] * 4 * HOP
    with open_bundle(bundle_of(str(TEXT), **CHOSEN)) as opened:
        assert opened.sound_tokens(samples) == rows
    needed = 4 * (samples + samples // HOP * tower.mels + rows * tower.mmproj.projected)
    assert needed <= both.plan.bytes.scratch - texts.plan.bytes.scratch < 1.1 * needed


@pytest.mark.exhaustive
def test_kotlin_plays_shorts(tmp_path: Path) -> None:
    folder = bundle_of(str(TEXT), **CHOSEN)
    shorts = (SOUNDS["short"] * 32767).astype("<i2")
    (tmp_path / "sound").write_bytes(shorts.tobytes())
    said = run_with_bundle("edge.runtime.PlayKt", folder, folder / "sounds.edge", tmp_path / "sound")
    with open_bundle(folder) as bundle, session_of(bundle) as session:
        session.sound(shorts.astype(np.float32) / 32768)
        assert said["answer"] == [str(session.answer("What is heard?")[0])]
        assert said["tokens"] == [str(bundle.sound_tokens(SHORT))]
    assert said["refused"] == ["BAD_ARGUMENT rate must be from 1000 to 192000 samples per second, not 9"]

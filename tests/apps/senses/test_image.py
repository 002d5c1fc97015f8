"""`edge_image` of exported models: pixels, rows, tokens and answers of Python's eyes, which are transformers'."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import bundle_of, bundle_sources
from conftest import GOLDEN
from ctypes_bundle import BundleSession, open_bundle
from kotlin_programs import run_with_bundle
from runtime_library import C_FILES, CHECKED, PLATFORM, build, load_runtime
from test_model_file import set_field

import edge
from edge.apps.enums import Finish, Role
from edge.apps.sections.eyes_file import CONFIG, FILTERS
from edge.apps.sections.model_file import Section
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.types import AnyArray

Resampling = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
pytestmark = pytest.mark.slow

TEXT, EYES = GOLDEN / "eyes" / "smolvlm.gguf", GOLDEN / "eyes" / "mmproj.gguf"
CHOSEN: dict[str, Any] = {"mmproj": str(EYES), "kv_dtype": "f32", "kv_policy": "streaming", "sinks": 4}
COUNT = 12


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(TEXT.with_suffix(".npz")) as arrays:
        return dict(arrays)


def session_of(bundle: Any) -> BundleSession:
    session: BundleSession = bundle.session(temperature=0, max_tokens=COUNT, ignore_eos=1, speculate=1)
    return session


class _Pixels(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("width", ctypes.c_uint32), ("height", ctypes.c_uint32)]


@pytest.mark.parametrize("size", [(300, 441), (37, 20), (1, 7), (500, 3)])
def test_resized_pixels_are_those_of_pillow(size: tuple[int, int]) -> None:
    library = load_runtime("pixels.c", "error.c", "cpu.c", *PLATFORM)
    picture = np.random.default_rng(1).integers(0, 256, (*size, 3)).astype(np.uint8)
    given = _Pixels(picture.ctypes.data, size[1], size[0])
    for height, width in ((32, 64), size, (size[0], 51)):
        for number, name in enumerate(FILTERS):
            found = _Pixels()
            assert library.pixels_resize(ctypes.byref(found), ctypes.byref(given), width, height, number)
            made = (ctypes.c_uint8 * (height * width * 3)).from_address(found.data)
            kind = Resampling.Resampling[name.upper()]
            expected = Resampling.fromarray(picture).resize((width, height), kind)
            np.testing.assert_array_equal(np.reshape(made, (height, width, 3)), np.asarray(expected))
            library.pixels_free(ctypes.byref(found))


def test_answers_about_pictures_are_those_of_transformers(golden: dict[str, Any]) -> None:
    """One picture has a stride and an opaque alpha channel; one turn has no picture."""
    first = golden["first"]
    wide = np.full((first.shape[0], first.shape[1] + 5, 4), 255, np.uint8)
    wide[:, : first.shape[1], :3] = first
    with open_bundle(bundle_of(str(TEXT), **CHOSEN)) as bundle, session_of(bundle) as session:
        tokens = bundle.image_tokens(first.shape[1], first.shape[0])
        for shown in (first, wide[:, : first.shape[1]]):
            session.image(shown)
            use = session.use()
            assert (use["encoder"], use["pictures"]) == (0, 4 * 32 * tokens)
            assert min(use["picture_seconds"], use["picture_joules"]) > 0
            found = session.answer("What is in the picture?")
            assert session.use()["pictures"] == 0
            assert found[0] == golden["one.greedy"].tolist()
            assert found[2] == Finish.LENGTH
            assert session.use()["rows"] == golden["one.ids"].size + COUNT - 1
            session.rewind()
        assert tokens == int((golden["one.ids"] == 290).sum())
        alone = session.answer("Hello there.")
        assert alone[0] == golden["text.greedy"].tolist()


def test_later_turns_and_saved_states_are_those_of_python(golden: dict[str, Any]) -> None:
    """Turns have two pictures, then one; some stand behind a system prompt, or were saved before their text."""
    first, second = golden["first"], golden["second"]

    def said(role: str, *parts: object) -> dict[str, Any]:
        content = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each}
                   for each in parts]  # fmt: skip
        return {"role": role, "content": content}

    asked = said("system", "Be brief."), said("user", first, second, "Compare."), said("user", second, "Again?")
    with (
        open_bundle(bundle_of(str(TEXT), **CHOSEN)) as bundle, session_of(bundle) as session,
        edge.load(TEXT, backend="reference", **CHOSEN) as python,
    ):  # fmt: skip

        def of_python(*messages: dict[str, Any]) -> str:
            python.reset()
            return "".join(python.stream(messages=[*messages], max_tokens=COUNT, ignore_eos=True))

        for system in (True, False, True):
            session.rewind()
            if system:
                session.append(Role.SYSTEM, "Be brief.")
            session.image(first)
            session.image(second)
            state = session.save()
            text = session.answer("Compare.")[1]
            session.load(state)
            assert session.answer("Compare.")[1] == text
            before = asked[: 1 if system else 0]
            assert text == of_python(*before, asked[1])
            session.load(state)
            session.append(Role.USER, "Compare.")
            session.append(Role.ASSISTANT, "A bar.")
            session.image(second)
            again = session.answer("Again?")[1]
            assert again == of_python(*before, asked[1], said("assistant", "A bar."), asked[2])
            state = session.save()
            session.rewind(1)
            session.image(second)
            assert session.answer("Again?")[1] == again
            session.load(state)
            session.image(first)
            assert session.answer("Again?")[1] != again


def test_pictures_leave_with_their_turns(golden: dict[str, Any]) -> None:
    """Pictures of a saved state leave, too, and a system prompt keeps its rows."""
    first, second = golden["first"], golden["second"]
    with open_bundle(bundle_of(str(TEXT), **CHOSEN)) as bundle, session_of(bundle) as session:
        session.image(first)
        session.image(second)
        session.answer("Compare.")
        session.rewind()
        plain = session.answer("Hello there.")
        for _ in range(257):
            session.image(first[:8, :8])
            session.append(Role.USER, "What is it?")
            session.rewind(1)
        session.image(first)
        session.answer("What is it?")
        session.load(session.save())
        session.rewind()
        assert session.answer("Hello there.") == plain
        session.rewind()
        session.append(Role.SYSTEM, "Be brief.")
        brief = session.answer("Hello there.")
        session.rewind(1)
        session.image(first)
        session.answer("What is it?")
        session.load(session.save())
        session.rewind(1)
        assert session.answer("Hello there.") == brief
        session.rewind()
        session.append(Role.SYSTEM, "Be brief.")
        session.image(first)
        session.load(without_system(session.save()))
        session.answer("What is it?")


def without_system(state: bytes) -> bytes:
    """A saved state without the tokens of its system's text, with the hash of what is left."""
    (count,) = struct.unpack_from("<I", state, 108)
    assert count
    made = bytearray(state[: -32 - 4 * count])
    struct.pack_into("<I", made, 108, 0)
    struct.pack_into("<Q", made, 80, len(made) + 32)
    return bytes(made) + hashlib.sha256(made).digest()


def test_pictures_stay_whole_when_rows_are_evicted(golden: dict[str, Any]) -> None:
    """Some questions behind the pictures are long."""
    with open_bundle(bundle_of(str(TEXT), **CHOSEN, max_kv_size=128)) as bundle, session_of(bundle) as session:
        for turn in range(12):
            session.image(golden["first" if turn % 2 else "second"])
            tokens, _, finish = session.answer("What is it, and what is beside it? " * (1 + turn % 3))
            assert (len(tokens), finish) == (COUNT, Finish.LENGTH)
        assert session.use()["evicted"] > 0


@pytest.mark.exhaustive
def test_kotlin_answers_about_bitmaps_are_those_of_transformers(golden: dict[str, Any], tmp_path: Path) -> None:
    """One bitmap is in the GPU's memory, and eyes.edge may be an open file."""
    folder = bundle_of(str(TEXT), **CHOSEN)
    picture = golden["first"]
    (tmp_path / "picture").write_bytes(picture.tobytes())
    words = folder / "eyes.edge", tmp_path / "picture", picture.shape[1]
    said = run_with_bundle("edge.runtime.SeeKt", folder, *words)
    assert said["tokens"] == [str(int((golden["one.ids"] == 290).sum()))]
    assert said["answer"] == [str(golden["one.greedy"].tolist())] * 4
    assert said["refused"] == [
        "BAD_ARGUMENT: a picture has at least 4 tokens, not 1: allow more",
        "BAD_ARGUMENT: a picture of 250 x 1 pixels: one side is more than 200 times the other",
    ]
    assert said["sizes"] == [f"{picture.shape[0] * picture.shape[1]} colors for {picture.shape[1]} × "
                             f"{picture.shape[0] + 1} pixels"]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_any_calls_with_pictures_run_under_sanitizers(seed: int, tmp_path: Path) -> None:
    chosen = CHOSEN | {"max_kv_size": 128}
    model, parts = bundle_sources(str(TEXT), **chosen)
    runtime = [path for path in C_FILES if path.name not in ("apple.c", "windows.c")]
    program = build([*runtime, Path(__file__).parents[1] / "runtime" / "image_fuzz.c", *parts], CHECKED)
    command = [program, model, model.parent / "eyes.edge", tmp_path / "damaged", seed, 400]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(int(each) > 10 for each in done.stdout.split())  # both were taken and refused


def test_invalid_pictures_are_refused(golden: dict[str, Any], tmp_path: Any) -> None:
    picture: AnyArray = golden["first"]
    with open_bundle(bundle_of(str(TEXT), **CHOSEN, max_kv_size=128)) as bundle, session_of(bundle) as session:
        for fields, message in (
            ({"width": 0}, "it must have some"), ({"height": 1 << 30}, "million at most"),
            ({"stride": 5}, "stride is 5 bytes"), ({"channels": 2}, "3 channels"), ({"pixels": None}, "its pixels"),
            ({"size": 8}, "whose size is set"), ({"tokens": 1}, "at least 4 tokens, not 1"),
            ({"width": 1, "height": 201}, "more than 200 times"),
        ):  # fmt: skip
            with pytest.raises(InputError, match=message):
                session.image(picture, **fields)
        with pytest.raises(ModelFormatError, match="cannot open"):
            session.image(picture, eyes=tmp_path / "none")
        data = (bundle_of(str(TEXT), **CHOSEN, max_kv_size=128) / "eyes.edge").read_bytes()
        (tmp_path / "cut").write_bytes(data[:-64])
        with pytest.raises(ModelFormatError, match=r"^eyes\.edge has"):
            session.image(picture, eyes=tmp_path / "cut")
        damaged = bytearray(data)
        set_field(damaged, Section.EYES, CONFIG, "mean", 0.25)
        (tmp_path / "other").write_bytes(damaged)
        with pytest.raises(ModelFormatError, match=r"^eyes\.edge is damaged \(its eyes\)"):
            session.image(picture, eyes=tmp_path / "other")
        session.image(picture)
        with pytest.raises(InputError, match="a picture waits for a text"):
            session.append(Role.IDS, [3])
        session.rewind()
        assert len(session.answer("Hello there.")[0]) == COUNT
    with open_bundle(bundle_of(str(TEXT), kv_dtype="f32", kv_policy="streaming", sinks=4)) as bundle:
        with pytest.raises(UnsupportedError, match="the bundle has no eyes: export the model with --mmproj"):
            bundle.image_tokens(30, 44)
        with session_of(bundle) as session, pytest.raises(UnsupportedError, match="no eyes"):
            session.image(picture)

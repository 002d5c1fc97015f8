"""`edge_image` of exported models: pixels, rows, tokens and answers of Python's eyes, which are transformers'."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import build_with, bundle_of, refused
from conftest import GOLDEN
from ctypes_bundle import BundleSession, open_bundle
from kotlin_programs import run_with_bundle
from runtime_library import CHECKED, build, load_runtime, said_by
from test_model_file import set_field
from test_runtime_pass import SOURCES, host_isa
from test_sight import NAMES, open_golden_tower

import edge
from edge.apps.bundle import prepare
from edge.apps.enums import Finish, Role
from edge.apps.sections.eyes_file import CONFIG, plan_eyes
from edge.apps.sections.model_file import Section
from edge.backends.tvm.compiler.exported import exported_objects, passes_source
from edge.converters.huggingface.reader import convert_folder
from edge.devices.profiles import HOST, find_profile
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import Planned, fields_of, planned_as, write_gguf
from edge.model.model import Model, open_model
from edge.model.towers import PictureTower, read_tower
from edge.options import Options
from edge.run.session import Session
from edge.types import AnyArray

pytest.importorskip("PIL.Image", reason="Pillow is not installed")
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


def said(role: str, *parts: str | AnyArray) -> dict[str, Any]:
    """A message of texts, pictures, which have three axes, and sounds."""

    def part(each: str | AnyArray) -> dict[str, Any]:
        if isinstance(each, str):
            return {"type": "text", "text": each}
        return {"type": "image", "image": each} if each.ndim == 3 else {"type": "audio", "audio": each}

    return {"role": role, "content": [part(each) for each in parts]}


def reply(python: Session, *messages: dict[str, Any]) -> str:
    """The greedy answer in a new conversation."""
    python.reset()
    greedy = python.model.sampling(temperature=0.0)
    return "".join(python.stream(messages=[*messages], max_tokens=COUNT, ignore_eos=True, sampling=greedy))


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
    model, program = build_with(("image_fuzz.c",), str(TEXT), *CHECKED, **chosen)
    said = said_by(program, model, model.parent / "eyes.edge", tmp_path / "damaged", seed, 400)
    assert all(int(each) > 10 for each in said.split())  # both were taken and refused


def test_invalid_pictures_are_refused(golden: dict[str, Any], tmp_path: Any) -> None:
    picture: AnyArray = golden["first"]
    with open_bundle(bundle_of(str(TEXT), **CHOSEN, max_kv_size=128)) as bundle, session_of(bundle) as session:
        for fields, message in (
            ({"width": 0}, "it must have some"), ({"height": 1 << 30}, "million at most"),
            ({"stride": 5}, "stride is 5 bytes"), ({"channels": 2}, "3 channels"), ({"pixels": None}, "its pixels"),
            ({"size": 8}, "whose size is set"), ({"tokens": 1}, "at least 4 tokens, not 1"),
            ({"width": 1, "height": 201}, "more than 200 times"),
        ):  # fmt: skip
            refused(InputError, message, session.image, picture, **fields)
        refused(ModelFormatError, "cannot open", session.image, picture, eyes=tmp_path / "none")
        data = (bundle_of(str(TEXT), **CHOSEN, max_kv_size=128) / "eyes.edge").read_bytes()
        (tmp_path / "cut").write_bytes(data[:-64])
        refused(ModelFormatError, r"^eyes\.edge has", session.image, picture, eyes=tmp_path / "cut")
        damaged = bytearray(data)
        set_field(damaged, Section.EYES, CONFIG, "mean", 0.25)
        (tmp_path / "other").write_bytes(damaged)
        with pytest.raises(ModelFormatError, match=r"^eyes\.edge is damaged \(its eyes\)"):
            session.image(picture, eyes=tmp_path / "other")
        session.image(picture)
        refused(InputError, "a picture waits for a text", session.append, Role.IDS, [3])
        session.rewind()
        assert len(session.answer("Hello there.")[0]) == COUNT
    with open_bundle(bundle_of(str(TEXT), kv_dtype="f32", kv_policy="streaming", sinks=4)) as bundle:
        refused(UnsupportedError, "the bundle has no eyes: export the model with --mmproj", bundle.image_tokens, 30, 44)
        with session_of(bundle) as session, pytest.raises(UnsupportedError, match="no eyes"):
            session.image(picture)


# Families of encoders

TEXTS_OF = {
    "smolvlm": "eyes/smolvlm.gguf", "gemma3": "gemma3.gguf", "qwen3vl": "pictures/qwen3vl", "gemma4": "gemma4.gguf",
    "lfm2": "lfm2.gguf", "qwen25vl": "pictures/qwen2vl",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eyes")


def text_of(name: str, folder: Path) -> Path:
    """A text model of the family."""
    path, made = GOLDEN / TEXTS_OF[name], folder / f"{name}.gguf"
    if path.suffix:
        return path
    if not made.exists():
        convert_folder(path, made, type="F32")
    return made


def eyes_of(name: str, model: Model, folder: Path) -> Path:
    """The golden encoder, for a text model of fewer values."""
    path, made = GOLDEN / "towers" / f"{name}.gguf", folder / f"mmproj-{name}-{model.spec.hidden}.gguf"
    file, hidden = read_gguf(path), model.spec.hidden
    if read_tower(file).mmproj.projected == hidden:
        return path
    last = "mm.input_projection" if "mm.input_projection.weight" in file.tensors else "mm.2"
    plans, arrays = list[Planned](), list[AnyArray]()
    for info in file.tensors.values():
        array = file.tensor_bytes(info).view({"F16": np.float16, "F32": np.float32}[info.type])
        array = array.reshape(info.shape[::-1])
        arrays.append(np.ascontiguousarray(array[:hidden]) if info.name.startswith(last) else array)
        plans.append(Planned(info.name, arrays[-1].shape[::-1], info.type))
    write_gguf(made, fields_of(file) | {"clip.vision.projection_dim": np.uint32(hidden)}, plans, arrays)
    return made


class _Layout(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("width", "height", "down", "across", "tiles", "each", "last", "last_down", "last_across")
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_layouts_are_those_of_python(name: str, folder: Path) -> None:
    """Pictures have any size, and any number of tokens."""
    library = load_runtime("layout.c", "section.c", "error.c")
    tower, _ = open_golden_tower(name)
    assert isinstance(tower, PictureTower)
    isas, text = [host_isa()], _text_like(name, tower, folder)
    made = plan_eyes(text, tower, find_profile(HOST), 1, "f32", isas, tower.sizes[-1])
    section = made.own[Section.EYES]
    rng = np.random.default_rng(3)
    for ratio, area in zip(np.exp(rng.uniform(-5, 5, 200)), np.exp(rng.uniform(3, 17, 200)), strict=True):
        width, height = (int(1 + (area * each) ** 0.5) for each in (ratio, 1 / ratio))
        most = int(rng.choice([0, tower.sizes[0], *rng.integers(1, 2 * tower.sizes[-1], 3)]))
        found = _Layout()
        status = library.eyes_lay_out(section, width, height, most, ctypes.byref(found), None)
        try:
            wanted = tower.layout(width, height, min(most, tower.sizes[-1]) if most else tower.sizes[-1])
        except edge.InputError:
            assert status < 0
            continue
        assert status == 0
        tiles = [each for each in wanted.parts if isinstance(each, int)]
        assert found.tiles == len(wanted.tiles) == len(tiles)
        assert (found.last, found.last_down, found.last_across) == (tiles[-1], *wanted.tiles[-1])
        if name != "gemma3":
            assert (found.width, found.height) == (wanted.width, wanted.height)
        assert all(each == found.each for each in tiles[:-1])


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_rows_are_those_of_transformers(name: str, folder: Path, tmp_path: Path) -> None:
    tower, golden = open_golden_tower(name)
    isa = host_isa()
    made = plan_eyes(_text_like(name, tower, folder), tower, find_profile(HOST), 1, "f32", [isa])
    made.write(tmp_path, "00" * 32)
    trusted = '#include "bundle.h"\n' + made.trusted_source() + "const encoder_kind *const ENCODER = &eyes;\n"
    (tmp_path / "trusted.c").write_text(
        f"{trusted}table_reader *const EDGE_TABLE = NULL;\nconst accelerator_kind *const EDGE_PAGE = NULL;\n"
        "const compiled_pass EDGE_PASSES[] = {{NULL, NULL}};\n"
    )
    (tmp_path / "passes.c").write_text(passes_source(made.designs))
    files = [
        "eyes.c", "section.c", "layout.c", "patches.c", "project.c", "pixels.c", "matrix.c", "encoder.c", "norm.c",
        "trust.c", "hash.c",
    ]  # fmt: skip
    tables = [tmp_path / "trusted.c", tmp_path / "passes.c"]
    program = build([*SOURCES, "eyes_harness.c", *files, *tables, *exported_objects(made.designs)])
    height, width, _ = golden["picture"].shape
    (tmp_path / "picture").write_bytes(np.array([width, height, 0], "<u4").tobytes() + golden["picture"].tobytes())
    said_by(program, tmp_path / "eyes.edge", isa, 1, tmp_path / "picture", tmp_path / "rows")
    data = (tmp_path / "rows").read_bytes()
    length = int(np.frombuffer(data, "<u4", 1)[0])
    assert data[4 : 4 + length].decode().replace("\1", "<image>") == str(golden["prompt"])
    rows = np.frombuffer(data, "<f4", offset=4 + length).reshape(golden["rows"].shape)
    near = 1e-3 if name == "lfm2" else 2e-4  # as tests/run/senses/test_sight.py has it
    np.testing.assert_allclose(rows, golden["rows"], atol=near * np.abs(golden["rows"]).max())


def _text_like(name: str, tower: PictureTower, folder: Path) -> Model:
    """A text model of the family, as if it had the golden encoder's values."""
    model = copy(open_model(text_of(name, folder)))
    model.spec = replace(model.spec, hidden=tower.mmproj.projected)
    return model


@pytest.mark.parametrize("name", ["smolvlm", "gemma3", "qwen3vl"])
def test_answers_are_those_of_python(name: str, folder: Path) -> None:
    """About one picture and, behind an answer, another, behind a system's text; from saved states; where rows are
    evicted."""
    text = text_of(name, folder)
    chosen: dict[str, Any] = {
        "mmproj": str(eyes_of(name, open_model(text), folder)), "kv_dtype": "f32", "kv_policy": "streaming", "sinks": 4,
        "max_kv_size": 320, "prefill_step_size": 64, "image_tokens": 24 if name == "qwen3vl" else None,
    }  # fmt: skip
    shown = [open_golden_tower("smolvlm")[1]["picture"], open_golden_tower("lfm2")[1]["picture"][:, ::-1].copy()]
    with (
        open_bundle(bundle_of(str(text), **chosen)) as bundle, session_of(bundle) as session,
        edge.load(text, backend="reference", **chosen) as python,
    ):  # fmt: skip
        asked = [said("user", shown[0], "What is it?")]
        if name == "smolvlm":
            session.append(Role.SYSTEM, "Be brief.")
            asked = [said("system", "Be brief."), *asked]
        session.image(shown[0])
        state = session.save()
        first = session.answer("What is it?")[1]
        assert first == reply(python, *asked)
        session.load(state)
        assert session.answer("What is it?")[1] == first
        session.load(state)
        session.append(Role.USER, "What is it?")
        session.append(Role.ASSISTANT, "A bar.")
        session.image(shown[1])
        again = session.answer("And this?")[1]
        assert again == reply(python, *asked, said("assistant", "A bar."), said("user", shown[1], "And this?"))
        for turn in range(8):  # rows are evicted, whole pictures at a time
            session.image(shown[turn % 2])
            assert len(session.answer("What is it, and what is beside it? " * (1 + turn % 3))[0]) == COUNT
        assert session.use()["evicted"] > 0


def test_file_with_ears_too_is_exported_without_them(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 4's eyes and its conformer in one file, as it is published."""
    text = open_model(text_of("gemma4", folder))
    files = [read_gguf(path) for path in (eyes_of("gemma4", text, folder), GOLDEN / "heard" / "gemma4.gguf")]
    held = [(file, info) for file in files for info in file.tensors.values()]
    data = (file.tensor_bytes(info) for file, info in held)
    plans = planned_as(info for _, info in held)
    write_gguf(tmp_path / "mmproj.gguf", fields_of(files[1]) | fields_of(files[0]), plans, data)
    chosen = Options().updated(mmproj=str(tmp_path / "mmproj.gguf"), max_kv_size=320)
    found = prepare(text, find_profile(HOST), chosen, [host_isa()])
    assert [each.part for each in found.encoders] == ["eyes"]
    assert f"{tmp_path / 'mmproj.gguf'} has eyes and ears: the bundle gets its eyes" in caplog.text

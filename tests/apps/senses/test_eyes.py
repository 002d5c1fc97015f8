"""Families of encoders in apps: layouts are Python's, rows are transformers', and text models answer as Python's do."""

from __future__ import annotations

import ctypes
import subprocess
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import bundle_of
from conftest import GOLDEN
from ctypes_bundle import open_bundle
from runtime_library import build, load_runtime
from test_image import COUNT, session_of
from test_runtime_pass import SOURCES, host_isa
from test_sight import NAMES, open_golden_tower

import edge
from edge.apps.bundle import prepare
from edge.apps.enums import Role
from edge.apps.sections.eyes_file import plan_eyes
from edge.apps.sections.model_file import Section
from edge.converters.convert import Conversion, convert
from edge.converters.gguf.quantize import Settings
from edge.converters.huggingface.reader import convert_folder
from edge.devices.profiles import HOST, find_profile
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import Planned, fields_of, write_gguf
from edge.model.model import Model, open_model
from edge.model.towers import PictureTower, read_tower
from edge.options import Options
from edge.types import AnyArray

pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from edge.backends.tvm.compiler.exported import exported_objects, passes_source

pytestmark = pytest.mark.slow

HARNESS = Path(__file__).parents[1] / "runtime" / "eyes_harness.c"
TEXTS = {
    "smolvlm": "eyes/smolvlm.gguf", "gemma3": "gemma3.gguf", "qwen3vl": "pictures/qwen3vl", "gemma4": "gemma4.gguf",
    "lfm2": "lfm2.gguf", "qwen25vl": "pictures/qwen2vl",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eyes")


def text_of(name: str, folder: Path) -> Path:
    """A text model of the family."""
    path, made = GOLDEN / TEXTS[name], folder / f"{name}.gguf"
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
    program = build([*SOURCES, *files, HARNESS, *tables, *exported_objects(made.designs)], ["-O1"])
    height, width, _ = golden["picture"].shape
    (tmp_path / "picture").write_bytes(np.array([width, height, 0], "<u4").tobytes() + golden["picture"].tobytes())
    command = [program, tmp_path / "eyes.edge", isa, "1", tmp_path / "picture", tmp_path / "rows"]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
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


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gemma4", "lfm2", "qwen25vl", "qwen35")),
             "gemma3", "qwen3vl"],
)  # fmt: skip
def test_answers_are_those_of_python(name: str, folder: Path) -> None:
    """About one picture and, behind an answer, another; from a saved state; where rows are evicted."""
    text, eyes = _pair(name, folder)
    chosen: dict[str, Any] = {
        "mmproj": str(eyes), "kv_dtype": "f32", "kv_policy": "streaming", "sinks": 4, "max_kv_size": 320,
        "prefill_step_size": 64, "image_tokens": {"gemma3": None, "lfm2": 96, "gemma4": 70}.get(name, 24),
    }  # fmt: skip
    shown = [open_golden_tower("smolvlm")[1]["picture"], open_golden_tower("lfm2")[1]["picture"][:, ::-1].copy()]

    def said(role: str, *parts: object) -> dict[str, Any]:
        content = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each}
                   for each in parts]  # fmt: skip
        return {"role": role, "content": content}

    with (
        open_bundle(bundle_of(str(text), **chosen)) as bundle, session_of(bundle) as session,
        edge.load(text, backend="reference", **chosen) as python,
    ):  # fmt: skip
        greedy = python.model.sampling(temperature=0.0)

        def of_python(*messages: dict[str, Any]) -> str:
            python.reset()
            return "".join(python.stream(messages=[*messages], max_tokens=COUNT, ignore_eos=True, sampling=greedy))

        session.image(shown[0])
        state = session.save()
        first = session.answer("What is it?")[1]
        asked = said("user", shown[0], "What is it?")
        assert first == of_python(asked)
        session.load(state)
        assert session.answer("What is it?")[1] == first
        session.rewind(0)
        session.load(state)
        session.append(Role.USER, "What is it?")
        session.append(Role.ASSISTANT, "A bar.")
        session.image(shown[1])
        again = session.answer("And this?")[1]
        assert again == of_python(asked, said("assistant", "A bar."), said("user", shown[1], "And this?"))
        for turn in range(8):  # rows are evicted, whole pictures at a time
            session.image(shown[turn % 2])
            assert len(session.answer("What is it, and what is beside it? " * (1 + turn % 3))[0]) == COUNT
        assert session.use()["evicted"] > 0


def test_file_with_ears_too_is_exported_without_them(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 4's eyes and its conformer in one file, as it is published."""
    text, eyes = _pair("gemma4", folder)
    files = [read_gguf(path) for path in (eyes, GOLDEN / "heard" / "gemma4.gguf")]
    held = [(file, info) for file in files for info in file.tensors.values()]
    plans = [Planned(info.name, info.shape, info.type) for _, info in held]
    data = [file.tensor_bytes(info).reshape(info.rows, -1) for file, info in held]
    write_gguf(tmp_path / "mmproj.gguf", fields_of(files[1]) | fields_of(files[0]), plans, data)
    chosen = Options().updated(mmproj=str(tmp_path / "mmproj.gguf"), max_kv_size=320)
    found = prepare(open_model(text), find_profile(HOST), chosen, [host_isa()])
    assert [each.part for each in found.encoders] == ["eyes"]
    assert f"{tmp_path / 'mmproj.gguf'} has eyes and ears: the bundle gets its eyes" in caplog.text


def _pair(name: str, folder: Path) -> tuple[Path, Path]:
    """A text model and its encoder."""
    if name == "qwen35":
        text = folder / "qwen35.gguf"
        if not text.exists():
            convert(GOLDEN / "pictures" / "qwen35", text, Conversion("gguf", settings=Settings("F16")))
        return text, folder / "mmproj-qwen35.gguf"
    text = text_of(name, folder)
    return text, eyes_of(name, open_model(text), folder)

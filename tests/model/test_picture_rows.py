"""Text models with a picture's rows in a prompt answer what transformers' models with eyes do (golden/pictures.py)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, load_engine
from hf_folders import edit_json

from edge.converters.huggingface.reader import convert_folder
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.model.model import Model, open_model
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.tensors import find_network
from edge.types import AnyArray, IntArray

PICTURES = GOLDEN / "pictures"
ARCHITECTURES = {
    "gemma3": "gemma3", "gemma4": "gemma4", "gemma4moe": "gemma4", "lfm2": "lfm2", "qwen2vl": "qwen2vl",
    "qwen35": "qwen35", "qwen3vl": "qwen3vl", "smolvlm": "llama",
}  # fmt: skip

# By engines beside the reference: spans, in all layers or in those with windows, and deepstack at positions of three
# components.
OFTEN = ("gemma3", "gemma4moe", "qwen3vl")
WHOLE = ("gemma3", "gemma4moe")
GPU = f"gpu@{SOME_GPU}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder, found = tmp_path_factory.mktemp("pictures"), {}
    for name in ARCHITECTURES:
        convert_folder(PICTURES / name, folder / f"{name}.gguf", type="F32")
        found[name] = open_model(folder / f"{name}.gguf")
    return found


def prompt_of(name: str, model: Model) -> tuple[GivenRows, IntArray, dict[str, AnyArray]]:
    """The rows, and the tokens with their ids."""
    with np.load(PICTURES / f"{name}.npz") as arrays:
        golden = dict(arrays)
    given, tokens = GivenRows.of(model.spec), golden["tokens"].copy()
    rows, columns = golden["grid"].tolist()
    tokens[tokens < 0] = given.add(golden["rows"], (rows, columns), whole=name in WHOLE)
    return given, tokens, golden


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=[pytest.mark.exhaustive] * (backend != "reference" and name not in OFTEN))
        for name in ARCHITECTURES for backend in ("reference", "cpu", "llamacpp", "onnx")
        if name != "gemma4moe" or backend in ("reference", "cpu")
    ] + [("qwen2vl", "onnx@cpu-static"), ("gemma3", "onnx@cpu-static"), ("qwen3vl", GPU),
    pytest.param("qwen2vl", GPU, marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_pictures_equal_transformers(models: dict[str, Model], name: str, backend: str) -> None:
    model = models[name]
    assert model.spec.architecture == ARCHITECTURES[name]
    given, tokens, golden = prompt_of(name, model)
    engine: Any = load_engine(model, backend, "f32", capacity=64, chunk=12, logits_rows=12)
    near = 6e-3 if backend == "llamacpp" and name.startswith("gemma") else 1e-3  # its GELU is a table of float16
    text = tokens[tokens < model.spec.vocab]
    np.testing.assert_allclose(engine.forward_all(text)[-8:], golden["plain"], atol=near)
    engine.kv.truncate(0)
    if (name, backend) == ("gemma3", "onnx@cpu-static"):  # whose passes have logits of their last token alone
        found = engine.forward(tokens, given, given.places(tokens, 0))[None]
    else:
        found = engine.forward_all(tokens, given, given.places(tokens, 0))[-8:]
    np.testing.assert_allclose(found, golden["logits"][-len(found) :], atol=near)
    engine.kv.truncate(0)
    for at, token in enumerate(tokens if name == "qwen3vl" else ()):  # rows one by one
        found = engine.forward(token[None], given, given.places(tokens[at : at + 1], engine.kv.next_position))
    if name == "qwen3vl":
        np.testing.assert_allclose(found, golden["logits"][-1], atol=1e-3)
    engine.close()


@pytest.mark.parametrize("name", ["gemma3", pytest.param("gemma4moe", marks=pytest.mark.exhaustive)])
def test_spans_on_a_gpu(models: dict[str, Model], name: str) -> None:
    """Two spans in a pass, in a model with windows."""
    given, tokens, golden = prompt_of(name, models[name])
    engine: Any = load_engine(models[name], GPU, "f32", capacity=64, chunk=40, logits_rows=40)
    reference: Any = load_engine(models[name], "reference", "f32", capacity=64, chunk=40, logits_rows=40)
    np.testing.assert_allclose(
        engine.forward_all(tokens, given, given.places(tokens, 0))[-8:], golden["logits"], atol=1e-3
    )
    twice = np.concatenate([tokens, tokens])[:36]
    found = []
    for each in (engine, reference):
        each.kv.truncate(0)
        found.append(each.forward_all(twice, given, given.places(twice, 0)).copy())
        each.close()
    np.testing.assert_allclose(*found, atol=1e-3)


def test_first_qwen2_vl_config_gives_same_file(tmp_path: Path) -> None:
    """The text model's settings stood beside the tower's, and RoPE's were called mrope."""
    folder = tmp_path / "first"
    shutil.copytree(PICTURES / "qwen2vl", folder)

    def flat(said: dict[str, Any]) -> None:
        text = said.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
        said.update({key: value for key, value in text.items() if key not in said})

    edit_json(folder / "config.json", flat)
    convert_folder(folder, tmp_path / "first.gguf", type="F32")
    convert_folder(PICTURES / "qwen2vl", tmp_path / "now.gguf", type="F32", name="first")
    assert (tmp_path / "first.gguf").read_bytes() == (tmp_path / "now.gguf").read_bytes()
    edit_json(folder / "config.json", lambda said: said["rope_scaling"].update(mrope_section=[1, 1, 1]))
    with pytest.raises(ModelFormatError, match=r"rope.dimension_sections must divide 4 pairs"):
        convert_folder(folder, tmp_path / "damaged.gguf")


def test_spans_beyond_a_window_are_refused(models: dict[str, Model]) -> None:
    model = models["gemma3"]
    window = max(find_network(model.spec).windows)
    count = window + 1
    places = Places(np.arange(count, dtype=np.int32), np.full(count, count - 1, np.int32))
    for backend in ("reference", "cpu"):
        engine: Any = load_engine(model, backend, "f32", capacity=64, chunk=32)
        with pytest.raises(UnsupportedError, match=f"a span of {count} tokens is longer than .* windows, of {window}"):
            engine.forward(np.full(count, 5, np.int32), None, places)
        engine.close()


def test_rows_of_deepstack_are_wide_or_plain(models: dict[str, Model]) -> None:
    spec = models["qwen3vl"].spec
    given = GivenRows.of(spec)
    assert find_network(spec).deepstack == given.deepstack == 1
    ids = given.add(np.ones((2, spec.hidden), np.float32))
    assert not given.parts(ids)[1].any()
    with pytest.raises(InputError, match=rf"must be float32 \[n, {spec.hidden} or {2 * spec.hidden}\]"):
        given.add(np.ones((2, 3 * spec.hidden), np.float32))

"""Encoders of pictures of Hugging Face folders as mmproj files, against those of the gguf package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_heard import HEARD
from test_heard import NAMES as HEARD_NAMES
from test_sight import NAMES, TOWERS

from edge.converters.convert import Conversion, convert, preview
from edge.converters.gguf.quantize import Settings
from edge.converters.huggingface.mmproj import plan_mmproj, sees, write_mmproj
from edge.errors import EdgeError, ModelFormatError, UnsupportedError
from edge.formats.gguf import ArrayRef, GGUFFile, read_gguf
from edge.formats.safetensors import read_header
from edge.model.model import open_model
from edge.model.towers import open_tower, read_ears, read_tower

OWN = ("general.", "clip.use_gelu")  # fields that name the file


def fields(file: GGUFFile) -> dict[str, object]:
    def value(key: str, stored: object) -> object:
        return file.numbers(key).tolist() if isinstance(stored, ArrayRef) else stored

    return {key: value(key, each) for key, each in file.metadata.items() if not key.startswith(OWN)}


@pytest.mark.parametrize("name", NAMES)
def test_written_encoder_is_that_of_gguf(name: str, tmp_path: Path) -> None:
    folder, wanted = TOWERS / name, read_tower(read_gguf(TOWERS / f"{name}.gguf")).mmproj
    assert sees(folder)
    planned = write_mmproj(folder, tmp_path / "m.gguf")
    found = read_tower(read_gguf(tmp_path / "m.gguf")).mmproj
    assert [each.name for each in plan_mmproj(folder)] == [each.name for each in planned]
    assert found.file.tensors.keys() == wanted.file.tensors.keys()
    for each in wanted.file.tensors:
        np.testing.assert_allclose(found.weights(each), wanted.weights(each), rtol=1e-3, atol=1e-6)
    assert fields(wanted.file).items() <= fields(found.file).items()


def test_encoder_beside_the_converted_model(tmp_path: Path) -> None:
    folder, target = TOWERS.parent / "folders" / "gemma3", tmp_path / "gemma.gguf"
    report = convert(folder, target, Conversion("gguf", settings=Settings("Q8_0", "rtn")))
    assert set(report.files) == {"gemma.gguf", "mmproj-gemma.gguf"}
    assert set(preview(folder, tmp_path / "other.gguf", Conversion("gguf"))[0]) == {"other.gguf", "mmproj-other.gguf"}
    tower = open_tower(read_gguf(tmp_path / "mmproj-gemma.gguf"), open_model(target).spec)
    assert tower.layout(64, 48).tokens == tower.sizes[0]


def test_refused_encoder_changes_no_files(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TOWERS.parent / "folders" / "gemma3", tmp_path / "gemma3"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["image_size"] = "large"
    (folder / "config.json").write_text(json.dumps(config))
    older = tmp_path / "mmproj-gemma.gguf"
    older.write_bytes(b"GGUF of another encoder")
    with pytest.raises(EdgeError, match="image_size"):
        convert(folder, tmp_path / "gemma.gguf", Conversion("gguf"), force=True)
    assert not (tmp_path / "gemma.gguf").exists()
    assert older.read_bytes() == b"GGUF of another encoder"


def test_encoder_in_other_types(tmp_path: Path) -> None:
    path, target = tmp_path / "m.gguf", tmp_path / "q.gguf"
    write_mmproj(TOWERS / "qwen3vl", path)
    convert(path, target, Conversion("gguf", settings=Settings("Q8_0", method="rtn")))
    found, before = (read_tower(read_gguf(each)).mmproj for each in (target, path))
    types = {name: info.type for name, info in found.file.tensors.items()}
    assert (types["mm.0.weight"], types["v.blk.0.ffn_up.weight"], types["v.patch_embd.weight"]) == (
        "Q8_0",
        "F16",
        "F32",
    )
    np.testing.assert_allclose(found.weights("mm.0.weight"), before.weights("mm.0.weight"), atol=0.01)
    with pytest.raises(UnsupportedError, match="is an encoder: it becomes GGUF"):
        convert(path, tmp_path / "onnx", Conversion("onnx", settings=Settings("Q8_0", method="rtn")))


@pytest.mark.parametrize(("name", "changes"), [
    ("smolvlm", {"vision_config.hidden_act": "gelu", "do_image_splitting": False, "max_image_size.longest_edge": 64}),
    ("gemma3", {"vision_config.num_channels": 1, "resample": 3, "do_pan_and_scan": True, "size.height": 48}),
    ("lfm2", {"projector_hidden_act": "silu", "max_tiles": 4, "rescale_factor": 0.5}),
    ("qwen25vl", {"vision_config.hidden_act": "quick_gelu", "vision_config.window_size": 56, "patch_size": 16}),
    ("qwen3vl", {"vision_config.rope_parameters.rope_theta": 5.0, "vision_config.temporal_patch_size": 1}),
    ("gemma4", {"vision_config.head_dim": 8, "vision_config.pooling_kernel_size": 2, "do_normalize": True}),
])  # fmt: skip
def test_settings_that_change_pixels(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    for number, (key, value) in enumerate(changes.items()):
        folder = Path(shutil.copytree(TOWERS / name, tmp_path / f"{number}"))
        *parts, last = key.split(".")
        for file in ("config.json", "preprocessor_config.json"):
            whole = json.loads((folder / file).read_text())
            place = whole
            for part in parts:
                place = place.get(part, {})
            if last in place or file[0] == "p":
                place[last] = value
                (folder / file).write_text(json.dumps(whole))
                break
        with pytest.raises(UnsupportedError, match=f"{last}.*is"):
            plan_mmproj(folder)


def test_unknown_tensor_of_a_tower(tmp_path: Path) -> None:
    folder = tmp_path / "smolvlm"
    shutil.copytree(TOWERS / "smolvlm", folder)
    data = (folder / "model.safetensors").read_bytes()
    name = next(each for each in read_header(folder / "model.safetensors") if "layer_norm1.weight" in each)
    (folder / "model.safetensors").write_bytes(data.replace(name.encode(), name.replace("norm1", "sorm1").encode()))
    with pytest.raises(UnsupportedError, match="the model has no tensor blk"):
        write_mmproj(folder, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", HEARD_NAMES)
def test_written_ears_are_those_of_gguf(name: str, tmp_path: Path) -> None:
    wanted, target = read_ears(read_gguf(HEARD / f"{name}.gguf")).mmproj, tmp_path / "m.gguf"
    assert sees(HEARD / name)
    if name == "ultravox":  # whose folder is an encoder alone
        convert(HEARD / name, target, Conversion("gguf"))
    else:
        write_mmproj(HEARD / name, target)
    found = read_ears(read_gguf(target)).mmproj
    for each, info in wanted.file.tensors.items():
        assert (found.file.tensors[each].shape, found.file.tensors[each].type) == (info.shape, info.type)
        np.testing.assert_allclose(found.weights(each), wanted.weights(each), rtol=1e-3, atol=1e-6)
    heard = {each for each in found.file.tensors if each.startswith(("a.", "mm.a."))}  # Gemma's file also sees
    assert heard == wanted.file.tensors.keys()
    assert fields(wanted.file).items() <= fields(found.file).items()
    rounded = Conversion("gguf", settings=Settings("Q8_0", method="rtn"))
    if name in ("qwen2audio", "qwen3asr", "gemma4"):  # whose rows are narrower than blocks
        with pytest.raises(UnsupportedError, match="no matrix has rows of whole blocks of Q8_0"):
            convert(target, tmp_path / "q.gguf", rounded)
        return
    convert(target, tmp_path / "q.gguf", rounded)
    after = read_ears(read_gguf(tmp_path / "q.gguf")).mmproj.file
    assert {info.type for info in after.tensors.values()} == {"F32", "F16", "Q8_0"}
    assert after.size < found.file.size


@pytest.mark.parametrize(("name", "file", "key", "value"), [
    ("towers/smolvlm", "preprocessor_config.json", "image_mean", "x"),
    ("towers/smolvlm", "preprocessor_config.json", "size", {"longest_edge": -4}),
    ("heard/qwen2audio", "config.json", "encoder_attention_heads", 5),
])  # fmt: skip
def test_settings_that_are_wrong_are_named_with_their_file(
    name: str, file: str, key: str, value: object, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(TOWERS.parent / name, tmp_path / "folder"))
    whole = json.loads((folder / file).read_text())
    (whole.get("audio_config", whole) if file == "config.json" else whole)[key] = value
    (folder / file).write_text(json.dumps(whole))
    with pytest.raises(ModelFormatError, match=file) as refused:
        write_mmproj(folder, tmp_path / "made.gguf")
    assert "made.gguf" not in str(refused.value)
    assert "patches" not in str(refused.value)

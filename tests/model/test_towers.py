"""Files of encoders of pictures: damaged ones, old ones, and those of other models; layouts and their budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from surroundings import examples
from test_gguf_file import MUTATIONS, Mutation, mutate
from test_sight import NAMES, TOWERS, open_golden_tower

from edge.backends import engine_named
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import TensorInfo, read_gguf
from edge.formats.gguf_writer import Field, fields_of, planned_as, write_gguf
from edge.model.model import open_model
from edge.model.towers import open_tower, read_tower

SMOLVLM = TOWERS / "smolvlm.gguf"
Renamed = Callable[[str], str | None]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    yield path
    path.unlink(missing_ok=True)


def rewritten(path: Path, rename: Renamed, **fields: Field) -> Path:
    """A copy of SmolVLM's encoder with other names of tensors, of which None are left out, and other fields."""
    file = read_gguf(SMOLVLM)
    kept = [(info, name) for info in file.tensors.values() if (name := rename(info.name))]
    renamed = [replace(info, name=name) for info, name in kept]
    whole = fields_of(file) | {f"clip.vision.{key}": value for key, value in fields.items()}
    write_gguf(path, whole, planned_as(renamed), (file.tensor_bytes(info) for info, _ in kept))
    return path


def test_old_files_with_swapped_matrices_are_read(tmp_path: Path) -> None:
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

    def rename(name: str) -> str:
        found = next((part for part in names if part in name), "")
        return name.replace(found, names[found]) if found else name

    def layer(path: Path) -> dict[str, TensorInfo]:
        return read_tower(read_gguf(path)).stages[0].file.tensors

    old, new = layer(rewritten(tmp_path / "old.gguf", rename)), layer(SMOLVLM)
    shapes = [{name: info.shape for name, info in each.items()} for each in (old, new)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("rename", "fields", "error", "says"), [
    (lambda name: name.replace("v.post_ln", "v.other"), {}, UnsupportedError, "does not know the tensor v.other"),
    (lambda name: name.replace("ln1", "ln9"), {}, UnsupportedError, "blk.0"),
    (lambda name: None if "mm." in name else name, {}, ModelFormatError, "has no mm.model.fc.weight"),
    (str, {"image_size": np.uint32(64)}, ModelFormatError, "v.position_embd.weight has shape"),
    (str, {"attention.head_count": np.uint32(5)}, ModelFormatError, "24 values in 5 heads"),
    (str, {"image_std": np.zeros(3, np.float32)}, ModelFormatError, "image_std must be 3 numbers"),
    (str, {"projector_type": "resampler"}, UnsupportedError, "not with the encoder 'resampler'"),
])  # fmt: skip
def test_damaged_encoder_files_are_refused(
    rename: Renamed, fields: dict[str, Field], error: type[EdgeError], says: str, tmp_path: Path
) -> None:
    path = rewritten(tmp_path / "m.gguf", rename, **fields)
    with pytest.raises(error, match=says):
        read_tower(read_gguf(path))


def test_encoder_of_another_model_is_refused() -> None:
    model = open_model(TOWERS.parent / "llama-gqa-tied.gguf")
    with pytest.raises(InputError, match="an encoder for llama models of 32 values"):
        open_tower(read_gguf(SMOLVLM), model.spec)


def test_pictures_of_larger_gemma_4_models_see_all_of_themselves() -> None:
    tower = open_golden_tower("gemma4")[0]
    small, large = (open_model(GOLDEN / f"{name}.gguf").spec for name in ("gemma4", "gemma4moe"))
    assert [tower.for_text(each).layout(99, 99).whole for each in (small, large)] == [False, True]
    assert all(engine_named(each).sees(large, whole=True) for each in ("llamacpp", "onnx"))


def test_encoder_is_no_model() -> None:
    with pytest.raises(UnsupportedError, match="an encoder of pictures or sounds, not a model"):
        open_model(SMOLVLM)


@settings(max_examples=examples(60), derandomize=True, database=None)
@given(name=st.sampled_from(NAMES), mutations=st.lists(MUTATIONS, min_size=1, max_size=3))
def test_damaged_encoders_are_refused_or_opened(scratch: Path, name: str, mutations: list[Mutation]) -> None:
    data = (TOWERS / f"{name}.gguf").read_bytes()
    size = read_gguf(TOWERS / f"{name}.gguf").data_offset
    scratch.write_bytes(mutate(data, [(what, place % size, how) for what, place, how in mutations]))
    try:
        tower = read_tower(read_gguf(scratch))
        assert tower.layout(640, 480).tokens > 0
    except EdgeError as error:
        message = str(error)
    else:
        return
    assert message.startswith(f"{scratch}: ")
    assert message.isprintable()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(20), derandomize=True, database=None)
@given(width=st.integers(1, 9000), height=st.integers(1, 9000), share=st.floats(0, 1))
def test_layouts_keep_to_the_number_of_tokens(name: str, width: int, height: int, share: float) -> None:
    tower = open_golden_tower(name)[0]
    most = round(tower.sizes[0] + share * (tower.sizes[-1] - tower.sizes[0]))
    with suppress(InputError):  # of pictures that are all width or all height
        assert 0 < tower.layout(width, height, most).tokens <= most
        return
    assert max(width, height) > 4 * min(width, height)
    with pytest.raises(InputError, match="--image-tokens must be at least"):
        tower.layout(64, 64, 0)

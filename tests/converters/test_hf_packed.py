"""Quantized matrices of Hugging Face folders, against the libraries that wrote them (golden/packed.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from hf_folders import FOLDERS, Tensors, complaint, copy_folder, edit_json, edit_tensors, read_tensors, write_tensors
from numpy.testing import assert_allclose, assert_array_equal

from edge.converters.huggingface.config import Config
from edge.converters.huggingface.quantized.find import find_quantized
from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.views import stack_experts
from edge.formats.blocks import dequantize
from edge.formats.gguf import read_gguf
from edge.formats.safetensors import read_header
from edge.model.model import open_model
from edge.types import FloatArray

PACKED = GOLDEN / "packed"
DOWN, OURS = "model.layers.0.mlp.down_proj", "blk.0.ffn_down.weight"
EXACT = 0.0
# The block type of each, and the largest error of a value, as a share of the largest: EXACT, or rounding to Q8_0.
EIGHT = 0.006
KEPT = {
    "int4-group": ("Q4_0", EXACT), "int4-zeros": ("Q4_1", 1e-3), "int3-zeros": ("Q4_1", EXACT),
    "int4-order": ("Q8_0", EIGHT), "int8-channel": ("Q8_0", EXACT), "int8-pack": ("Q8_0", EXACT),
    "mxfp4": ("MXFP4", EXACT), "nvfp4": ("NVFP4", EXACT), "nvfp4-modelopt": ("NVFP4", EXACT),
    "fp8-block": ("Q8_0", EIGHT), "fp8-channel": ("Q8_0", EIGHT),
    "fp8-modelopt": ("Q8_0", EIGHT),
    **{f"mlx-{bits}-{size}": ("Q4_1", EXACT) for bits, size in ((2, 32), (3, 32), (4, 64), (4, 128))},
    "mlx-5-32": ("Q5_1", EXACT), "mlx-6-32": ("Q8_0", 2e-3), "mlx-8-32": ("Q8_0", EIGHT),
    "mlx-mxfp4": ("MXFP4", EXACT), "mlx-nvfp4": ("NVFP4", EXACT), "mlx-mxfp8": ("Q8_0", EIGHT),
    "nf4-double": ("Q8_0", EIGHT), "fp4-double": ("Q8_0", EIGHT), "bnb-int8": ("Q8_0", 1e-3),
    "round-gptq": ("Q4_0", EXACT), "round-zeros": ("Q4_1", 1e-3), "round-v2": ("Q4_1", 1e-3),
    "round-8": ("Q8_0", EXACT), "round-3": ("Q4_1", 1e-3),
}  # fmt: skip


def packed_folder(name: str, target: Path) -> tuple[Path, FloatArray]:
    """A folder with one matrix in this format, and every 21st row of its values."""
    golden, values, settings = read_golden(name)
    folder = copy_folder("gptq", target)
    columns = values.shape[1]

    def edit(tensors: Tensors) -> None:
        floats(tensors, columns)
        del tensors[f"{DOWN}.weight"]
        tensors.update(golden)

    edit_tensors(folder, edit)
    key = "quantization" if "mode" in settings else "quantization_config"
    edit_json(folder / "config.json", lambda said: said.pop("quantization_config"))
    edit_json(folder / "config.json", lambda said: said.update({key: settings, "intermediate_size": columns}))
    return folder, values


def read_golden(name: str) -> tuple[Tensors, FloatArray, dict[str, Any]]:
    """Tensors, values, and settings of config.json."""
    path = PACKED / f"{name}.safetensors"
    golden, raw = read_tensors(path), path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return golden, golden.pop("values")[1], json.loads(header["__metadata__"]["settings"])


def floats(tensors: Tensors, columns: int) -> None:
    """Random floats in place of the packed layers, with as many channels."""
    random = np.random.default_rng(5)
    for name in [each for each in tensors if each.endswith(".qweight")]:
        stem = name.removesuffix("qweight")
        inputs, outputs = 8 * tensors[name][1].shape[0], tensors[name][1].shape[1]
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[stem + part]
        shape = [columns if size == 96 else size for size in (outputs, inputs)]
        tensors[f"{stem}weight"] = ("F16", (random.standard_normal(shape) / 10).astype(np.float16))


@pytest.mark.parametrize("name", KEPT)
def test_values_are_those_of_its_library(name: str, tmp_path: Path) -> None:
    folder, expected = packed_folder(name, tmp_path / name)
    assert convert_folder(folder, tmp_path / "floats.gguf", type="F32")
    file = read_gguf(tmp_path / "floats.gguf")
    info = file.tensors[OURS]
    ours = dequantize(file.tensor_bytes(info).reshape(info.shape[1], -1), "F32")[::21]
    assert_allclose(ours, expected, rtol=2**-10, atol=2**-24)

    (line,) = convert_folder(folder, tmp_path / "blocks.gguf", blocks=True)
    kind, most = KEPT[name]
    file = read_gguf(tmp_path / "blocks.gguf")
    info = file.tensors[OURS]
    assert info.type == kind
    kept = dequantize(file.tensor_bytes(info).reshape(info.shape[1], -1), kind)[::21] * np.float32(info.factor)
    assert ("became" in line and "the same values" in line) == (most == EXACT), line
    assert_allclose(kept, expected, rtol=1e-6, atol=most * np.abs(expected).max())


def test_mlx_model_answers_as_mlx_lm(tmp_path: Path) -> None:
    """The embedding and the head are quantized, too; Q4_1 has the same values."""
    tensors, expected, settings = read_golden("mlx-model")
    folder = copy_folder("qwen3", tmp_path / "qwen3")
    write_tensors(folder / "model.safetensors", tensors)
    edit_json(folder / "config.json", lambda said: said.update(quantization=settings))
    (line,) = convert_folder(folder, tmp_path / "model.gguf", blocks=True)
    assert "became Q4_1: the same values" in line
    engine = load_engine(open_model(tmp_path / "model.gguf"), "reference", "f32")
    with np.load(FOLDERS / "qwen3.npz") as answers:
        logits = engine.forward_all(answers["tokens"])[-len(expected) :]
    assert_allclose(logits, expected, rtol=0, atol=1e-4)


def test_mlx_tensors_become_those_of_hugging_face(tmp_path: Path) -> None:
    """mlx-lm stores convolutions with other axes, and Qwen3.5's norms with 1 added."""
    name = "qwen3_5_text"
    convert_folder(FOLDERS / name, tmp_path / "published.gguf", type="F32")
    folder = copy_folder(name, tmp_path / name)

    def edit(tensors: Tensors) -> None:
        for key, (kind, array) in tensors.items():
            if key.endswith("conv1d.weight"):
                tensors[key] = (kind, array.swapaxes(1, 2))
            elif key.endswith(("layernorm.weight", "model.norm.weight", "_norm.weight")):
                assert kind == "BF16"
                exact = (array.astype(np.uint32) << 16).view(np.float32)
                tensors[key] = ("F32", exact + np.float32(1))

    edit_tensors(folder, edit)
    edit_json(folder / "config.json", lambda said: said.update(quantization={"group_size": 64, "bits": 4}))
    convert_folder(folder, tmp_path / "mlx.gguf", type="F32")
    ours, published = (read_gguf(tmp_path / f"{each}.gguf") for each in ("mlx", "published"))
    for key, info in published.tensors.items():
        assert_array_equal(*(each.tensor_bytes(each.tensors[key]).view(np.float32) for each in (ours, published)))
        assert info.shape == ours.tensors[key].shape


@pytest.mark.parametrize(("name", "settings", "match"), [
    ("mlx-4-64", {"mode": "nf4"}, "MLX's 'nf4', 4 bits in groups of 64 is not supported"),
    ("mlx-4-64", {"group_size": 128}, "down_proj.scales' has a shape (64, 2) that does not fit"),
    ("int4-group", {"quant_method": "hqq"}, "quantized by 'hqq' are not supported (AWQ, GPTQ"),
    ("int4-group", {"transform_config": {"config_groups": {}}}, "transform_config rotates inputs"),
    ("round-gptq", {"packing_format": "auto_round:mlx"}, "layout 'auto_round:mlx' is not supported: save it in"),
])  # fmt: skip
def test_unsupported_layouts_are_refused(name: str, settings: dict[str, object], match: str, tmp_path: Path) -> None:
    folder, _ = packed_folder(name, tmp_path / name)
    key = "quantization" if name.startswith("mlx") else "quantization_config"
    edit_json(folder / "config.json", lambda said: said[key].update(settings))
    assert match in complaint(lambda: convert_folder(folder, tmp_path / "model.gguf"))


@pytest.mark.parametrize(("name", "part", "damage", "match"), [
    ("int4-group", ".weight_packed", lambda _: np.zeros((), np.int32), "does not fit"),
    ("int8-channel", ".weight_scale", lambda each: np.full_like(each, 0x7F7F), "infinite as F16"),
    ("mxfp4", ".weight_scale", lambda each: np.full_like(each, 255), "no numbers"),
    ("fp8-modelopt", ".weight", lambda each: np.stack([each, each]), "does not fit"),
    ("nvfp4-modelopt", ".weight_scale_2", lambda _: np.array(6e4, np.float32), "infinite as F16"),
    ("nf4-double", ".nested_absmax", lambda each: np.full_like(each, 3e38), "infinite as F16"),
    ("nf4-double", "__nf4", lambda _: np.frombuffer(b"[" * 100_000, np.uint8), "too many brackets"),
    ("nf4-double", "__nf4", lambda each: offset(each, "9" * 400), "does not fit"),
    ("round-gptq", "", {"bits": 4.0}, "4.0 bits is not supported"),
    ("round-gptq", "", {"packing_format": []}, "layout [] is not supported"),
])  # fmt: skip
def test_damaged_matrices_raise_one_line(name: str, part: str, damage: Any, match: str, tmp_path: Path) -> None:
    folder, _ = packed_folder(name, tmp_path / name)

    def edit(tensors: Tensors) -> None:
        (found,) = (each for each in tensors if each.startswith(DOWN) and each.endswith(part))
        tensors[found] = (tensors[found][0], damage(tensors[found][1]))

    if part:
        edit_tensors(folder, edit)
    else:
        key = "quantization" if name.startswith("mlx") else "quantization_config"
        edit_json(folder / "config.json", lambda said: said[key].update(damage))
    blocks = name == "mxfp4"
    assert match in complaint(lambda: convert_folder(folder, tmp_path / "model.gguf", blocks=blocks))
    assert [each.name for each in tmp_path.iterdir()] == [name]


def offset(state: Any, value: str) -> Any:
    """bitsandbytes' state of a matrix with another offset."""
    said = json.loads(state.tobytes()) | {"nested_offset": "@"}
    return np.frombuffer(json.dumps(said).replace('"@"', value).encode(), np.uint8)


@pytest.mark.parametrize("spread", [1, 16])
def test_nvfp4_becomes_q6_k(spread: int, tmp_path: Path) -> None:
    """The same values, if no scale of 256 values is below 1/8 of the largest; others are rounded a little."""
    random = np.random.default_rng(9)
    codes = random.integers(0, 256, (8, 256)).astype(np.uint8)  # two in a byte
    scales = (120 - random.integers(0, 24 * spread, (8, 32)).clip(max=100)).astype(np.uint8)
    write_tensors(tmp_path / "model.safetensors", {
        "a.weight": ("U8", codes), "a.weight_scale": ("F8_E4M3", scales),
        "a.weight_scale_2": ("F32", np.array(2**-10, np.float32)), "a.input_scale": ("F32", np.array(1, np.float32)),
    })  # fmt: skip
    config = Config(tmp_path / "config.json", {"quantization_config": {"quant_method": "modelopt"}})
    (matrix,) = find_quantized(read_header(tmp_path / "model.safetensors"), config).values()
    assert (matrix.shape, matrix.block_type) == ((8, 512), "Q6_K")
    data, loss = matrix.read_blocks()
    values = matrix.read().astype(np.float32)
    assert (loss.relative == 0) == (spread == 1)
    assert_allclose(dequantize(data, "Q6_K"), values, rtol=0, atol=0 if spread == 1 else 0.01 * np.abs(values).max())


def test_stacked_experts_keep_blocks(tmp_path: Path) -> None:
    """One tensor for each expert, or MLX's stacks."""
    random = np.random.default_rng(11)
    bytes_of = [random.integers(0, 127, (32, 64)).astype(np.uint8) for _ in range(3)]
    experts: Tensors = {}
    for index, each in enumerate(bytes_of):
        stem = f"model.layers.0.mlp.experts.{index}.up_proj.weight"
        experts |= {stem: ("F8_E4M3", each), f"{stem}_scale_inv": ("F32", np.full((1, 2), 2.0**-index, np.float32))}
    stem, scales = "model.layers.0.mlp.switch_mlp.up_proj", np.full((3, 32, 2), 0.5, np.float16)
    words = random.integers(0, 2**32, (3, 32, 8), dtype=np.uint32)
    stack: Tensors = {f"{stem}.weight": ("U32", words), f"{stem}.scales": ("F16", scales)}
    stack |= {f"{stem}.biases": ("F16", -scales)}
    fp8, mlx = ({"quant_method": "fp8"}, {"bits": 4, "group_size": 32})
    for tensors, said, kind in (
        (experts, {"quantization_config": fp8}, "Q8_0"), (stack, {"quantization": mlx}, "Q4_1"),
    ):  # fmt: skip
        write_tensors(tmp_path / "model.safetensors", tensors)
        config = Config(tmp_path / "config.json", said)
        found = stack_experts({**find_quantized(read_header(tmp_path / "model.safetensors"), config)})
        whole = found["model.layers.0.mlp.experts.*.up_proj.weight"]
        assert (whole.shape, whole.block_type) == ((3, 32, 64), kind)
        data, loss = whole.read_blocks()
        values = whole.read().astype(np.float32)
        assert (0 < loss.relative < 0.01) if kind == "Q8_0" else loss.relative == 0
        kept = dequantize(data.reshape(96, -1), kind).reshape(3, 32, 64)
        assert_allclose(kept, values, rtol=0, atol=0.006 * np.abs(values).max() if kind == "Q8_0" else 0)

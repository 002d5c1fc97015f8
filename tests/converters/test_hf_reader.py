"""Hugging Face folders become GGUF files that answer as transformers does; what cannot be read is refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import examples, load_engine, run_child
from hf_folders import (
    FOLDERS,
    NAMES,
    ONE_WAY,
    PACKED,
    Tensors,
    complaint,
    copy_folder,
    edit_json,
    edit_tensors,
    read_folder,
)
from small_models import Small, write_small
from test_architectures import EXACT, GELU

from edge.backends.base import Engine
from edge.converters.huggingface.reader import convert_folder, planned
from edge.converters.huggingface.writer import write_folder
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile, read_gguf
from edge.model.model import open_model
from edge.types import AnyArray, FloatArray

Engines = Callable[[Engine], Engine]


@lru_cache
def answers(name: str) -> dict[str, AnyArray]:
    with np.load(FOLDERS / f"{name}.npz") as arrays:
        return dict(arrays)


def logits(path: Path, backend: str, engines: Engines, name: str) -> FloatArray:
    engine = engines(load_engine(open_model(path), backend, "f32"))
    return engine.forward_all(answers(name)["tokens"])[-len(answers(name)["logits"]) :]


def tensor(file: GGUFFile, name: str) -> FloatArray:
    info = file.tensors[name]
    data = file.tensor_bytes(info)
    if info.type == "BF16":
        data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view({"F16": np.float16}.get(info.type, np.float32)).astype(np.float32).reshape(info.shape[::-1])


# What comes out


@pytest.mark.parametrize("name", [*NAMES, *PACKED, *ONE_WAY])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, engines: Engines) -> None:
    seen: list[float] = []
    convert_folder(FOLDERS / name, tmp_path / "model.gguf", progress=seen.append)
    ours = logits(tmp_path / "model.gguf", "reference", engines, name)
    np.testing.assert_allclose(ours, answers(name)["logits"], rtol=0, atol=EXACT)
    assert (seen, seen[-1]) == (sorted(seen), 1)
    found = [(info.name, info.shape, info.type) for info in read_gguf(tmp_path / "model.gguf").tensors.values()]
    assert found == [(each.name, each.shape, each.type) for each in planned(FOLDERS / name)]


@pytest.mark.parametrize("name", [
    name if name in ("llama", "gemma3", "gpt2", "glm", "gptq", "gpt_oss", "granite_mamba", "qwen3_5_text")
    else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in (*NAMES, *PACKED, *ONE_WAY) if name != "mistral"
])  # fmt: skip
def test_llama_cpp_answers_same(name: str, tmp_path: Path, engines: Engines) -> None:
    """In float32: else it rounds what it multiplies. It knows no windows for Mistral."""
    convert_folder(FOLDERS / name, tmp_path / "model.gguf", type="F32")
    ours = logits(tmp_path / "model.gguf", "llamacpp", engines, name)
    gelu = name.startswith(("gemma", "gpt2", "starcoder2"))
    np.testing.assert_allclose(ours, answers(name)["logits"], rtol=0, atol=GELU if gelu else EXACT)


def same_file(folder: Path, other: Path, tmp_path: Path, **options: Any) -> None:
    """Two folders of the same name become the same tensors and fields."""
    for number, each in enumerate((folder, other)):
        convert_folder(each, tmp_path / f"{number}.gguf", **options)
    one, two = (read_gguf(tmp_path / f"{number}.gguf") for number in range(2))
    assert list(one.tensors) == list(two.tensors)
    for name, info in one.tensors.items():
        np.testing.assert_array_equal(one.tensor_bytes(info), two.tensor_bytes(two.tensors[name]), err_msg=name)
    assert {key: value for key, value in one.metadata.items() if isinstance(value, int | float)} == {
        key: value for key, value in two.metadata.items() if isinstance(value, int | float)
    }


def test_experts_in_stacks_match_their_own_tensors(tmp_path: Path) -> None:
    """And a model with a tower for images, and layers that predict several tokens, is its text model."""
    folder = copy_folder("qwen3_5_moe_text", tmp_path / "other" / "qwen3_5_moe_text")

    def stack(tensors: Tensors) -> None:
        found = {f"model.language_model.{name.removeprefix('model.')}": each for name, each in tensors.items()}
        for layer in range(2):
            experts = f"model.language_model.layers.{layer}.mlp.experts."
            parts = {part: [found.pop(f"{experts}{number}.{part}.weight")[1] for number in range(4)]
                     for part in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
            both = [np.concatenate(each) for each in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
            found[f"{experts}gate_up_proj"] = ("BF16", np.stack(both))
            found[f"{experts}down_proj"] = ("BF16", np.stack(parts["down_proj"]))
        found["model.visual.blocks.0.weight"] = found["mtp.norm.weight"] = ("BF16", np.zeros(3, np.uint16))
        tensors.clear()
        tensors.update(found)

    edit_tensors(folder, stack)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    same_file(FOLDERS / "qwen3_5_moe_text", folder, tmp_path)


def test_gpt_oss_in_floats(tmp_path: Path) -> None:
    """Experts as training writes them: transposed floats instead of MXFP4, which has the same values."""
    folder = copy_folder("gpt_oss", tmp_path / "other" / "gpt_oss")
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

    def in_floats(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_blocks")]:
            (_, blocks), (_, scales) = tensors.pop(name), tensors.pop(name.replace("blocks", "scales"))
            codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
            values = levels[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
            rows = values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
            tensors[name.removesuffix("_blocks")] = ("F32", np.ascontiguousarray(rows))

    edit_tensors(folder, in_floats)
    settings_of(quantization_config=None)(folder)
    same_file(FOLDERS / "gpt_oss", folder, tmp_path, type="F32")
    convert_folder(FOLDERS / "gpt_oss", tmp_path / "kept")
    assert read_gguf(tmp_path / "kept").tensors["blk.0.ffn_up_exps.weight"].type == "MXFP4"


def test_published_form_of_gemma_4(tmp_path: Path) -> None:
    """Sizes of heads by kind of layer, and keys and values that no layer reads."""
    folder = copy_folder("gemma4_text", tmp_path / "other" / "gemma4_text")
    settings_of(per_layer_config=None, global_head_dim=32)(folder)

    def add(tensors: Tensors) -> None:
        for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            tensors[f"model.layers.2.self_attn.{part}"] = tensors[f"model.layers.0.self_attn.{part}"]

    edit_tensors(folder, add)
    same_file(FOLDERS / "gemma4_text", folder, tmp_path)


@pytest.mark.parametrize("kind", [None, "F16"])
def test_matrices_have_their_own_type_or_the_wanted_one(kind: str | None, tmp_path: Path) -> None:
    convert_folder(FOLDERS / "gemma3", tmp_path / "model.gguf", type=kind)
    file = read_gguf(tmp_path / "model.gguf")
    found = [(info.name, info.shape, info.type) for info in file.tensors.values()]
    assert found == [(each.name, each.shape, each.type) for each in planned(FOLDERS / "gemma3", type=kind)]
    stored = {dtype for dtype, array in read_folder(FOLDERS / "gemma3").values() if array.ndim == 2}
    assert {info.type for info in file.tensors.values() if len(info.shape) == 2} == ({kind} if kind else stored)
    assert {info.type for info in file.tensors.values() if len(info.shape) == 1} == {"F32"}


def test_old_and_new_layouts_of_settings_agree(tmp_path: Path) -> None:
    """rope_parameters and dtype today; rope_theta, rope_scaling, partial_rotary_factor and torch_dtype for years."""

    def aged(said: dict[str, Any]) -> None:
        said["torch_dtype"] = said.pop("dtype")
        said = said.get("text_config", said)
        said.pop("layer_types", None)
        rope = said.pop("rope_parameters")
        if "full_attention" in rope:
            said["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
            said["sliding_window_pattern"] = 2
        said["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            said["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if "type" in said:
            said["rope_scaling"] = None
        kind, key = rope.pop("rope_type"), "rope_type" if "sliding_window_pattern" in said else "type"
        said["rope_scaling"] = None if kind == "default" else rope | {key: {"longrope": "su"}.get(kind, kind)}

    for name in ("gemma2", "gemma3", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"):
        old = copy_folder(name, tmp_path / name)
        edit_json(old / "config.json", aged)
        for source, target in ((FOLDERS / name, "new.gguf"), (old, "old.gguf")):
            convert_folder(source, tmp_path / target)
        assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes(), name


# Rules of transformers 5.23, found by changing every setting of every folder and comparing logits with its own.
BASE, LOCAL, FACTOR = "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor"
NESTED = {"full_attention": {"rope_theta": 50.0}, "sliding_attention": None}


@pytest.mark.parametrize(("name", "settings", "said"), [
    ("qwen3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {BASE: 1e4, FACTOR: 4.0}),
    ("qwen3", {"rope_scaling": {}}, {BASE: 1e6, FACTOR: None}),
    ("qwen2", {"rope_scaling": {"factor": 2.0}, "rope_theta": 50.0}, {BASE: 50.0, FACTOR: None}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "default"}}, {BASE: 1e6, LOCAL: 5e3, FACTOR: None}),
    ("gemma3_text", {"rope_parameters": NESTED, "rope_local_base_freq": 70.0}, {BASE: 50.0, LOCAL: 70.0}),
    ("mistral", {"layer_types": ["full_attention"] * 2}, {"attention.sliding_window": None}),
    ("mistral", {"layer_types": ["sliding_attention"] * 2}, {"attention.sliding_window": 20}),
    ("mistral", {"sliding_window": None}, {"attention.sliding_window": None}),
])  # fmt: skip
def test_contradictory_settings_count_as_in_transformers(
    name: str, settings: dict[str, Any], said: dict[str, float | None], tmp_path: Path
) -> None:
    folder = copy_folder(name, tmp_path / name)
    settings_of(**settings)(folder)
    convert_folder(folder, tmp_path / "model.gguf")
    found = read_gguf(tmp_path / "model.gguf").metadata
    for key, value in said.items():
        assert found.get(f"{found['general.architecture']}.{key}") == (value and pytest.approx(value)), key


def test_names_as_older_checkpoints_have_them(tmp_path: Path) -> None:
    """And what they hold beside weights."""

    def renamed(old: str, new: str) -> Callable[[Tensors], None]:
        def edit(tensors: Tensors) -> None:
            for name in [name for name in tensors if name.startswith(old)]:
                tensors[new + name.removeprefix(old)] = tensors.pop(name)

        return edit

    def buffers(tensors: Tensors) -> None:
        tensors["h.0.attn.bias"] = ("F32", np.ones((1, 1, 8, 8), np.float32))
        tensors["h.1.attn.masked_bias"] = ("F32", np.float32(-1e4))

    changes = {
        "gpt2": [renamed("transformer.", ""), buffers],
        "gemma3": [
            renamed("language_model.model.", "model.language_model."), renamed("vision_tower.", "model.vision_tower."),
        ],
        "qwen3": [lambda tensors: tensors.update({"model.rotary_emb.inv_freq": ("F32", np.ones(8, np.float32))})],
        "glm4_moe_lite": [  # a layer for multi-token prediction, behind two others
            lambda tensors: tensors.update({"model.layers.2.enorm.weight": tensors["model.norm.weight"]})
        ],
        "qwen2": [lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]})],  # tied
    }  # fmt: skip
    for name, edits in changes.items():
        folder = copy_folder(name, tmp_path / name)
        for edit in edits:
            edit_tensors(folder, edit)
        convert_folder(folder, tmp_path / "old.gguf")
        convert_folder(FOLDERS / name, tmp_path / "new.gguf")
        assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "new.gguf").read_bytes(), name


def test_values_too_large_for_f16_are_refused(tmp_path: Path) -> None:
    folder = copy_folder("qwen2", tmp_path / "qwen2")
    odd_number(folder, EMBEDDING, 7e4)
    convert_folder(folder, tmp_path / "model.gguf")
    with pytest.raises(ModelFormatError, match=rf"{EMBEDDING} has values that are too large for F16"):
        convert_folder(folder, tmp_path / "new.gguf", type="F16")
    assert not (tmp_path / "new.gguf").exists()
    with pytest.raises(InputError, match="F32, F16, BF16, not 'Q4_0'"):
        planned(folder, type="Q4_0")


# Quantized checkpoints


def symmetric(tensors: Tensors) -> None:
    """The golden GPTQ checkpoint with zero points of 8 and groups in order."""
    for name in list(tensors):
        if name.endswith(".qzeros"):
            tensors[name] = ("I32", np.full_like(tensors[name][1], 0x77777777))
        if name.endswith(".g_idx"):
            tensors[name] = ("I32", np.arange(tensors[name][1].size, dtype=np.int32) // 32)


def exact(tensors: Tensors) -> None:
    """Scales in float32, so that weights are not rounded to float16."""
    scales = [name for name in tensors if name.endswith(".scales")]
    tensors.update({name: ("F32", tensors[name][1].astype(np.float32)) for name in scales})


ERRORS = {"Q4_0": 0, "Q4_1": 2**-10, "Q8_0": 2**-8}  # of the largest value


@pytest.mark.parametrize(("name", "kind"), [("awq", "Q4_1"), ("gptq", "Q4_0"), ("gptq", "Q4_1"), ("gptq", "Q8_0")])
def test_layers_that_stay_quantized(name: str, kind: str, tmp_path: Path, engines: Engines) -> None:
    """As blocks of 32 with the same scales; Q4_1 rounds its offsets to float16. Inputs in any order are rounded."""
    folder = copy_folder(name, tmp_path / name)
    if name == "gptq" and kind != "Q8_0":
        edit_tensors(folder, symmetric)
        quantized(desc_act=False, sym=kind == "Q4_0")(folder)
    convert_folder(folder, tmp_path / "blocks.gguf", blocks=True)
    edit_tensors(folder, exact)
    convert_folder(folder, tmp_path / "exact.gguf", type="F32", blocks=True)
    file, floats = read_gguf(tmp_path / "blocks.gguf"), read_gguf(tmp_path / "exact.gguf")
    for stem in ("attn_q", "attn_k", "ffn_down"):
        info, expected = file.tensors[f"blk.0.{stem}.weight"], tensor(floats, f"blk.0.{stem}.weight")
        assert info.type == kind
        rows = file.tensor_bytes(info).reshape(info.shape[1], -1)
        ours = dequantize(rows, kind)
        largest = np.abs(expected).max()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=largest * ERRORS[kind])
    assert file.metadata["general.file_type"] == {"Q8_0": 7, "Q4_0": 2, "Q4_1": 3}[kind]
    # Of 4-bit weights engines round the activations, too, so they agree in the large only.
    said = [logits(tmp_path / each, "reference", engines, name) for each in ("blocks.gguf", "exact.gguf")]
    np.testing.assert_allclose(*said, rtol=0, atol=0.2 if kind == "Q8_0" else 0.05)
    theirs = logits(tmp_path / "blocks.gguf", "llamacpp", engines, name)
    assert np.corrcoef(theirs.ravel(), said[0].ravel())[0, 1] > 0.99


@pytest.mark.parametrize(("changes", "match"), [
    ({"desc_act": False, "sym": False}, "has groups that are not in order"),
    ({"desc_act": False, "sym": True}, "has zero points that are not 8"),
])  # fmt: skip
def test_wrong_desc_act_and_sym_are_refused(changes: dict[str, bool], match: str, tmp_path: Path) -> None:
    folder = copy_folder("gptq", tmp_path / "gptq")
    if changes["sym"]:
        zeros = read_folder(folder)
        edit_tensors(folder, symmetric)
        edit_tensors(folder, lambda tensors: tensors.update({f"{DOWN}.qzeros": zeros[f"{DOWN}.qzeros"]}))
    quantized(**changes)(folder)
    with pytest.raises(ModelFormatError, match=match):
        convert_folder(folder, tmp_path / "model.gguf", blocks=True)
    convert_folder(folder, tmp_path / "model.gguf")  # as floats, nothing depends on them


# What is refused, in one line, with nothing left behind


def refused(folder: Path, error: type[EdgeError], match: str, target: Path | None = None) -> None:
    target = target or folder.parent / "out" / "model.gguf"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(error, match=match) as caught:
        convert_folder(folder, target)
    assert "\n" not in str(caught.value)
    assert not list(target.parent.iterdir())


def settings_of(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda said: said.update(changes))


def in_text(folder: Path, **changes: Any) -> None:
    edit_json(folder / "config.json", lambda said: said["text_config"].update(changes))


def zeros(count: int) -> AnyArray:
    return np.zeros(count, np.float32)


def rope(**settings: Any) -> Callable[[Path], None]:
    return settings_of(rope_parameters=settings)


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_tensor(name: str, dtype: str, array: AnyArray) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: (dtype, array)}))


def without_tensor(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def odd_number(folder: Path, name: str, value: float) -> None:
    def edit(tensors: Tensors) -> None:
        dtype, array = tensors[name]
        values = array.copy().reshape(-1)
        values[-1] = {"BF16": int(np.float32(value).view(np.uint32)) >> 16}.get(dtype, value)
        tensors[name] = (dtype, values.reshape(array.shape))

    edit_tensors(folder, edit)


def quantized(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda said: said["quantization_config"].update(changes))


EMBEDDING, NORM, DOWN = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj"
FUSED = "model.layers.0.shared_mlp.input_linear.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
REFUSED: list[tuple[str, Callable[[Path], object], type[EdgeError], str]] = [
    ("llama", removed("config.json"), InputError, "no config.json"),
    ("llama", removed("tokenizer.json"), InputError, "no tokenizer.json"),
    ("qwen2", removed("model.safetensors"), InputError, "no model.safetensors"),
    ("llama", removed("model-00002-of-00003.safetensors"), ModelFormatError, "00002-of-00003.safetensors is missing"),
    ("llama", lambda folder: (folder / "config.json").write_text("{"), ModelFormatError, "no JSON"),
    ("llama", lambda folder: (folder / "config.json").write_text("[" * 99999), ModelFormatError, "brackets|no JSON"),
    ("llama", lambda folder: (folder / "config.json").write_text('{"a": 1, "a": 2}'), ModelFormatError, "twice"),
    ("llama", settings_of(model_type="rwkv"), UnsupportedError, "model_type 'rwkv' is not supported"),
    ("llama", settings_of(num_hidden_layers=3), ModelFormatError, r"layers\.2\..* is missing"),
    ("llama", settings_of(num_hidden_layers=1), ModelFormatError, r"layers\.1\..* is no tensor of a llama model"),
    ("llama", settings_of(hidden_size=None), ModelFormatError, "hidden_size is missing"),
    ("llama", settings_of(num_key_value_heads=3), ModelFormatError, "cannot share 3 KV heads"),
    ("llama", settings_of(head_dim=15), ModelFormatError, "odd number"),
    ("llama", settings_of(rms_norm_eps=float("nan")), ModelFormatError, "rms_norm_eps"),
    ("llama", settings_of(hidden_act="gelu"), UnsupportedError, "hidden_act is 'gelu'"),
    ("llama", settings_of(rope_parameters=5), ModelFormatError, "rope_parameters is 5 instead of an object"),
    ("llama", rope(rope_type="magic"), UnsupportedError, "rope_type 'magic'"),
    ("llama", rope(rope_type="linear"), ModelFormatError, "factor is missing"),
    ("qwen2", rope(rope_type="yarn", factor=4, beta_fast=8), UnsupportedError, "beta"),
    ("qwen2", settings_of(use_sliding_window=True, max_window_layers=1), UnsupportedError, "windows in some layers"),
    ("qwen2", without_tensor("model.layers.1.self_attn.k_proj.bias"), ModelFormatError, "k_proj.bias is missing"),
    ("qwen2", with_tensor("model.norm.bias", "F32", zeros(48)), ModelFormatError, "biases of output_norm"),
    ("mistral", with_tensor(f"{DOWN}.bias", "F32", zeros(32)), ModelFormatError, "everywhere or nowhere"),
    ("qwen2", settings_of(tie_word_embeddings=False), ModelFormatError, "lm_head.weight is missing"),
    ("qwen2", with_tensor("model.new.weight", "F32", zeros(3)), ModelFormatError, "new.* is no tensor"),
    ("qwen2", with_tensor(NORM, "F32", zeros(47)), ModelFormatError, r"\(47,\) instead of \(48,\)"),
    ("qwen2", with_tensor(NORM, "I32", np.zeros(48, np.int32)), UnsupportedError, "of type I32"),
    ("qwen2", lambda folder: odd_number(folder, EMBEDDING, np.nan), ModelFormatError, EMBEDDING),
    ("gpt2", lambda folder: odd_number(folder, "transformer.wpe.weight", np.nan), ModelFormatError, "wpe.*no numbers"),
    ("gemma2", settings_of(attn_logit_softcapping=None), UnsupportedError, "attn_logit_softcapping is null"),
    ("gemma2", settings_of(is_causal=None), UnsupportedError, "is_causal is not true"),
    ("gemma3", lambda folder: in_text(folder, final_logit_softcapping=1.5), UnsupportedError, "final_logit_soft"),
    ("gemma3_text", rope(rope_theta=50.0), UnsupportedError, "only full_attention and sliding_attention"),
    ("gemma3_text", settings_of(rope_scaling={"type": "linear", "factor": 4.0}), UnsupportedError, "not rope_type"),
    ("llama", settings_of(attention_bias=False), ModelFormatError, "attention_bias is false, but there are biases"),
    ("llama", settings_of(mlp_bias=True), ModelFormatError, "mlp_bias is true, but there are no biases"),
    ("llama", settings_of(tie_word_embeddings=True), ModelFormatError, "lm_head.weight is the embedding, but"),
    ("llama", rope(full_attention={"rope_theta": 50.0}), UnsupportedError, "differs from layer to layer"),
    ("mistral", settings_of(layer_types=["full_attention", "sliding_attention"]), UnsupportedError, "layer_types"),
    ("phi3", settings_of(original_max_position_embeddings=None), ModelFormatError, "original_max_.* is missing"),
    ("llama", settings_of(rms_norm_eps=10**400), ModelFormatError, "rms_norm_eps is 1000"),
    ("gemma2", settings_of(query_pre_attn_scalar=100), UnsupportedError, "query_pre_attn_scalar must be 16"),
    ("gemma2", settings_of(layer_types=["full_attention"] * 4), UnsupportedError, "layer_types"),
    ("gemma3", settings_of(text_config=None), ModelFormatError, "text_config is missing"),
    ("phi3", rope(rope_type="longrope", long_factor=[1]), ModelFormatError, "long_factor"),
    ("phi3", settings_of(partial_rotary_factor=0.35, rope_parameters=None), ModelFormatError, "partial_rotary_factor"),
    ("granite", settings_of(logits_scaling=0), ModelFormatError, "logits_scaling is 0"),
    ("granitemoehybrid", settings_of(num_local_experts=None), ModelFormatError, "num_experts_per_tok is 0"),
    ("granitemoehybrid", settings_of(layer_types=["attention", "mamba"]), ModelFormatError, "in_proj.* missing"),
    ("granitemoehybrid", settings_of(layer_types=None), UnsupportedError, "attention in every layer"),
    ("granitemoehybrid", with_tensor(FUSED, "F32", zeros(33)), ModelFormatError, "gate.weight is missing"),
    ("qwen3_moe", settings_of(mlp_only_layers=[0]), UnsupportedError, "mlp_only_layers"),
    ("qwen3_moe", without_tensor("model.layers.1.mlp.experts.2.up_proj.weight"), ModelFormatError, "2.up_.* missing"),
    ("qwen3_5_text", settings_of(linear_num_value_heads=3), ModelFormatError, "3 value heads|3 heads"),
    ("qwen3_5_text", settings_of(layer_types=["linear_attention"]), ModelFormatError, "layer_types must name"),
    ("qwen3_5_text", settings_of(linear_conv_kernel_dim=3), ModelFormatError, "conv1d.weight has shape"),
    ("qwen3_5_text", without_tensor("model.layers.0.linear_attn.A_log"), ModelFormatError, "A_log is missing"),
    ("gpt_oss", settings_of(swiglu_limit=5.0), UnsupportedError, "swiglu_limit is 5.0"),
    ("gpt_oss", settings_of(layer_types=["full_attention"] * 2), UnsupportedError, "each second layer"),
    ("gpt_oss", without_tensor("model.layers.0.mlp.experts.down_proj_scales"), ModelFormatError, "down_proj"),
    ("gemma4_text", settings_of(enable_moe_block=True), ModelFormatError, "num_experts is missing"),
    ("gemma4_moe", settings_of(attention_k_eq_v=False), ModelFormatError, "v_proj.weight is missing"),
    ("gemma4_moe", settings_of(top_k_experts=5), ModelFormatError, "5 of 4 experts"),
    ("gemma4_text", settings_of(num_kv_shared_layers=4), ModelFormatError, "num_kv_shared_layers is 4"),
    ("gemma4_text", settings_of(per_layer_config={"1": {"window": 3}}), UnsupportedError, "has window"),
    ("nemotron_h", settings_of(layers_block_type=["mamba", "moe", "mlp"]), ModelFormatError, "must name mamba"),
    ("ministral3", rope(rope_type="linear"), UnsupportedError, "rope_type 'linear'"),
    ("ministral3", rope(**YARN | {"mscale": 2.0}), UnsupportedError, "mscale is 2.0"),
    ("ministral3", rope(**YARN), ModelFormatError, "llama_4_scaling_beta is missing"),
    ("smollm3", settings_of(no_rope_layers=[1, 0, 1, 0]), UnsupportedError, "no_rope_layers"),
    ("smollm3", settings_of(no_rope_layers=None, no_rope_layer_interval=2), UnsupportedError, "interval is 2"),
    ("awq", quantized(quant_method="hqq"), UnsupportedError, "'hqq' are not supported"),
    ("awq", quantized(version="gemv"), UnsupportedError, "gemv"),
    ("awq", quantized(bits=8), UnsupportedError, "8 bits"),
    ("gptq", quantized(bits=5), UnsupportedError, "5 bits"),
    ("gptq", quantized(group_size=0), ModelFormatError, "group_size is 0"),
    ("gptq", quantized(checkpoint_format="marlin"), UnsupportedError, "marlin"),
    ("awq", without_tensor(f"{DOWN}.scales"), ModelFormatError, "scales is missing"),
    ("gptq", with_tensor(f"{DOWN}.g_idx", "I32", np.full(96, 3, np.int32)), ModelFormatError, "groups that are not"),
    ("gptq", with_tensor(f"{DOWN}.scales", "F16", np.full((3, 64), 6e4, np.float16)), ModelFormatError, "infinite"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(
    name: str, change: Callable[[Path], object], error: type[EdgeError], match: str, tmp_path: Path
) -> None:
    folder = copy_folder(name, tmp_path / name)
    change(folder)
    refused(folder, error, match)


def test_missing_and_pickled_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    refused(tmp_path / "nothing", InputError, "no such folder", tmp_path / "out" / "x.gguf")
    refused(tmp_path / "file", InputError, "not a folder", tmp_path / "out" / "x.gguf")
    folder = copy_folder("qwen2", tmp_path / "qwen2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, UnsupportedError, "pickles")


def test_index_names_files_of_its_own_folder_only(tmp_path: Path) -> None:
    folder = copy_folder("llama", tmp_path / "llama")
    index = folder / "model.safetensors.index.json"
    for name in ("../secret.safetensors", "/etc/passwd", "config.json", ".."):
        edit_json(index, lambda said, name=name: said["weight_map"].update({"lm_head.weight": name}))
        refused(folder, ModelFormatError, "is not the name of a safetensors file")
    edit_json(index, lambda said: said["weight_map"].update({"lm_head.weight": "model-00001-of-00003.safetensors"}))
    refused(folder, ModelFormatError, "'lm_head.weight' is missing")
    edit_json(index, lambda said: said.pop("weight_map"))
    refused(folder, ModelFormatError, "no weight_map")


ODD: list[Any] = [None, -1, 3, 2**70, 10**400, 0.5, 1e-320, float("inf"), "x", [1, "x"], {"rope_type": 1}]


def test_settings_of_any_kind_are_read_or_refused(tmp_path: Path) -> None:
    """Every value of config.json in turn becomes something else, in make test one in three of ODD."""
    step = 3 if examples(1) == 1 else 1
    folder = copy_folder("llama", tmp_path / "llama")
    path = folder / "config.json"
    said = json.loads(path.read_text())
    for number, key in enumerate(said):
        for value in ODD[number % step :: step]:
            path.write_text(json.dumps(said | {key: value}))
            assert "\n" not in complaint(lambda: convert_folder(folder, tmp_path / "model.gguf"))
            assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


# Memory


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """At most half a tensor beside the largest one and the buffer that it is written from."""
    code = """
import json, sys
from pathlib import Path
from edge.formats.blocks import dequantize
from edge.converters.huggingface.reader import convert_folder
convert_folder(Path(sys.argv[1]), Path(sys.argv[2]), type=sys.argv[3] or None)
print(json.dumps(None))
"""
    shape = Small(hidden=1024, heads=4, kv_heads=2, ffn=8 << 10)
    model = open_model(write_small(tmp_path / "model.gguf", shape))
    write_folder(model.file, model.spec, tmp_path / "large")
    biggest = shape.hidden * shape.ffn * 4  # 32 MiB in float32
    small = run_child(code, FOLDERS / "llama", tmp_path / "small.gguf", "")
    for kind in ("", "F16"):
        child = run_child(code, tmp_path / "large", tmp_path / "large.gguf", kind)
        assert child.status == 0, child.errors
        buffer = biggest // 2 if kind == "F16" else biggest
        assert child.peak - small.peak < 1.5 * biggest + buffer

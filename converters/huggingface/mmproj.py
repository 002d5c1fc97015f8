"""The encoder of pictures of a Hugging Face folder as an mmproj file, with llama.cpp's names, beside the text model's.

A family is a line of `_FAMILIES`: its fields, and the tensors that differ from the usual ones. The written file is read
back as an encoder, so that each tensor is one that edge knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np

from edge.converters.gguf.plain import fields_as, rounded
from edge.converters.huggingface.checkpoint import CheckpointTensor, read_checkpoint
from edge.converters.huggingface.config import Config, read_config
from edge.converters.huggingface.conformer import conformer_data, conformer_fields, has_conformer, plan_conformer
from edge.converters.huggingface.ears import hears, plan_ears, read_back, type_of_ears, write_ears
from edge.converters.huggingface.layout import to_float32
from edge.converters.quantizers.rtn import quantize
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import FILE_TYPES, block_size
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.formats.json_file import read_object
from edge.model.towers import VISION, read_ears, read_tower, senses_of
from edge.model.towers.mmproj import CLIP_MEAN, CLIP_STD
from edge.records import dataclass
from edge.types import AnyArray, Progress

_ROOT = re.compile(r"(?:model\.)?(?:vision_tower\.|visual\.|vision_model\.)(?:vision_model\.)?(?:encoder\.)?")
_BESIDE = re.compile(r"(?:model\.)?(?:multi_modal_projector|connector|embed_vision)\.")
_LAYER = re.compile(r"(?:layers|blocks)\.(\d+)\.(.+)")
_KINDS = re.compile(r"(.+?)(?:\.linear)?\.(weight|bias|(?:in|out)put_(?:min|max))")
_IN_LAYERS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "attn.qkv": "attn_qkv",
    "self_attn.out_proj": "attn_out", "self_attn.o_proj": "attn_out", "attn.proj": "attn_out",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "layer_norm1": "ln1", "layer_norm2": "ln2", "norm1": "ln1", "norm2": "ln2",
    "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {
    "embeddings.patch_embedding.weight": "v.patch_embd.weight", "embeddings.patch_embedding.bias": "v.patch_embd.bias",
    "embeddings.position_embedding.weight": "v.position_embd.weight",
    "post_layernorm.weight": "v.post_ln.weight", "post_layernorm.bias": "v.post_ln.bias",
    "modality_projection.proj.weight": "mm.model.fc.weight",
    "mm_input_projection_weight": "mm.input_projection.weight", "mm_soft_emb_norm.weight": "mm.soft_emb_norm.weight",
    "patch_embed.proj.weight": "v.patch_embd.weight", "patch_embed.proj.bias": "v.patch_embd.bias",
    "pos_embed.weight": "v.position_embd.weight",
    "merger.norm.weight": "v.post_ln.weight", "merger.norm.bias": "v.post_ln.bias",
    "merger.linear_fc1.weight": "mm.0.weight", "merger.linear_fc1.bias": "mm.0.bias",
    "merger.linear_fc2.weight": "mm.2.weight", "merger.linear_fc2.bias": "mm.2.bias",
    "merger.ln_q.weight": "v.post_ln.weight",
    "merger.mlp.0.weight": "mm.0.weight", "merger.mlp.0.bias": "mm.0.bias",
    "merger.mlp.2.weight": "mm.2.weight", "merger.mlp.2.bias": "mm.2.bias",
    "layer_norm.weight": "mm.input_norm.weight", "layer_norm.bias": "mm.input_norm.bias",
    "linear_1.weight": "mm.1.weight", "linear_1.bias": "mm.1.bias",
    "linear_2.weight": "mm.2.weight", "linear_2.bias": "mm.2.bias",
    "patch_embedder.input_proj.weight": "v.patch_embd.weight",
    "patch_embedder.position_embedding_table": "v.position_embd.weight",
    "std_bias": "v.std_bias", "std_scale": "v.std_scale", "embedding_projection.weight": "mm.input_projection.weight",
}  # fmt: skip
_EXACT = ("v.patch_embd", "v.position_embd")  # always in float32
_HALVES = ("mm.input_projection.weight",)  # never below float16
_ODD = "F16"  # for rows that are not whole blocks

Made = Iterator[tuple[str, AnyArray]]


@dataclass(frozen=True)
class _Family:
    """kind: of the projector, in mmproj files. defaults: of vision_config. fields: those of its own. fixed: values that
    files have no field for, of vision_config and of the preprocessing."""

    kind: str
    defaults: Mapping[str, Any]
    fields: Callable[[Config, Config, Mapping[str, Any]], dict[str, Any]]
    fixed: Mapping[str, Any]


def _of_smolvlm(config: Config, _vision: Config, processor: Mapping[str, Any]) -> dict[str, Any]:
    found = {"projector.scale_factor": config.count("scale_factor", "heads", default=2)}
    return found | _side(processor, "longest_edge", "preproc_image_size")


def _per_side(vision: Config) -> int:
    """Patches of a picture's side."""
    return vision.count("image_size", "context", default=224) // vision.count("patch_size", "ffn", default=16)


def _of_gemma3(config: Config, vision: Config, _processor: Mapping[str, Any]) -> dict[str, Any]:
    rows = isqrt(config.count("mm_tokens_per_image", "context", default=256))
    return {"projector.scale_factor": _per_side(vision) // rows}


def _of_qwen(_config: Config, vision: Config, processor: Mapping[str, Any]) -> dict[str, Any]:
    deep = vision.get("deepstack_visual_indexes") or []
    return {
        "spatial_merge_size": vision.count("spatial_merge_size", "heads", default=2),
        "is_deepstack_layers": np.array([layer in deep for layer in range(vision.count("depth", "layers"))]),
        **_side(processor, "shortest_edge", "image_min_pixels"), **_side(processor, "longest_edge", "image_max_pixels"),
    }  # fmt: skip


def _of_lfm2(config: Config, vision: Config, _processor: Mapping[str, Any]) -> dict[str, Any]:
    side = isqrt(vision.count("num_patches", "context")) * vision.count("patch_size", "ffn")
    return {"projector.scale_factor": config.count("downsample_factor", "heads", default=2), "image_size": side}


def _of_qwen25(_config: Config, vision: Config, processor: Mapping[str, Any]) -> dict[str, Any]:
    whole = vision.get("fullatt_block_indexes", [7])
    period = whole[0] + 1 if isinstance(whole, list) and whole else 0
    if whole != list(range(period - 1, vision.count("depth", "layers"), max(1, period))):
        raise UnsupportedError(f"{vision.path}: fullatt_block_indexes {whole} are not each {period}th layer")
    return {
        "spatial_merge_size": vision.count("spatial_merge_size", "heads", default=2), "n_wa_pattern": period,
        **_side(processor, "shortest_edge", "image_min_pixels"), **_side(processor, "longest_edge", "image_max_pixels"),
    }  # fmt: skip


def _side(processor: Mapping[str, Any], key: str, name: str) -> dict[str, Any]:
    size = processor.get("size")
    value = size.get(key) if isinstance(size, dict) else None
    if value is not None and (not isinstance(value, int) or not 0 < value < 1 << 31):
        raise ModelFormatError(f"{_PROCESSOR}: size has {key} {value!r:.40}: it must be a number of pixels")
    return {} if value is None else {name: value}


_PROCESSOR = "preprocessor_config.json"
_BILINEAR, _BICUBIC, _LANCZOS = 2, 3, 1  # Pillow's numbers
_FIXED = {
    "num_channels": 3, "in_channels": 3, "in_chans": 3, "do_rescale": True, "do_resize": True, "do_normalize": True,
    "temporal_patch_size": 2,
}  # fmt: skip
_TANH = {**_FIXED, "hidden_act": "gelu_pytorch_tanh"}
_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6,
}  # fmt: skip
_SMOLVLM = _Family(
    "idefics3", _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}, _of_smolvlm,
    _TANH | {"resample": _LANCZOS, "do_image_splitting": True},
)  # fmt: skip
_QWEN = _Family(
    "qwen3vl_merger", {"patch_size": 16, "num_position_embeddings": 2304}, _of_qwen, _TANH | {"resample": _BICUBIC}
)
_FAMILIES = {  # by model_type
    "smolvlm": _SMOLVLM, "idefics3": _SMOLVLM,
    "gemma3": _Family("gemma3", _SIGLIP, _of_gemma3, _TANH | {"resample": _BILINEAR, "do_pan_and_scan": False}),
    "lfm2_vl": _Family(
        "lfm2", _SIGLIP | {"num_patches": 256}, _of_lfm2,
        _TANH | {
            "resample": _BILINEAR, "projector_hidden_act": "gelu", "do_image_splitting": True, "use_thumbnail": True,
            "tile_size": 512, "min_tiles": 2, "max_tiles": 10, "min_image_tokens": 64, "max_image_tokens": 256,
            "max_pixels_tolerance": 2.0,
        },
    ),
    "qwen2_5_vl": _Family(
        "qwen2.5vl_merger", {"patch_size": 14, "depth": 32, "image_size": 560}, _of_qwen25,
        _FIXED | {"hidden_act": "silu", "window_size": 112, "resample": _BICUBIC},
    ),
    "qwen3_vl": _QWEN, "qwen3_vl_moe": _QWEN, "qwen3_5": _QWEN, "qwen3_5_moe": _QWEN,
    "gemma4": _Family(
        "gemma4v", _SIGLIP | {"num_hidden_layers": 16}, lambda *_: {},
        _FIXED | {
            "hidden_activation": "gelu_pytorch_tanh", "pooling_kernel_size": 3, "attention_bias": False,
            "resample": _BICUBIC, "do_normalize": False,
        },
    ),
}  # fmt: skip
_THETA = {"gemma4v": 100.0}  # of rotary positions
_RESCALED = 1 / 255


def sees(folder: Path) -> bool:
    """Whether a folder's model has an encoder of pictures or sounds that edge converts. Raises the errors of its
    readers."""
    config = read_config(folder)
    if hears(config):
        return True
    known = config.get("model_type") in _FAMILIES and config.part("vision_config") is not None
    return known and any(_ROOT.match(name) for name in read_checkpoint(folder))


def mmproj_path(target: Path) -> Path:
    """Where the encoder of a model in GGUF lies."""
    return target.with_name(f"mmproj-{target.name}")


def plan_mmproj(folder: Path, kind: str = _ODD) -> list[Planned]:
    """The tensors of the file, whose matrices are of a block type. Reads headers only. Raises ModelFormatError,
    UnsupportedError for settings that edge does not follow."""
    config = read_config(folder)
    if hears(config):
        return plan_ears(folder, kind)
    family, deep = _family(config), _deep(config)
    _check(folder, config, family)
    seen = [
        Planned(name, shape, _type(name, shape, kind))
        for tensor in read_checkpoint(folder).values() for name, shape in _named(family, deep, tensor)
    ]  # fmt: skip
    return seen + (plan_conformer(folder, config, kind) if has_conformer(config) else [])


def write_mmproj(folder: Path, target: Path, kind: str = _ODD, progress: Progress | None = None) -> list[Planned]:
    """Write the encoder atomically, and read it back. Raises InputError, ModelFormatError, UnsupportedError."""
    config = read_config(folder)
    if hears(config):
        return write_ears(folder, target, kind, progress)
    family, deep, planned = _family(config), _deep(config), plan_mmproj(folder, kind)
    types, hearing = {each.name: each.type for each in planned}, has_conformer(config)

    def data() -> Iterator[AnyArray]:
        for tensor in read_checkpoint(folder).values():
            for name, values in _values(family, deep, tensor):
                if not np.isfinite(values).all() and not name.endswith(("_min", "_max")):
                    raise ModelFormatError(f"{tensor.path}: {tensor.name} has values that are no numbers, or infinite")
                rows = values.reshape(-1, values.shape[-1]).astype(np.float32)
                yield quantize(rows, types[name]) if types[name] != "F32" else rows
        for name, rows in conformer_data(folder) if hearing else ():
            yield quantize(rows, types[name]) if types[name] != "F32" else rows

    fields = _fields(folder, config, family, kind)
    if hearing:
        fields |= {"clip.vision.projector_type": fields.pop("clip.projector_type")} | conformer_fields(config)
    write_gguf(target, fields, planned, data(), progress)
    read_back(target, read_tower, config)
    if hearing:
        read_back(target, read_ears, config)
    return planned


def plan_rounded(file: GGUFFile, kind: str) -> list[Planned]:
    """The tensors of an mmproj file whose matrices are of a block type; those that hear stay in a file that sees."""
    sees = VISION in senses_of(file)
    named = {
        each.name: _type(each.name, each.shape, kind) if sees else type_of_ears(each.name, each.shape, kind)
        for each in file.tensors.values() if not sees or not each.name.startswith("a.")
    }  # fmt: skip
    if kind not in named.values():
        raise UnsupportedError(f"{file.path}: no matrix has rows of whole blocks of {kind}: choose --type f16")
    kept = (each.type if named.get(each.name) != kind else kind for each in file.tensors.values())
    return [Planned(each.name, each.shape, of) for each, of in zip(file.tensors.values(), kept, strict=True)]


def round_mmproj(file: GGUFFile, target: Path, kind: str, progress: Progress | None = None) -> None:
    """Write an encoder in another type, atomically. Raises as `write_mmproj`."""
    (read_tower if VISION in senses_of(file) else read_ears)(file)
    planned = plan_rounded(file, kind)
    data = (rounded(file, file.tensors[each.name], each.type) for each in planned)
    write_gguf(target, fields_as(file, kind), planned, data, progress)


def _family(config: Config) -> _Family:
    return _FAMILIES[str(config.get("model_type"))]


def _vision(config: Config) -> Config:
    part = config.part("vision_config")
    return Config(config.path, {**_family(config).defaults, **(part.values if part else {})})


def _deep(config: Config) -> list[int]:
    """The layers behind which DeepStack's mergers stand."""
    found = _vision(config).get("deepstack_visual_indexes") or []
    if not isinstance(found, list) or not all(isinstance(each, int) for each in found):
        raise ModelFormatError(f"{config.path}: deepstack_visual_indexes must be numbers of layers")
    return found


def _check(folder: Path, config: Config, family: _Family) -> None:
    """Refuse settings by which transformers would see something else."""
    vision, said = _vision(config), Config(folder, _processor(folder))
    heads = vision.get("num_attention_heads", vision.get("num_heads"))
    for each in (vision, said, config):
        for key, value in family.fixed.items():
            each.must_be(key, value)
    vision.must_be("num_key_value_heads", heads)
    vision.must_be("head_dim", vision.get("hidden_size", 0) // (heads or 1))
    vision.must_be("out_hidden_size", (config.part("text_config") or config).get("hidden_size"))
    said.must_be("patch_size", vision.get("patch_size"))
    said.must_be("merge_size", vision.get("spatial_merge_size", 2))
    if rope := vision.part("rope_parameters"):
        rope.must_be("rope_theta", _THETA.get(family.kind, 10000.0))
        rope.must_be("rope_type", "axial", "default")
    if not abs(said.get("rescale_factor", _RESCALED) - _RESCALED) < 1e-9:
        raise UnsupportedError(f"{folder}: rescale_factor is {said.get('rescale_factor')}, which is not supported")
    for key, edges in (("max_image_size", ("longest_edge",)), ("size", ("height", "width"))):
        if (size := said.part(key)) and family.kind in ("idefics3", "gemma3"):  # of a tile
            for edge in edges:
                size.must_be(edge, vision.get("image_size"))


def _fields(folder: Path, config: Config, family: _Family, kind: str) -> dict[str, Field]:
    vision, text, processor = _vision(config), config.part("text_config") or config, _processor(folder)
    layers, heads = ("num_hidden_layers", "depth"), ("num_attention_heads", "num_heads")
    side = vision.get("image_size") or isqrt(vision.get("num_position_embeddings", 0)) * vision.get("patch_size")
    usual = (CLIP_MEAN, CLIP_STD) if family.kind == "qwen2.5vl_merger" else ((0.5,) * 3, (0.5,) * 3)
    numbers = {
        "projection_dim": text.count("hidden_size", "hidden"),
        "embedding_length": vision.count("hidden_size", "hidden"),
        "feed_forward_length": vision.count("intermediate_size", "ffn"), "image_size": side,
        "block_count": vision.count(layers[vision.get("depth") is not None], "layers"),
        "attention.head_count": vision.count(heads[vision.get("num_heads") is not None], "heads"),
        "patch_size": vision.count("patch_size", "ffn"),
    } | family.fields(config, vision, processor)  # fmt: skip
    fields: dict[str, Field] = {
        "general.architecture": "clip", "general.type": "mmproj", "general.name": folder.resolve().name,
        "general.file_type": np.uint32(FILE_TYPES[kind]), "general.quantization_version": np.uint32(2),
        "clip.has_vision_encoder": True, "clip.projector_type": family.kind,
    }  # fmt: skip
    fields["clip.use_silu" if family.kind == "qwen2.5vl_merger" else "clip.use_gelu"] = True
    for name, value in numbers.items():
        fields[f"clip.vision.{name}"] = value if isinstance(value, np.ndarray) else np.uint32(value)
    epsilon = vision.get("layer_norm_eps", vision.get("rms_norm_eps", 1e-6))
    fields["clip.vision.attention.layer_norm_epsilon"] = np.float32(epsilon)
    for key, default in zip(("image_mean", "image_std"), usual, strict=True):
        stated = processor.get(key, default)
        if not isinstance(stated, list | tuple) or not all(isinstance(each, int | float) for each in stated):
            raise ModelFormatError(f"{folder / _PROCESSOR}: {key} is {stated!r:.40}: it must be 3 numbers")
        fields[f"clip.vision.{key}"] = np.array(stated, np.float32)
    return fields


def _processor(folder: Path) -> Mapping[str, Any]:
    """The settings of the preprocessing, in a file of its own or in the processor's."""
    if (path := folder / _PROCESSOR).is_file():
        return read_object(path)
    if (path := folder / "processor_config.json").is_file():
        found = read_object(path).get("image_processor")
        return found if isinstance(found, dict) else {}
    return {}


def _type(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1 or name.startswith(_EXACT):
        return "F32"
    return _ODD if name in _HALVES or shape[0] % block_size(kind) else kind


def _named(family: _Family, deep: list[int], tensor: CheckpointTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes, innermost dimension first, of a tensor of the checkpoint; none for the text model's."""
    name = _name(tensor.name, deep)
    if name is None:
        return
    shape = tensor.shape or (1,)
    if name == "v.patch_embd.weight" and len(shape) == 5:  # of two pictures that follow each other
        plane = (shape[0], shape[1], *shape[3:])[::-1]
        yield from ((f"{name}{suffix}", plane) for suffix in ("", ".1"))
        return
    if family.kind == "qwen2.5vl_merger" and ".attn_qkv." in name:  # which llama.cpp has apart there
        third = (*shape[:0:-1], shape[0] // 3)
        yield from ((name.replace("qkv", part), third) for part in "qkv")
        return
    if name == "v.patch_embd.weight" and len(shape) == 2:
        side = isqrt(shape[1] // 3)
        shape = (shape[0], 3, side, side)
    yield name, shape[::-1]


def _values(family: _Family, deep: list[int], tensor: CheckpointTensor) -> Made:
    found = list(_named(family, deep, tensor))
    if not found:
        return
    values = to_float32(tensor.read(), tensor.dtype)
    (name, shape), *more = found
    if more:
        parts = np.split(values, 3) if ".attn_" in name else (values[:, :, 0], values[:, :, 1])
        yield from zip((each for each, _ in found), parts, strict=True)
    elif name == "v.patch_embd.weight" and values.ndim == 2:  # colours are the innermost there
        yield name, values.reshape(len(values), shape[0], shape[1], 3).transpose(0, 3, 1, 2)
    else:
        yield name, values.reshape(shape[::-1]) + np.float32(name == "mm.soft_emb_norm.weight")


def _name(name: str, deep: list[int]) -> str | None:
    """The name in an mmproj file; None for a tensor of the text model, or one that no encoder reads."""
    beside, root = _BESIDE.match(name), _ROOT.match(name)
    if not (found := beside or root):
        return None
    rest = name[found.end() :]
    if rest.startswith("head."):  # of SigLIP, which pools a picture to one vector
        return None
    if (layer := _LAYER.fullmatch(rest)) and (parts := _KINDS.fullmatch(layer[2])):
        return f"v.blk.{layer[1]}.{_IN_LAYERS.get(parts[1], parts[1])}.{parts[2]}"
    if rest.startswith("deepstack_merger_list."):
        _, number, part, kind = rest.split(".")
        return f"v.deepstack.{deep[int(number)]}.{part.replace('linear_', '')}.{kind}"
    return _OUTSIDE.get(rest, f"v.{rest}")

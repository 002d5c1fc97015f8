"""Convert folders of EAGLE-3 heads (SpecForge's, AngelSlim's, NVIDIA's, and Speculators') into llama.cpp's GGUF files.

A folder has neither tokens nor, mostly, the numbers of the layers whose states the head reads, so its model is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge.converters.gguf.plain import write_plain
from edge.converters.huggingface.architectures import is_head
from edge.converters.huggingface.architectures.common import INTERLEAVED, LLAMA_NAMES, Architecture
from edge.converters.huggingface.architectures.llama import llama_rope
from edge.converters.huggingface.architectures.rope import rope_tensors
from edge.converters.huggingface.checkpoint import read_checkpoint
from edge.converters.huggingface.config import Config, read_config
from edge.converters.huggingface.layout import is_finite, to_gguf, to_kind
from edge.converters.huggingface.reader import read_header
from edge.devices.output import new_file, work_folder
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import FLOATS
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.formats.safetensors import Stored
from edge.model.architectures.eagle3 import LAYERS
from edge.model.drafters.eagle import EMBEDDING, FEATURE_NORM, TOKENS, check_eagle, read_eagle, tokens_of
from edge.model.model import Model
from edge.model.structure.mtp import EAGLE
from edge.types import AnyArray
from edge.values import brief

_LAYER = re.compile(r"^(?:model\.)?(?:midlayer|layers\.0)\.")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_HEAD = Architecture(name=EAGLE, layouts=INTERLEAVED, rope=llama_rope)
_NAMES = {f"{theirs.format(0)}.weight": f"{ours.format(0)}.weight" for ours, theirs in LLAMA_NAMES.items()} | {
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight", "fc.weight": "fc.weight",
    "input_norm.weight": FEATURE_NORM, TOKENS: TOKENS,
}  # fmt: skip
_UNUSED = ("t2d", "layers.0.self_attn.rotary_emb.inv_freq")


def is_eagle_folder(folder: Path) -> bool:
    """Whether a folder's config.json describes an EAGLE-3 head."""
    return (folder / "config.json").is_file() and is_head(read_config(folder))


def convert_eagle(folder: Path, base: Model, target: Path, type: str | None = None, name: str | None = None) -> None:
    """Write the head as GGUF, atomically, and check it against its model in GGUF. type: of its matrices; None: their
    own. name: the head's; None: the folder's.

    Raises InputError if it belongs to another model, ModelFormatError for damaged files, UnsupportedError for heads
    that GGUF cannot express.
    """
    whole = read_config(folder)
    config = _settings(whole)
    fields, sizes, rope = read_header(_HEAD, config)
    own: dict[str, Field] = {
        LAYERS[0]: np.array(_layers(whole, base.spec.layers), np.int32),
        "target_hidden_size": np.uint32(config.count("target_hidden_size", "hidden", base.spec.hidden)),
        "norm_before_residual": config.get("norm_before_residual", False) is True,
        "norm_before_fc": config.get("norm_before_fc", False) is True,
    }
    header: dict[str, Field] = {
        "general.architecture": EAGLE, "general.type": "model", "general.name": name or folder.resolve().name,
        "general.quantization_version": np.uint32(2),
        **{f"{EAGLE}.{key}": value for key, value in (fields | own).items()},
        **{key: base.file.field_bytes(key) for key in base.file.metadata if key.startswith("tokenizer.")},
    }  # fmt: skip
    found = _named(folder)
    arrays = rope_tensors(rope, sizes) if rope else {}
    planned = [Planned(name, (values.size,), "F32") for name, values in arrays.items()]
    planned += [Planned(name, each.shape[::-1], _kind(name, each)) for name, each in found.items()]

    def data() -> Iterator[AnyArray]:
        yield from arrays.values()
        heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}
        for name, each in found.items():
            if name == TOKENS:  # how far a row's token is from the row's number
                yield each.read().astype(np.int64) + np.arange(each.shape[0])
                continue
            array, stem = each.read(), name.split(".")[-2]
            if not is_finite(array, each.dtype):
                raise ModelFormatError(f"{each.path}: {each.name} has values that are no numbers, or infinite")
            values = to_kind(array, each.dtype, _kind(name, each), f"{each.path}: {each.name}")
            yield to_gguf(values, _HEAD.layout(name), heads.get(stem, 1))

    with new_file(target) as temporary, work_folder(target) as work:
        plain = temporary if type is None else work / "head.gguf"
        write_gguf(plain, header, planned, data())
        file = read_gguf(plain)
        check_eagle(file, read_eagle(file), base.spec)
        tokens_of(file, base.spec.vocab)
        if type is not None:
            write_plain(file, temporary, type)
            read_eagle(read_gguf(temporary))


def _settings(config: Config) -> Config:
    """The settings of the decoder layer and of the head, side by side. Raises UnsupportedError."""
    layer, eagle = config.part("transformer_layer_config"), config.part("eagle_config")
    parts = [part.values for part in (eagle, layer) if part is not None]
    merged = Config(config.path, {key: value for part in (*parts, config.values) for key, value in part.items()})
    for key in ("fc_norm", "norm_output", "use_aux_norm", "parallel_drafting"):
        merged.must_be(key, False)
    return merged


def _layers(config: Config, layers: int) -> list[int]:
    """The layers whose inputs are features: those that config.json names, or the usual ones. Speculators' and vLLM's
    numbers are those of inputs; those within `eagle_config` are of outputs, as SGLang reads them."""
    eagle = config.part("eagle_config")
    named, more = (config.get(_LAYER_IDS), 0) if config.get(_LAYER_IDS) or eagle is None else (eagle.get(_LAYER_IDS), 1)
    if named is None:
        return [2, layers // 2, layers - 3]
    if not isinstance(named, list) or not all(isinstance(each, int) and 0 <= each < layers for each in named):
        raise ModelFormatError(
            f"{config.path}: {_LAYER_IDS} is {brief(named)}: numbers of {layers} layers are expected"
        )
    return [each + more for each in named]


def _named(folder: Path) -> dict[str, Stored]:
    """The tensors by GGUF's names, without an embedding of zeros, in whose place is the model's."""
    found = {}
    for name, tensor in read_checkpoint(folder).items():
        short = _LAYER.sub("layers.0.", name).removeprefix("model.")
        if short in _UNUSED:
            continue
        if short not in _NAMES:
            raise UnsupportedError(f"{tensor.path}: {name} is no tensor of an EAGLE-3 head that edge knows")
        if tensor.dtype not in ((*FLOATS, "I64", "I32") if short == TOKENS else FLOATS):
            raise UnsupportedError(f"{tensor.path}: {name} is of type {tensor.dtype}: not supported here")
        found[_NAMES[short]] = tensor
    if missing := sorted(set(_NAMES.values()) - {*found, TOKENS, FEATURE_NORM, EMBEDDING}):
        raise ModelFormatError(f"{folder}: an EAGLE-3 head has a tensor {missing[0]}, which is missing")
    return found


def _kind(name: str, tensor: Stored) -> str:
    return "I64" if name == TOKENS else "F32" if len(tensor.shape) == 1 else tensor.dtype

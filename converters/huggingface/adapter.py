"""Convert PEFT's LoRA adapters (adapter_config.json, adapter_model.safetensors) into llama.cpp's GGUF adapters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as brief

import numpy as np

from edge.converters.huggingface.architectures import of_gguf
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.layout import is_finite, to_gguf
from edge.devices.output import new_file
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import FLOATS
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.formats.json_file import read_object, shown
from edge.formats.safetensors import Stored, read_header
from edge.model.lora import MAX_RANK, open_lora
from edge.model.lora_file import LoraFile
from edge.model.model import Model
from edge.types import AnyArray

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROOTS = r"(?:base_model\.)?(?:model\.)*(?:transformer\.|language_model\.(?:model\.)?)?"
_NAME = re.compile(rf"{_ROOTS}((?:layers|h)\.\d+\..+)\.lora_([AB])(?:\.default)?\.weight")
# The values of settings under which an adapter adds B A and nothing else, and to matrices only.
_PLAIN = {
    "use_dora": (False,), "modules_to_save": ([],), "rank_pattern": ({},), "alpha_pattern": ({},), "bias": ("none",),
    "lora_bias": (False,), "layer_replication": (), "alora_invocation_tokens": ([],), "trainable_token_indices": (),
}  # fmt: skip


def is_adapter_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def convert_adapter(folder: Path, base: Model, target: Path) -> None:
    """Write the adapter as GGUF, atomically, and check it against its base model in GGUF.

    Raises InputError if it belongs to another model, ModelFormatError for damaged files, UnsupportedError for adapters
    that are more than pairs of matrices.
    """
    config = Config(folder / CONFIG, read_object(folder / CONFIG))
    config.must_be("peft_type", "LORA")
    for key, allowed in _PLAIN.items():
        config.must_be(key, *allowed)
    if not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} has no {WEIGHTS}")
    rank, alpha = config.get("r"), config.positive("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= MAX_RANK:
        raise ModelFormatError(f"{config.path}: r is {brief(rank)}: it must be from 1 to {MAX_RANK}")
    if config.get("use_rslora") is True:  # α / √r instead of α / r
        alpha *= math.sqrt(rank)
    parts = list(_parts(folder / WEIGHTS, base))
    fields: dict[str, Field] = {
        "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": np.float32(alpha),
        "general.architecture": base.spec.architecture, "general.name": folder.resolve().name,
    }  # fmt: skip
    planned = [Planned(name, stored.shape[::-1], stored.dtype) for name, stored in parts]
    with new_file(target) as temporary:
        write_gguf(temporary, fields, planned, (_data(name, stored, base) for name, stored in parts))
        open_lora([LoraFile(temporary)], base.file, base.spec)


def _parts(path: Path, base: Model) -> Iterator[tuple[str, Stored]]:
    """GGUF names and tensors."""
    ours = {theirs: name for name, theirs in of_gguf(base.spec.architecture).names.items()}
    for name, stored in read_header(path).items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise UnsupportedError(f"{path}: {shown(name)} is no part of a LoRA pair in a layer")
        module, part = found[1], found[2]
        _, layer, _ = module.split(".", 2)
        stem = ours.get(module.replace(f".{layer}.", ".{}.", 1))
        if stem is None:
            raise UnsupportedError(f"{path}: {shown(name)} changes no matrix of a {base.spec.architecture} model")
        if len(stored.shape) != 2 or stored.dtype not in FLOATS:
            raise UnsupportedError(f"{path}: {shown(name)} is {stored.dtype} of shape {stored.shape}: not supported")
        yield f"{stem.format(layer)}.weight.lora_{part.lower()}", stored


def _data(name: str, stored: Stored, base: Model) -> AnyArray:
    """The tensor, with B's rows in the order of the GGUF matrix."""
    array, stem = stored.read(), name.split(".")[2]
    if not is_finite(array, stored.dtype):
        raise ModelFormatError(f"{stored.path}: {stored.name} has values that are no numbers, or infinite")
    layouts = of_gguf(base.spec.architecture).layouts
    if name.endswith("_b") and layouts.get(stem) == "interleaved":
        heads = base.spec.heads if stem == "attn_q" else base.spec.kv_heads
        if len(array) % (2 * heads):
            raise InputError(f"{stored.path}: {stored.name} has {len(array)} rows: it belongs to another model")
        array = to_gguf(array, "interleaved", heads)
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)

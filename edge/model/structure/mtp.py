"""Layers for multi-token prediction (MTP, GGUF's `nextn`), which follow a model's own: DeepSeek-V3, arXiv:2412.19437.

From the hidden state of a token and the token after it, such a layer predicts one more token, as a draft: the model's
own next token does not depend on it. `block_count` includes these layers. Like llama.cpp, engines run the model with
the layers before them; some also draft with the first of them (`Backend.runs_mtp`). Files made from other files keep
them where possible.

`mtp_file` makes the first of them a model of one layer, with `NextToken` before its attention. It shares embedding and
head with the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge.errors import ModelFormatError
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_fields import Header

NEXTN_LAYERS = "nextn_predict_layers"
ASSISTANT = "gemma4-assistant"  # the architecture of files that have such layers alone (`assistant.py`)
EAGLE = "eagle3"  # of those that have an EAGLE-3 head (`eagle.py`)
# Their MTP layers read the state after the last norm, also in chains of drafts (llama.cpp, pull request 24025; vLLM,
# `qwen3_next_mtp.py`). Those of other architectures read the state before it.
MTP_ARCHITECTURES = ("qwen35", "qwen35moe")
SHARED = ("token_embd", "output")  # tensors that an MTP layer shares with the model
_OWN = {"nextn.embed_tokens.weight", "nextn.shared_head_head.weight"}


def mtp_layers(file: GGUFFile) -> range:
    """The indexes of the MTP layers. Raises ModelFormatError if there are no other layers."""
    header = Header(file, str(file.metadata.get("general.architecture")))
    if not header.value(NEXTN_LAYERS):
        return range(0)
    layers, count = header.count("block_count", "layers"), header.count(NEXTN_LAYERS, "layers")
    if count >= layers:
        raise ModelFormatError(f"{file.path}: {header.architecture}.{NEXTN_LAYERS} is {count} of {layers} layers")
    return range(layers - count, layers)


def without_mtp(file: GGUFFile) -> GGUFFile:
    """The header of the same model without its MTP layers. Raises ModelFormatError."""
    if not (layers := mtp_layers(file)):
        return file
    architecture = file.metadata["general.architecture"]
    gone = tuple(f"blk.{layer}." for layer in layers)
    fields = {f"{architecture}.block_count": layers.start, f"{architecture}.{NEXTN_LAYERS}": 0}
    tensors = {name: info for name, info in file.tensors.items() if not name.startswith(gone)}
    return replace(file, metadata=file.metadata | fields, tensors=tensors)


def mtp_tensors(file: GGUFFile) -> Mapping[str, TensorInfo]:
    """The tensors of the MTP layers, by name. Raises ModelFormatError."""
    rest = without_mtp(file).tensors
    return {name: info for name, info in file.tensors.items() if name not in rest}


def mtp_file(file: GGUFFile) -> GGUFFile | None:
    """The header of the first MTP layer as a model of its own; None if there is none that edge can run. Layers with an
    embedding or head of their own are not supported. Raises ModelFormatError."""
    architecture, layers = str(file.metadata.get("general.architecture")), mtp_layers(file)
    if architecture not in MTP_ARCHITECTURES or not layers:
        return None
    prefix = f"blk.{layers.start}."
    own = {name.removeprefix(prefix): info for name, info in file.tensors.items() if name.startswith(prefix)}
    if _OWN.intersection(own):
        return None
    tensors = {name: info for name, info in file.tensors.items() if not name.startswith("blk.")}
    if norm := own.pop("nextn.shared_head_norm.weight", None):
        tensors["output_norm.weight"] = norm
    tensors |= {f"blk.0.{name}": info for name, info in own.items()}
    fields = {"block_count": 1, NEXTN_LAYERS: 0, "full_attention_interval": 1}
    metadata = file.metadata | {f"{architecture}.{key}": value for key, value in fields.items()}
    metadata.pop(f"{architecture}.attention.recurrent_layers", None)
    return replace(file, metadata=metadata, tensors=tensors)

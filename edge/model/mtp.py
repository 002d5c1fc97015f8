"""Layers for multi-token prediction (MTP, GGUF's `nextn`), which follow a model's own: DeepSeek-V3, arXiv:2412.19437.

They predict tokens behind the next one, to draft them, and the next one does not depend on them. `block_count` includes
them. Engines run the layers before, as llama.cpp does; files that are made from a file keep them where they can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge.errors import ModelFormatError
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_fields import Header

NEXTN_LAYERS = "nextn_predict_layers"


def mtp_layers(file: GGUFFile) -> range:
    """The numbers of these layers. Raises ModelFormatError if they are all that there are."""
    header = Header(file, str(file.metadata.get("general.architecture")))
    if not header.value(NEXTN_LAYERS):
        return range(0)
    layers, count = header.count("block_count", "layers"), header.count(NEXTN_LAYERS, "layers")
    if count >= layers:
        raise ModelFormatError(f"{file.path}: {header.architecture}.{NEXTN_LAYERS} is {count} of {layers} layers")
    return range(layers - count, layers)


def without_mtp(file: GGUFFile) -> GGUFFile:
    """The header of the same model without these layers. Raises ModelFormatError."""
    if not (layers := mtp_layers(file)):
        return file
    architecture = file.metadata["general.architecture"]
    gone = tuple(f"blk.{layer}." for layer in layers)
    fields = {f"{architecture}.block_count": layers.start, f"{architecture}.{NEXTN_LAYERS}": 0}
    tensors = {name: info for name, info in file.tensors.items() if not name.startswith(gone)}
    return replace(file, metadata=file.metadata | fields, tensors=tensors)


def mtp_tensors(file: GGUFFile) -> Mapping[str, TensorInfo]:
    """The tensors of these layers, by name. Raises ModelFormatError."""
    rest = without_mtp(file).tensors
    return {name: info for name, info in file.tensors.items() if name not in rest}

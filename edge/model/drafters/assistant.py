"""Gemma 4's assistants: files of a drafter that reads the rows of the model that it drafts for.

The names are llama.cpp's (`gemma4-assistant`); its converter leaves centroids out, which `edge convert` keeps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from edge.errors import InputError, ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.model.architectures import find_network
from edge.model.cores import Attention
from edge.model.structure.fallback import read_fallback
from edge.model.structure.layers import Assists, Network
from edge.model.structure.mtp import ASSISTANT, NEXTN_LAYERS
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.types import IntArray

_AROUND = ("token_embd.", "nextn.", "masked_embd")  # tensors outside of the layers
ORDERING = "masked_embd_ordering"  # the tokens of each centroid, int32 [vocab]


def is_assistant(file: GGUFFile) -> bool:
    return file.metadata.get("general.architecture") == ASSISTANT


def plain_file(file: GGUFFile) -> GGUFFile:
    """The header without what no network describes: the order of tokens, and the count of all layers as drafters."""
    tensors = {name: info for name, info in file.tensors.items() if name != ORDERING}
    return replace(file, metadata=file.metadata | {f"{ASSISTANT}.{NEXTN_LAYERS}": 0}, tensors=tensors)


def read_assistant(file: GGUFFile) -> ModelSpec:
    """The spec of an assistant's header, with every shape checked. Raises ModelFormatError, UnsupportedError."""
    plain = plain_file(file)
    if "token_embd.weight" not in plain.tensors:
        raise ModelFormatError(f"{file.path}: has no token_embd.weight")
    header = Header(plain, ASSISTANT)
    spec = read_fallback(header)
    spec = replace(spec, network=find_network(header, spec))
    find_tensors(plain, spec)
    assists, order = _assists(spec), file.tensors.get(ORDERING)
    if assists.centroids and (
        order is None
        or (order.shape, order.type) not in [((spec.vocab,), "I32"), ((spec.vocab,), "I64")]
        or spec.vocab % assists.centroids
    ):
        raise ModelFormatError(f"{file.path}: {ORDERING} does not divide {spec.vocab} tokens by centroid")
    return spec


def token_order(file: GGUFFile, spec: ModelSpec) -> IntArray:
    """The tokens of each centroid, one centroid after the other, int32 [vocab]; empty without centroids. Raises
    ModelFormatError unless each token is there once."""
    if not _assists(spec).centroids:
        return np.zeros(0, np.int32)
    info = file.tensors[ORDERING]
    order: IntArray = file.tensor_bytes(info).view(np.int32 if info.type == "I32" else np.int64).astype(np.int32)
    if not np.array_equal(np.sort(order), np.arange(spec.vocab)):
        raise ModelFormatError(f"{file.path}: {ORDERING} has tokens twice, or none of some")
    return order


def layers_of(file: GGUFFile, spec: ModelSpec, model: Network) -> tuple[GGUFFile, ModelSpec]:
    """An assistant's layers and last norm as a network of their own, whose hidden states are given, and whose layers
    read the rows of a model's (`Network.foreign`)."""
    tensors = {name: info for name, info in plain_file(file).tensors.items() if not name.startswith(_AROUND)}
    assert spec.network is not None
    sources, last = source_layers(model), len(spec.network.layers)
    layers = tuple(
        tuple(
            replace(block, core=replace(block.core, rows_of=last + sources[block.core.window > 0]))
            if isinstance(block.core, Attention) else block
            for block in layer
        ) for layer in spec.network.layers
    )  # fmt: skip
    sizes = Counter[str]()
    for info in tensors.values():
        sizes[info.type] += info.nbytes
    network = replace(spec.network, vocab=0, layers=layers, assists=None)
    own = replace(spec, network=network, vocab=0, type_bytes=tuple(sizes.items()), weight_bytes=sizes.total())
    return replace(plain_file(file), tensors=tensors), own


def source_layers(network: Network) -> dict[bool, int]:
    """The layers of a model whose rows an assistant's layers read: the last with rows of its own, without and with a
    window."""
    own = ((layer, core) for layer, core in enumerate(network.attention) if core and core.rows_of is None)
    return {core.window > 0: layer for layer, core in own}


def check_assistant(file: GGUFFile, spec: ModelSpec, model: ModelSpec) -> None:
    """Raise InputError unless an assistant's layers can read the rows of a model."""
    network, own = model.network, spec.network
    assert own is not None
    sources = source_layers(network) if network and model.architecture == "gemma4" else {}
    rows = {window: network.rows[layer] for window, layer in sources.items()} if network else {}
    wanted = {core.window > 0: core.row for core in own.attention if core}
    alike = all((row := rows.get(each)) and row.sizes == of.sizes for each, of in wanted.items())
    if not alike or _assists(spec).hidden != model.hidden:
        raise InputError(f"--draft {file.path}: an assistant of another Gemma 4 than {model.name}: choose its own")


def _assists(spec: ModelSpec) -> Assists:
    assert spec.network is not None
    assert spec.network.assists is not None
    return spec.network.assists

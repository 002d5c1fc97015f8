"""EAGLE-3 heads (arXiv:2503.01840): one layer of Llama, whose attention reads the norms of a token's embedding and of
features side by side. GGUF's names are llama.cpp's."""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ModelFormatError
from edge.formats.gguf_fields import LIMITS, Header
from edge.model.architectures.common import decoder
from edge.model.cores import Attention, Features
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec

LAYERS = ("target_layers", "extract_layers")  # the latter in files of llama.cpp before June 2026
_MOST = 8  # layers of the model


def network(header: Header, spec: ModelSpec) -> Network:
    if spec.layers != 1:
        raise ModelFormatError(f"{header.file.path}: {spec.layers} layers, where an EAGLE-3 head has one")
    made = decoder(header, spec)
    ((first, feeding),) = made.layers
    assert isinstance(first.core, Attention)
    layers = _layers(header)
    size = len(layers) * header.count("target_hidden_size", "hidden")
    if size == spec.hidden:
        raise ModelFormatError(f"{header.file.path}: features of {size} values, as many as a hidden state has")
    normed = header.value("norm_before_residual") is True
    blocks = (
        Block("", Features(spec.hidden, size, normed, layers), replaces=True),
        Block("", replace(first.core, joined=True)),
        feeding,
    )
    return replace(made, layers=(blocks,))


def _layers(header: Header) -> tuple[int, ...]:
    """The layers of the model whose inputs are features."""
    file = header.file
    name = next((each for key in LAYERS if (each := f"{header.architecture}.{key}") in file.metadata), None)
    if name is None:
        raise ModelFormatError(f"{file.path}: {header.architecture}.{LAYERS[0]} is missing")
    layers = tuple(map(int, file.numbers(name))) if file.count(name) <= _MOST else ()
    if not 0 < len({*layers}) == len(layers) or not all(0 <= each < LIMITS["layers"] for each in layers):
        raise ModelFormatError(f"{file.path}: {name} must name from 1 to {_MOST} layers, each once")
    return layers

"""The text model of Qwen3-VL (arXiv:2511.21631): Qwen3 whose positions have three components, which are equal for text
(M-RoPE, interleaved). A picture's rows have parts that are added behind the first layers (deepstack)."""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ModelFormatError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_rope, read_sections
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    rope = replace(
        read_rope(header, spec), halves=True, sections=read_sections(header, spec, sees=True), interleaved=True
    )
    stated = header.value("n_deepstack_layers")
    deepstack = header.count("n_deepstack_layers", "layers") if stated else 0
    if deepstack > spec.layers:
        raise ModelFormatError(f"{header.file.path}: parts of pictures for {deepstack} of {spec.layers} layers")
    return replace(decoder(header, spec, ropes=[rope] * spec.layers), deepstack=deepstack)

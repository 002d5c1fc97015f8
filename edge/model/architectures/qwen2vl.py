"""The text models of Qwen2-VL and Qwen2.5-VL (arXiv:2502.13923): Qwen2 whose positions have three components, which are
equal for text (M-RoPE); the first pairs go by time, the last ones by columns."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_rope, read_sections
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    rope = replace(read_rope(header, spec), halves=True, sections=read_sections(header, spec, sees=True))
    return decoder(header, spec, ropes=[rope] * spec.layers)

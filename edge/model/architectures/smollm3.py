"""SmolLM3 (huggingface.co/blog/smollm3): Llama without RoPE in every fourth layer (arXiv:2501.18795)."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_rope
from edge.model.cores import UNROTATED
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec

PERIOD = 4  # no field of the file says so


def network(header: Header, spec: ModelSpec) -> Network:
    rope = read_rope(header, spec)
    return decoder(header, spec, ropes=[rope if (layer + 1) % PERIOD else UNROTATED for layer in range(spec.layers)])

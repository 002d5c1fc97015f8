"""SmolLM3 (huggingface.co/blog/smollm3): Llama without RoPE in every fourth layer (arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import llama
from edge.model.spec import UNROTATED, ModelSpec, Recipe

PERIOD = 4  # no field of the file says so


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    like = llama.recipe(header, spec)
    kinds = tuple(int((layer + 1) % PERIOD == 0) for layer in range(spec.layers))
    return replace(like, ropes=(*like.ropes, UNROTATED), layer_ropes=kinds)

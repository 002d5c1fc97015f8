"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values; RoPE pairs halves."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import llama
from edge.model.spec import ModelSpec, Recipe


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return replace(llama.recipe(header, spec), halves=True)

"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values; RoPE turns halves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edge.architectures import llama
from edge.architectures.recipe import Recipe
from edge.header import Header

if TYPE_CHECKING:
    from edge.model import ModelSpec


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return replace(llama.recipe(header, spec), halves=True)

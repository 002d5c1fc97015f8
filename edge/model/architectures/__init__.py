"""Recipes of decoder architectures: one file each, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from edge.formats.gguf_fields import Header
from edge.model.architectures import (
    gemma,
    gemma2,
    gemma3,
    gpt2,
    granite,
    llama,
    minicpm,
    mistral3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)
from edge.model.spec import ModelSpec, Recipe

_RECIPES: dict[str, Callable[[Header, ModelSpec], Recipe]] = {
    "llama": llama.recipe,
    "ernie4_5": llama.recipe,  # Baidu's ERNIE 4.5 has no formula of its own
    "qwen2": qwen2.recipe,
    "qwen3": qwen3.recipe,
    "gemma": gemma.recipe,
    "gemma2": gemma2.recipe,
    "gemma3": gemma3.recipe,
    "phi3": phi3.recipe,
    "gpt2": gpt2.recipe,
    "granite": granite.recipe,
    "mistral3": mistral3.recipe,
    "minicpm": minicpm.recipe,
    "smollm3": smollm3.recipe,
    "stablelm": stablelm.recipe,
}


def find_recipe(header: Header, spec: ModelSpec) -> Recipe | None:
    """The recipe by which our own engines run the model; None for architectures that only llama.cpp runs."""
    make = _RECIPES.get(spec.architecture)
    return make(header, spec) if make else None

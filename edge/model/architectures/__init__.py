"""Architectures of decoders: one file each, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from edge.formats.gguf_fields import Header
from edge.model.architectures import (
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gpt2,
    granite,
    lfm2,
    llama,
    minicpm,
    mistral3,
    phi3,
    qwen2,
    qwen3,
    qwen35,
    smollm3,
    stablelm,
)
from edge.model.layers import Network
from edge.model.spec import ModelSpec

_NETWORKS: dict[str, Callable[[Header, ModelSpec], Network]] = {
    "llama": llama.network,
    "ernie4_5": llama.network,  # Baidu's ERNIE 4.5 has no formula of its own
    "qwen2": qwen2.network,
    "qwen3": qwen3.network,
    "qwen35": qwen35.network,
    "gemma": gemma.network,
    "gemma2": gemma2.network,
    "gemma3": gemma3.network,
    "gemma4": gemma4.network,
    "phi3": phi3.network,
    "gpt2": gpt2.network,
    "granite": granite.network,
    "lfm2": lfm2.network,
    "mistral3": mistral3.network,
    "minicpm": minicpm.network,
    "smollm3": smollm3.network,
    "stablelm": stablelm.network,
}


def find_network(header: Header, spec: ModelSpec) -> Network | None:
    """The pass of the model; None for architectures that only llama.cpp runs."""
    make = _NETWORKS.get(spec.architecture)
    return make(header, spec) if make else None

"""Arcee's AFM (huggingface.co/arcee-ai/AFM-4.5B): Llama whose feed-forward network is ReLU² without a gate."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_yarn
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(header, spec, ropes=[read_yarn(header, spec)] * spec.layers, gated=False, activation="relu2")

"""EmbeddingGemma (arXiv:2509.20354): Gemma 3 whose tokens see the whole text or, in layers with a window, both sides;
two dense layers follow the mean of the states (`tail.py`)."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import gemma3
from edge.model.cores import Attention
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    def both_sides(block: Block) -> Block:
        core = block.core
        return replace(block, core=replace(core, causal=False)) if isinstance(core, Attention) else block

    found = gemma3.network(header, spec)
    layers = tuple(tuple(map(both_sides, layer)) for layer in found.layers)
    return replace(found, layers=layers, encoder_norm=True)

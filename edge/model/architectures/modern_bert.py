"""ModernBERT (arXiv:2412.13663): an encoder with norms before each block, RoPE, GeGLU, and windows on both sides of a
token in all layers but every third."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_rope
from edge.model.cores import Attention, Dense
from edge.model.structure.layers import Block, Layer, Network
from edge.model.structure.spec import ModelSpec

PERIOD = 3  # layers from one with full attention to the next; the first has it


def network(header: Header, spec: ModelSpec) -> Network:
    """The embeddings have a norm, so that the first layer's attention has none."""
    period = header.count("attention.sliding_window_pattern", "layers", default=PERIOD)
    window = header.count("attention.sliding_window", "context", default=128)
    whole = replace(read_rope(header, spec), halves=True)
    local = replace(whole, base=header.positive("rope.freq_base_swa", whole.base, below=1e12))
    attention = Attention(spec.heads, spec.heads, spec.head_dim, spec.head_dim**-0.5, causal=False)
    feeding = Block("ffn_norm", Dense(spec.ffn, "gelu_erf"))

    def layer(number: int) -> Layer:
        windowed = number % period > 0
        core = replace(attention, rope=local if windowed else whole, window=window if windowed else 0)
        return Block("attn_norm" if number else "", core), feeding

    return Network(
        spec.hidden, spec.vocab, tuple(map(layer, range(spec.layers))), norm="layer", norm_eps=spec.norm_eps,
        embedding_norm=True, embedding_norm_bias=False, encoder_norm=True, classifier="gelu_erf",
    )  # fmt: skip

"""Encoders: BERT (arXiv:1810.04805), which is also the architecture of MiniLM, BGE and E5, and Nomic's BERT with RoPE
and gates (arXiv:2402.01613)."""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ModelFormatError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_rope
from edge.model.cores import UNROTATED, Attention, Dense, Rope
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec

TOKEN_TYPES = "tokenizer.ggml.token_type_count"
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")


def bert(header: Header, spec: ModelSpec) -> Network:
    dense = Dense(spec.ffn, "gelu_erf", gated=False, biases=_MATRICES)
    return _encoder(header, spec, UNROTATED, dense, positions=spec.context)


def nomic_bert(header: Header, spec: ModelSpec) -> Network:
    """RoPE pairs halves."""
    return _encoder(header, spec, replace(read_rope(header, spec), halves=True), Dense(spec.ffn), positions=0)


def _encoder(header: Header, spec: ModelSpec, rope: Rope, dense: Dense, positions: int) -> Network:
    """Post-norm layers: each sum passes through a norm with a bias. Attention and `dense` share one list of biases."""
    if spec.kv_heads != spec.heads or spec.hidden != spec.heads * spec.head_dim:
        raise ModelFormatError(f"{header.file.path}: {spec.heads} heads of {spec.head_dim} for {spec.hidden} values")
    attention = Attention(
        spec.heads, spec.heads, spec.head_dim, spec.head_dim**-0.5, rope, biases=dense.biases, causal=False
    )
    layer = (
        Block("", attention, sum_norm="attn_output_norm"),
        Block("", dense, sum_norm="layer_output_norm"),
    )
    return Network(
        spec.hidden, spec.vocab, (layer,) * spec.layers, norm="layer", norm_eps=spec.norm_eps, positions=positions,
        token_types=_count_types(header), embedding_norm=True,
    )  # fmt: skip


def _count_types(header: Header) -> int:
    """Rows of the table of token types; 0 without one. While a converter lacks its shape, the header's count."""
    table = header.file.tensors.get("token_types.weight")
    if table is None:
        return 0
    stated = header.file.metadata.get(TOKEN_TYPES)
    return table.shape[-1] if len(table.shape) == 2 or not isinstance(stated, int) else stated

"""Mamba-1 (arXiv:2312.00752) alone, in Falcon-Mamba with norms, and in Jamba (arXiv:2403.19887).

Jamba has attention without RoPE in the layers with KV heads, and a feed-forward network, dense or of experts, in each.
"""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ModelFormatError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_experts, read_kernel
from edge.model.cores import LANES, Attention, Dense, SelectiveScan
from edge.model.structure.fallback import per_layer
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    scan = _scan(header, spec, norms=bool(header.value("ssm.dt_b_c_rms")), weighted=False)
    layers = ((Block("attn_norm", scan),),) * spec.layers
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)


def jamba(header: Header, spec: ModelSpec) -> Network:
    scan, kv_heads = (
        _scan(header, spec, norms=True),
        per_layer(header, "attention.head_count_kv", "heads", spec.layers, 0),
    )
    attention = Attention(spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim**-0.5)
    width = header.count("feed_forward_length", "ffn")
    dense = Dense(width)
    experts = replace(read_experts(header, width=width), normed=False) if spec.experts else dense
    layers = tuple(
        (
            Block("attn_norm", attention if heads else scan),
            Block("ffn_norm", experts if f"blk.{layer}.ffn_gate_inp.weight" in header.file.tensors else dense),
        )
        for layer, heads in enumerate(kv_heads)
    )
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)


def _scan(header: Header, spec: ModelSpec, *, norms: bool, weighted: bool = True) -> SelectiveScan:
    """Raises ModelFormatError for impossible figures."""
    width, size = header.count("ssm.inner_size", "ffn"), header.count("ssm.state_size", "head_dim")
    if width % LANES:
        raise ModelFormatError(f"{header.file.path}: {width} channels of Mamba-1, which must be a multiple of {LANES}")
    rank, kernel = header.count("ssm.time_step_rank", "hidden"), read_kernel(header, "ssm.conv_kernel")
    epsilon = header.positive("ssm.dt_b_c_rms_epsilon", spec.norm_eps, below=1.0)  # edge's own field
    return SelectiveScan(width, size, rank, kernel, norms, weighted, epsilon)

"""Gemma 4 (huggingface.co/google): most layers have a window, with heads, KV heads and RoPE of their own. The last
layers read the rows of earlier ones. A token has a vector for every layer. In the mixture, experts run beside a dense
network, and values are keys before their norm. The file's RoPE factors apply to layers with
full attention, where they leave three quarters of each head unrotated.

An assistant has such layers with queries only, which read the rows of the last layers of another model that have rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edge.errors import UnsupportedError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_experts, read_rope
from edge.model.cores import Attention, Dense, PerLayerInput, Rope
from edge.model.structure.fallback import figure, per_layer
from edge.model.structure.layers import Assists, Block, Layer, Network
from edge.model.structure.spec import ModelSpec

_USED_CENTROIDS = 32  # of an assistant, where the header does not say


def network(header: Header, spec: ModelSpec) -> Network:
    kinds = {window: _attention(header, spec, window) for window in {*spec.windows}}
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", spec.layers, spec.kv_heads)
    widths = per_layer(header, "feed_forward_length", "ffn", spec.layers, 0)
    own = spec.layers - figure(header, "attention.shared_kv_layers", "layers", 0)
    attention: list[Attention] = []
    for layer, window in enumerate(spec.windows):
        own_heads = len({*kv_heads}) > 1 and not window  # the models whose values are keys, where there is no file
        matrices = {name for name in ("attn_k", "attn_v") if f"blk.{layer}.{name}.weight" in header.file.tensors}
        same = matrices == {"attn_k"} if matrices else own_heads
        core = replace(kinds[window], kv_heads=max(1, kv_heads[layer]), keys_as_values=same)
        if core.heads % core.kv_heads:
            raise UnsupportedError(f"{header.file.path}: {core.heads} heads cannot share {core.kv_heads} KV heads")
        attention.append(core if layer < own else replace(core, rows_of=_source(header, attention[:own], core)))
    return Network(
        spec.hidden, spec.vocab,
        tuple(_layer(header, core, width) for core, width in zip(attention, widths, strict=True)),
        norm_eps=spec.norm_eps, embedding_scale=math.sqrt(spec.hidden), tied_head=spec.tied_head,
        logit_cap=header.positive("final_logit_softcapping", 0.0, below=1e6),
    )  # fmt: skip


def assistant(header: Header, spec: ModelSpec) -> Network:
    kinds = {window: _attention(header, spec, window) for window in {*spec.windows}}
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", spec.layers, spec.kv_heads)
    widths = per_layer(header, "feed_forward_length", "ffn", spec.layers, 0)
    cores = (replace(kinds[window], kv_heads=max(1, kv_heads[at]), rows_of=0) for at, window in enumerate(spec.windows))
    return Network(
        spec.hidden, spec.vocab,
        tuple(_layer(header, core, width) for core, width in zip(cores, widths, strict=True)),
        norm_eps=spec.norm_eps, tied_head=spec.tied_head, assists=_assists(header),
    )  # fmt: skip


def _assists(header: Header) -> Assists:
    hidden, centroids = header.count("embedding_length_out", "hidden"), 0
    if (found := header.file.tensors.get("masked_embd_centroids.weight")) is not None:
        centroids = header.count("masked_embedding.centroid_count", "vocab", default=found.rows)
    used = header.count("masked_embedding.top_k", "vocab", default=_USED_CENTROIDS)
    return Assists(hidden, centroids, min(used, centroids))


def _attention(header: Header, spec: ModelSpec, window: int) -> Attention:
    """The attention of layers with this window."""
    if window:
        size = header.count("attention.key_length_swa", "head_dim", default=spec.head_dim)
        dim = header.count("rope.dimension_count_swa", "head_dim", default=size)
        base = header.positive("rope.freq_base_swa", 10000.0, below=1e12)
        rope = Rope(dim, base, halves=True, has_freqs=False)
    else:
        size, rope = spec.head_dim, replace(read_rope(header, spec), halves=True)
    if rope.dim != size:
        raise UnsupportedError(f"{header.file.path}: RoPE rotates {rope.dim} of {size} values: not supported yet")
    spans = window > 0 or figure(header, "embedding_length_per_layer_input", "ffn", 0) > 0
    return Attention(spec.heads, spec.kv_heads, size, 1.0, rope, window, head_norms=True, unit_values=True, spans=spans)


def _source(header: Header, own: list[Attention], core: Attention) -> int:
    """The last layer with rows of its own whose attention is the same as `core`."""
    alike = [layer for layer, each in enumerate(own) if replace(each, keys_as_values=core.keys_as_values) == core]
    if not alike:
        raise UnsupportedError(f"{header.file.path}: no layer has rows for those that share them: not supported yet")
    return alike[-1]


def _layer(header: Header, attention: Attention, width: int) -> Layer:
    size, dense = figure(header, "embedding_length_per_layer_input", "ffn", 0), Dense(max(1, width), "gelu")
    feeding = [Block("ffn_norm", dense, "post_ffw_norm")]
    if figure(header, "expert_count", "ffn", 0):
        experts = replace(read_experts(header), activation="gelu", own_norms=True)
        feeding = [
            Block("ffn_norm", dense, "post_ffw_norm_1", held=True),
            Block("", experts, "post_ffw_norm_2", joint_norm="post_ffw_norm"),
        ]
    blocks = [
        Block("attn_norm", attention, "post_attention_norm"),
        *feeding,
        *([Block("", PerLayerInput(size), "post_norm")] if size else []),
    ]
    return (*blocks[:-1], replace(blocks[-1], rescale="layer_output_scale"))

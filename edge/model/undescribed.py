"""Tensors of architectures that have no network yet, by those that have one: `edge models --fits` counts them.

An architecture that gets a file in `architectures/` leaves this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model import architectures
from edge.model.fallback import figure, per_layer
from edge.model.layers import Attention, Block, Dense, Layer, Network
from edge.model.spec import ModelSpec

Listed = tuple[str, tuple[int, ...]]

_RELATIVES = {"gpt-oss": "qwen2"}  # the same but for experts in layers


def find_network(header: Header, spec: ModelSpec) -> Network | None:
    """The pass without experts, tables, and what else `with_more` adds. None: the architecture is not one of these."""
    if spec.architecture == "gemma4":
        return _gemma4(header, spec)
    relative = _RELATIVES.get(spec.architecture)
    if relative is None:
        return None
    ffn = header.count("feed_forward_length", "ffn")
    return architectures.find_network(header, replace(spec, architecture=relative, ffn=ffn))


def with_more(header: Header, tensors: Iterable[Listed]) -> Iterator[Listed]:
    """The tensors of a file, where `tensors` are those of its network. Others than these architectures' stay."""
    make = {"gemma4": _with_tables, **dict.fromkeys(_RELATIVES, _with_experts)}.get(header.architecture)
    yield from make(header, tensors) if make else tensors


def _with_experts(header: Header, tensors: Iterable[Listed]) -> Iterator[Listed]:
    """Experts in place of feed-forward networks; of gpt-oss also biases, sinks, and a norm of another name."""
    hidden, experts = header.count("embedding_length", "hidden"), header.count("expert_count", "ffn")
    width, dense = header.count("expert_feed_forward_length", "ffn"), header.value("leading_dense_block_count") or 0
    is_gpt_oss = header.architecture == "gpt-oss"
    shapes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    for name, shape in tensors:
        layer, _, part = name.removeprefix("blk.").partition(".")
        if not part.startswith("ffn_") or part == "ffn_norm.weight" or int(layer) < dense:
            yield name.replace("ffn_norm", "post_attention_norm") if is_gpt_oss else name, shape
            continue
        kind = part[len("ffn_") : -len(".weight")]
        yield f"blk.{layer}.ffn_{kind}_exps.weight", (*shapes[kind], experts)
        if is_gpt_oss:
            yield f"blk.{layer}.ffn_{kind}_exps.bias", (shapes[kind][1], experts)
        if kind == "down":
            yield f"blk.{layer}.ffn_gate_inp.weight", (hidden, experts)
            if header.architecture == "lfm2moe":
                yield f"blk.{layer}.exp_probs_b.bias", (experts,)
            if is_gpt_oss:
                yield f"blk.{layer}.ffn_gate_inp.bias", (experts,)
                yield f"blk.{layer}.attn_sinks.weight", (header.count("attention.head_count", "heads"),)


def _gemma4(header: Header, spec: ModelSpec) -> Network:
    """Layers with a window have smaller heads."""
    small = header.count("attention.key_length_swa", "head_dim")
    windowed = per_layer(header, "attention.sliding_window_pattern", "layers", spec.layers, 0)
    widths = per_layer(header, "feed_forward_length", "ffn", spec.layers, 0)

    def layer(head_dim: int, width: int) -> Layer:
        attention = Attention(spec.heads, spec.kv_heads, head_dim, 1.0, head_norms=True)
        feeding = Block("ffn_norm", Dense(width), "post_ffw_norm")
        return Block("attn_norm", attention, "post_attention_norm"), feeding

    sizes = [small if window else spec.head_dim for window in windowed]
    layers = tuple(layer(size, width) for size, width in zip(sizes, widths, strict=True))
    return Network(spec.hidden, spec.vocab, layers, tied_head=spec.tied_head)


def _with_tables(header: Header, tensors: Iterable[Listed]) -> Iterator[Listed]:
    """A vector for each token and layer, and no keys and values in layers that use an earlier layer's."""
    hidden, layers = header.count("embedding_length", "hidden"), header.count("block_count", "layers")
    size = header.count("embedding_length_per_layer_input", "hidden")
    first_shared = layers - figure(header, "attention.shared_kv_layers", "layers", 0)
    for name, shape in tensors:
        layer, _, part = name.removeprefix("blk.").partition(".")
        if part.startswith(("attn_k", "attn_v")) and int(layer) >= first_shared:
            continue
        yield name, shape
        if name == "token_embd.weight":
            yield "per_layer_token_embd.weight", (size * layers, shape[1])
            yield "per_layer_model_proj.weight", (hidden, size * layers)
            yield "per_layer_proj_norm.weight", (size,)
        elif part == "ffn_down.weight":
            yield f"blk.{layer}.inp_gate.weight", (hidden, size)
            yield f"blk.{layer}.proj.weight", (size, hidden)
            yield f"blk.{layer}.post_norm.weight", (hidden,)
            yield f"blk.{layer}.layer_output_scale.weight", (1,)

"""Tensors of architectures that have no network yet, by those that have one: `edge models --fits` counts them.

An architecture that gets a file in `architectures/` leaves this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edge.formats.gguf_fields import Header
from edge.model.fallback import figure, per_layer
from edge.model.layers import Attention, Block, Dense, Layer, Network
from edge.model.spec import ModelSpec

Listed = tuple[str, tuple[int, ...]]


def find_network(header: Header, spec: ModelSpec) -> Network | None:
    """The pass without tables, and what else `with_more` adds. None: the architecture is not one of these."""
    return _gemma4(header, spec) if spec.architecture == "gemma4" else None


def with_more(header: Header, tensors: Iterable[Listed]) -> Iterator[Listed]:
    """The tensors of a file, where `tensors` are those of its network. Others than these architectures' stay."""
    yield from _with_tables(header, tensors) if header.architecture == "gemma4" else tensors


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

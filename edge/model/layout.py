"""The tensors that an architecture's figures imply: names and shapes as in the GGUF file that would have this header.

For models whose file is not here: `edge models --fits` plans them from published figures. The header's keys are those
of GGUF, and the tensors those that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge.errors import UnsupportedError

Shape = tuple[int, ...]
Tensor = tuple[str, Shape]
"""A tensor's name and its shape in ggml's order, the length of a row first."""

ARCHITECTURES = {
    "gemma2", "gemma3", "gemma4", "gpt-oss", "granite", "lfm2", "lfm2moe", "llama", "mistral3", "phi3", "qwen2",
    "qwen3", "qwen35", "qwen3moe", "smollm3",
}  # fmt: skip
_QK_NORMS = {"gemma3", "gemma4", "lfm2", "lfm2moe", "qwen3", "qwen35", "qwen3moe"}
_FOUR_NORMS = {"gemma2", "gemma3", "gemma4"}  # behind attention and feed-forward, too
_ONE_NAME = {"gpt-oss", "qwen35"}  # the norm before the feed-forward is named after the attention
_QKV_BIASES = {"gpt-oss", "qwen2"}
_FUSED = {"phi3"}  # queries, keys and values lie in one matrix, gate and up in another


def tensors_of(header: Mapping[str, Any], *, untied: bool = False, factors: tuple[str, ...] = ()) -> list[Tensor]:
    """All tensors of a model, layer by layer.

    header: `general.architecture` and the architecture's own keys, with `vocab_size`; a figure that differs from layer
    to layer is a list. untied: the output head is a matrix of its own. factors: names of tensors that stretch RoPE.
    Raises UnsupportedError for other architectures, KeyError if a figure is missing.
    """
    architecture = header["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(f"the tensors of {architecture} models cannot be counted without their file")
    model = _Figures(architecture, header)
    hidden, vocab, layers = model.count("embedding_length"), model.count("vocab_size"), model.count("block_count")
    found: list[Tensor] = [("token_embd.weight", (hidden, vocab))]
    if per_layer := model.get("embedding_length_per_layer_input", 0):
        found += [
            ("per_layer_token_embd.weight", (per_layer * layers, vocab)),
            ("per_layer_model_proj.weight", (hidden, per_layer * layers)),
            ("per_layer_proj_norm.weight", (per_layer,)),
        ]
    rotated = model.get("rope.dimension_count", model.head_dim(0))
    found += [(f"{name}.weight", (rotated // 2,)) for name in factors]
    for layer in range(layers):
        parts = (*_mixing(model, hidden, layer), *_feeding(model, hidden, layer))
        found += [(f"blk.{layer}.{name}", shape) for name, shape in parts]
    found.append(("token_embd_norm.weight" if architecture.startswith("lfm2") else "output_norm.weight", (hidden,)))
    return [*found, ("output.weight", (hidden, vocab))] if untied else found


@dataclass(frozen=True)
class _Figures:
    """The architecture's keys, without its name."""

    architecture: str
    header: Mapping[str, Any]

    def get(self, key: str, default: Any) -> Any:
        return self.header.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, layer: int = 0) -> int:
        value = self.header[f"{self.architecture}.{key}"]
        return int(value[layer] if isinstance(value, list) else value)

    def head_dim(self, layer: int) -> int:
        if self.architecture == "gemma4" and self.get("attention.sliding_window_pattern", [])[layer]:
            return self.count("attention.key_length_swa")
        default = self.count("embedding_length") // self.count("attention.head_count")
        return int(self.get("attention.key_length", default))

    def is_recurrent(self, layer: int) -> bool:
        if self.architecture == "qwen35":
            stated = self.get("attention.recurrent_layers", None)
            return bool(stated[layer]) if stated else (layer + 1) % self.count("full_attention_interval") != 0
        return self.architecture.startswith("lfm2") and not self.count("attention.head_count_kv", layer)

    def has_keys(self, layer: int) -> bool:
        """Whether the layer computes keys and values of its own, instead of using an earlier layer's."""
        return layer < self.count("block_count") - int(self.get("attention.shared_kv_layers", 0))


def _mixing(model: _Figures, hidden: int, layer: int) -> Iterator[Tensor]:
    """What mixes tokens: attention, a short convolution (LFM2), or a gated delta net (Qwen3.5)."""
    yield "attn_norm.weight", (hidden,)
    if model.is_recurrent(layer):
        yield from (_delta_net if model.architecture == "qwen35" else _convolution)(model, hidden)
        return
    size, architecture = model.head_dim(layer), model.architecture
    queries = size * model.count("attention.head_count", layer)
    keys = size * (model.count("attention.head_count_kv", layer) if model.has_keys(layer) else 0)
    if architecture in _FUSED:
        yield "attn_qkv.weight", (hidden, queries + 2 * keys)
    else:
        gated = 2 if architecture == "qwen35" else 1  # rows of a gate of the output lie behind those of queries
        shown = {"q": gated * queries, "k": keys, "v": keys}
        for name, rows in shown.items():
            if rows:
                yield f"attn_{name}.weight", (hidden, rows)
                if architecture in _QKV_BIASES:
                    yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (queries, hidden)
    if architecture in _QK_NORMS:
        yield "attn_q_norm.weight", (size,)
        if keys:
            yield "attn_k_norm.weight", (size,)
    if architecture == "gpt-oss":
        yield "attn_output.bias", (hidden,)
        yield "attn_sinks.weight", (model.count("attention.head_count"),)


def _convolution(model: _Figures, hidden: int) -> Iterator[Tensor]:
    yield "shortconv.conv.weight", (model.count("shortconv.l_cache"), hidden)
    yield "shortconv.in_proj.weight", (hidden, 3 * hidden)
    yield "shortconv.out_proj.weight", (hidden, hidden)


def _delta_net(model: _Figures, hidden: int) -> Iterator[Tensor]:
    size, values = model.count("ssm.state_size"), model.count("ssm.inner_size")
    heads, mixed = model.count("ssm.time_step_rank"), 2 * size * model.count("ssm.group_count") + values
    yield "attn_qkv.weight", (hidden, mixed)
    yield "attn_gate.weight", (hidden, values)
    yield "ssm_conv1d.weight", (model.count("ssm.conv_kernel"), mixed)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads,)
    yield "ssm_beta.weight", (hidden, heads)
    yield "ssm_alpha.weight", (hidden, heads)
    yield "ssm_norm.weight", (size,)
    yield "ssm_out.weight", (values, hidden)


def _feeding(model: _Figures, hidden: int, layer: int) -> Iterator[Tensor]:
    """The feed-forward network, dense or of experts, and the norms around it."""
    architecture = model.architecture
    yield "post_attention_norm.weight" if architecture in _ONE_NAME else "ffn_norm.weight", (hidden,)
    if architecture in _FOUR_NORMS:
        yield "post_attention_norm.weight", (hidden,)
        yield "post_ffw_norm.weight", (hidden,)
    experts = int(model.get("expert_count", 0))
    if experts and layer >= model.get("leading_dense_block_count", 0):
        yield from _experts(model, hidden, experts)
    else:
        width = model.count("feed_forward_length", layer)
        if architecture not in _FUSED:
            yield "ffn_gate.weight", (hidden, width)
        yield "ffn_up.weight", (hidden, 2 * width if architecture in _FUSED else width)
        yield "ffn_down.weight", (width, hidden)
    if per_layer := model.get("embedding_length_per_layer_input", 0):
        yield "inp_gate.weight", (hidden, per_layer)
        yield "proj.weight", (per_layer, hidden)
        yield "post_norm.weight", (hidden,)
        yield "layer_output_scale.weight", (1,)


def _experts(model: _Figures, hidden: int, experts: int) -> Iterator[Tensor]:
    width = model.count("expert_feed_forward_length")
    yield "ffn_gate_inp.weight", (hidden, experts)
    yield "ffn_gate_exps.weight", (hidden, width, experts)
    yield "ffn_up_exps.weight", (hidden, width, experts)
    yield "ffn_down_exps.weight", (width, hidden, experts)
    if model.architecture == "lfm2moe":
        yield "exp_probs_b.bias", (experts,)
    if model.architecture == "gpt-oss":
        yield "ffn_gate_inp.bias", (experts,)
        yield "ffn_gate_exps.bias", (width, experts)
        yield "ffn_up_exps.bias", (width, experts)
        yield "ffn_down_exps.bias", (hidden, experts)

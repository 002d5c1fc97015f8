"""Builders of layers and readers of fields that architectures share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.errors import ModelFormatError
from edge.formats.gguf import ArrayRef
from edge.formats.gguf_fields import Header
from edge.model.cores import Activation, Attention, Dense, Experts, Mamba, Rope, Router, Temperature
from edge.model.structure.layers import Block, Network, Norm, Pooling
from edge.model.structure.spec import ModelSpec

POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # pooling_type
_MEAN = 1
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")


def decoder(
    header: Header, spec: ModelSpec, *, ropes: Sequence[Rope] | None = None, windows: Sequence[int] | None = None,
    halves: bool = False, query_scale: float = 0.0, activation: Activation = "silu", gated: bool = True,
    norm: Norm = "rms", residual_scale: float = 1.0, temperature: Temperature | None = None, score_cap: float = 0.0,
    embedding_scale: float = 1.0, learned_positions: bool = False, logit_scale: float = 1.0, logit_cap: float = 0.0,
    experts: Experts | None = None,
) -> Network:  # fmt: skip
    """A network whose layers are attention and a feed-forward network, or `experts` instead, as in most architectures.

    ropes, windows: per layer; None: the header's, in all layers. query_scale: 0 stands for 1 / √head_dim. halves: see
    `Rope`. The file's first layer decides which biases, norms of heads, and post-norms there are.
    """
    ropes = ropes or [replace(read_rope(header, spec), halves=halves)] * spec.layers
    windows = windows or same_window(spec)
    attention = Attention(
        spec.heads, spec.kv_heads, spec.head_dim, query_scale or spec.head_dim**-0.5,
        head_norms=_has(header, "attn_q_norm.weight"), biases=_biases(header, _ATTENTION, "attn_qkv"),
        score_cap=score_cap, temperature=temperature, value_dim=_value_dim(header, spec),
    )  # fmt: skip
    matrices = _DENSE if gated else _DENSE[1:]
    fused = "ffn_up" if gated and not _has(header, "ffn_gate.weight") else ""
    dense = Dense(spec.ffn, activation, gated, _biases(header, matrices, fused))

    def block(name: str, core: Attention | Dense | Experts, post_norm: str) -> Block:
        behind = post_norm if _has(header, f"{post_norm}.weight") else None
        return Block(name, core, behind, residual_scale, _has(header, f"{name}.bias"))

    feeding = block("ffn_norm", experts or dense, "post_ffw_norm")
    layers = tuple(
        (block("attn_norm", replace(attention, rope=rope, window=window), "post_attention_norm"), feeding)
        for rope, window in zip(ropes, windows, strict=True)
    )
    return Network(
        spec.hidden, spec.vocab, layers, norm=norm, norm_eps=spec.norm_eps, embedding_scale=embedding_scale,
        positions=spec.context if learned_positions else 0,
        output_norm_bias="output_norm.bias" in header.file.tensors, tied_head=spec.tied_head, logit_scale=logit_scale,
        logit_cap=logit_cap,
    )  # fmt: skip


def read_rope(header: Header, spec: ModelSpec) -> Rope:
    """RoPE by the header fields that all architectures share."""
    factor = header.positive("rope.scaling.factor", header.positive("rope.scale_linear", 1.0, below=1e4), below=1e4)
    return Rope(
        dim=spec.rope_dim,
        base=spec.rope_base,
        scaling=header.text("rope.scaling.type", "linear"),  # a factor alone means linear
        factor=factor,
        original_context=header.count("rope.scaling.original_context_length", "context", default=spec.context),
        magnitude=header.positive("rope.scaling.attn_factor", 1.0, below=1e3),
        has_long="rope_factors_long.weight" in header.file.tensors,
    )


def read_sections(header: Header, spec: ModelSpec, *, sees: bool = False) -> tuple[int, ...]:
    """Pairs that each component of a position rotates. Files without them are of models for text alone; sees: this one
    is for pictures, too. Raises ModelFormatError."""
    name = f"{header.architecture}.rope.dimension_sections"
    stated = isinstance(header.file.metadata.get(name), ArrayRef)
    found = tuple(int(count) for count in header.file.numbers(name) if count) if stated else ()
    if sum(found) == spec.rope_dim // 2:
        return found
    if sees:
        raise ModelFormatError(f"{header.file.path}: {name} must divide {spec.rope_dim // 2} pairs: convert it again")
    return ()


def read_yarn(header: Header, spec: ModelSpec) -> Rope:
    """Like `read_rope`, with YaRN's bounds and log multiplier where the header states them."""
    rope = read_rope(header, spec)
    return replace(
        rope,
        beta_fast=header.positive("rope.scaling.yarn_beta_fast", rope.beta_fast, below=1e6),
        beta_slow=header.positive("rope.scaling.yarn_beta_slow", rope.beta_slow, below=1e6),
        log_multiplier=read_factor(header, "rope.scaling.yarn_log_multiplier", 0.0),
    )


def read_kernel(header: Header, key: str) -> int:
    """The width of a causal convolution, in tokens. Raises ModelFormatError for fewer than two."""
    kernel = header.count(key, "head_dim")
    if kernel < 2:
        raise ModelFormatError(f"{header.file.path}: {header.architecture}.{key} is {kernel}: it must be 2 or more")
    return kernel


def read_mamba(header: Header) -> Mamba:
    """Mamba-2 by the header's fields. Raises ModelFormatError for impossible figures."""
    return Mamba(*read_state(header, "Mamba-2"))


def read_state(header: Header, core: str) -> tuple[int, int, int, int, int]:
    """Heads, groups of them that share keys, the state's size, values of a head, and the convolution's taps. Raises
    ModelFormatError for impossible figures."""
    heads, inner = header.count("ssm.time_step_rank", "heads"), header.count("ssm.inner_size", "ffn")
    groups = header.count("ssm.group_count", "heads")
    if inner % heads or heads % groups:
        raise ModelFormatError(f"{header.file.path}: {inner} values in {heads} heads of {core} with {groups} groups")
    size = header.count("ssm.state_size", "head_dim")
    return heads, groups, size, inner // heads, read_kernel(header, "ssm.conv_kernel")


def read_experts(header: Header, router: Router = "softmax", *, shared: bool = False, width: int = 0) -> Experts:
    """The experts of a header. shared: with a shared expert for every token. width: of each expert; 0: the header's.
    Raises ModelFormatError for impossible figures."""
    number, used = header.count("expert_count", "ffn"), header.count("expert_used_count", "ffn")
    if used > number:
        raise ModelFormatError(f"{header.file.path}: {used} of {number} experts for a token")
    groups, groups_used = (
        header.count(key, "ffn") if header.value(key) else 1
        for key in ("expert_group_count", "expert_group_used_count")
    )
    if number % groups or groups_used > groups or used > groups_used * number // groups or number < 2 * groups > 2:
        raise ModelFormatError(
            f"{header.file.path}: {used} of {number} experts for a token, in {groups_used} of {groups} groups"
        )
    width = width or header.count("expert_feed_forward_length", "ffn")
    return Experts(
        number,
        used,
        width,
        router,
        scale=read_factor(header, "expert_weights_scale"),
        shared=header.count("expert_shared_feed_forward_length", "ffn", default=width) if shared else 0,
        groups=groups,
        groups_used=groups_used,
    )


def leading_dense(header: Header) -> int:
    """The first layers of a mixture, which have a dense feed-forward network."""
    key = "leading_dense_block_count"
    return header.count(key, "layers") if header.value(key) else 0


def read_factor(header: Header, key: str, default: float = 1.0) -> float:
    """A scalar factor of the header; 0 counts as absent, as in llama.cpp."""
    return default if header.value(key) == 0 else header.positive(key, default, below=1e6)


def read_pooling(header: Header) -> Pooling | None:
    """How a text's hidden states become its embedding: the mean where a file says nothing, None for other ways."""
    value = header.value("pooling_type") or _MEAN
    return POOLING.get(value) if isinstance(value, int) else None


def same_window(spec: ModelSpec) -> tuple[int, ...]:
    """The header's window for every layer, if it is shorter than the context: Phi-4-mini's is twice as long."""
    return (spec.window if spec.window < spec.context else 0,) * spec.layers


def window_but_every(period: int, spec: ModelSpec) -> tuple[int, ...]:
    """Windows in all layers except every `period`-th, which has full attention."""
    return tuple(spec.window if (layer + 1) % period else 0 for layer in range(spec.layers))


def _value_dim(header: Header, spec: ModelSpec) -> int:
    """The size of values where it is not that of keys; else 0."""
    found = header.count("attention.value_length", "head_dim", default=spec.hidden // spec.heads)
    return 0 if found == spec.head_dim else found


def _has(header: Header, name: str) -> bool:
    return f"blk.0.{name}" in header.file.tensors


def _biases(header: Header, matrices: tuple[str, ...], fused: str) -> tuple[str, ...]:
    """Matrices with biases. fused: the matrix that may hold all of `matrices` but the last, the output."""
    whole = bool(fused) and _has(header, f"{fused}.weight") and _has(header, f"{fused}.bias")
    return tuple(name for name in matrices if _has(header, f"{name}.bias") or (whole and name != matrices[-1]))

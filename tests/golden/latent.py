"""Make the golden models of multi-head latent attention: a tiny DeepSeek-V3, one layer dense, one of experts; a
DeepSeek-V2-Lite like it, as files of before April 2025 have it; a MiniCPM3; and a PLM, which is DeepSeek-V3's attention
beside Nemotron's feed-forward networks; a Kimi-Linear, whose first layer is Kimi Delta Attention; and a Ling 3, which
has other gates, and experts in groups.

    PYTHON tests/golden/latent.py [OUT]

writes `NAME.gguf`, in float32, with the tensors and fields of llama.cpp's converter, and `NAME.npz`: tokens, int32
[64], and transformers' logits after the last 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from families import small
from make import Array, fill, forward, random_tokens, rounded
from transformers.models.nemotron.modeling_nemotron import NemotronMLP
from write import begin, byte_level, finish, run

LAST = 8
HEADS, RANK, QUERY_RANK, PLAIN, ROTATED, VALUE = 2, 32, 32, 32, 16, 16
MULTIPLIER = 0.7
SHORT, LONG = ([1.0 + each / step for each in range(ROTATED // 2)] for step in (16, 8))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": MULTIPLIER,
        "mscale_all_dim": MULTIPLIER}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.b_proj": "ssm_beta",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a", "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a", "self_attn.g_b_proj": "ssm_g_b", "self_attn.o_norm": "ssm_norm",
    "self_attn.forget_gate.f_proj": "ssm_f_a",
}  # fmt: skip
HYBRIDS = ("kimi-linear", "bailingmoe3")


def main(out: Path) -> None:
    for seed, (name, (arch, model)) in enumerate(models().items(), start=71):
        fill(model.eval(), seed=seed)
        apart = name in ("deepseek2", "kimi-linear", "ling")
        if apart:
            gate = model.model.layers[1].mlp.gate
            gate.e_score_correction_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0] * (len(gate.weight) // 4)))
        tokens = random_tokens(seed)
        write(out / f"{name}.gguf", arch, model, apart=apart)
        logits = forward(model, None, tokens, position=0)[-LAST:]
        np.savez_compressed(out / f"{name}.npz", tokens=tokens, logits=rounded(logits))


def models() -> dict[str, tuple[str, hf.PreTrainedModel]]:
    """By the name of the golden file: the architecture in GGUF, and the model."""
    plm = hf.DeepseekV3ForCausalLM(configuration({"rope_type": "default"}, first_k_dense_replace=2, q_lora_rank=None))
    for layer in plm.model.layers:
        layer.mlp = NemotronMLP(small(hf.NemotronConfig, hidden_act="relu2", mlp_bias=False))
    return {
        "deepseek2": ("deepseek2", hf.DeepseekV3ForCausalLM(configuration(YARN))),
        "deepseek2-lite": ("deepseek2", hf.DeepseekV2ForCausalLM(lite())),
        "minicpm3": ("minicpm3", hf.MiniCPM3ForCausalLM(minicpm3())),
        "plm": ("plm", plm),
        "kimi-linear": ("kimi-linear", hf.KimiLinearForCausalLM(kimi())),
        "ling": ("bailingmoe3", hf.BailingHybridForCausalLM(ling())),
    }


SIZES = {"heads": HEADS, "kv_heads": HEADS, "kv_lora_rank": RANK, "qk_nope_head_dim": PLAIN,
         "qk_rope_head_dim": ROTATED, "v_head_dim": VALUE, "rms_norm_eps": 1e-6}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
           "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip


def lite() -> hf.PreTrainedConfig:
    return small(
        hf.DeepseekV2Config, q_lora_rank=QUERY_RANK, norm_topk_prob=False, topk_method="greedy",
        routed_scaling_factor=1.0, rope=YARN, **SIZES, **EXPERTS,
    )  # fmt: skip


def minicpm3() -> hf.PreTrainedConfig:
    """Its factors are those that llama.cpp has for all models, and its RoPE those of two sets of the same size."""
    rope = {
        "rope_type": "longrope",
        "long_factor": LONG,
        "short_factor": SHORT,
        "original_max_position_embeddings": 512,
    }
    return small(hf.MiniCPM3Config, q_lora_rank=QUERY_RANK, max_position_embeddings=512, rope=rope, **SIZES)


def glm() -> hf.PreTrainedConfig:
    options = EXPERTS | {"norm_topk_prob": True, "routed_scaling_factor": 1.8, "q_lora_rank": QUERY_RANK}
    return small(hf.Glm4MoeLiteConfig, tie_word_embeddings=False, **SIZES, **options)


def kimi() -> hf.PreTrainedConfig:
    options = EXPERTS | {"num_experts": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "q_lora_rank": None}
    return small(
        hf.KimiLinearConfig, tie_word_embeddings=False, layer_types=["linear_attention", "full_attention"],
        linear_head_dim=32, linear_num_heads=HEADS, **SIZES, **options,
    )  # fmt: skip


def ling() -> hf.PreTrainedConfig:
    """Eight experts in four groups, of which a token uses two."""
    groups = {"num_local_experts": 8, "n_group": 4, "topk_group": 2}
    options = EXPERTS | groups | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": QUERY_RANK}
    return small(
        hf.BailingHybridConfig, tie_word_embeddings=False, head_dim=32, layer_group_size=2, **SIZES, **options,
    )  # fmt: skip


def configuration(rope: dict[str, Any], **others: Any) -> hf.PreTrainedConfig:
    options = {"q_lora_rank": QUERY_RANK, "norm_topk_prob": True, "routed_scaling_factor": 1.5} | EXPERTS | others
    return small(hf.DeepseekV3Config, rope=rope, **SIZES, **options)


def write(path: Path, arch: str, model: hf.PreTrainedModel, *, apart: bool) -> None:
    """apart: `attn_k_b` and `attn_v_b` are tensors of their own, and fields describe rows of the cache."""
    config = model.config
    writer = begin(path, arch, config)
    hybrid = arch in HYBRIDS
    writer.add_head_count_kv([0, 1] if hybrid else 1 if apart else HEADS)
    if hybrid:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_kda_head_dim(config.linear_head_dim)
    if arch == "bailingmoe3":
        writer.add_bool(f"{arch}.kda.safe_gate", config.kda_safe_gate)
        writer.add_float32(f"{arch}.kda.gate_lower_bound", config.kda_lower_bound)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(RANK)
    writer.add_key_length(RANK + ROTATED if apart else PLAIN + ROTATED)
    writer.add_value_length(RANK if apart else VALUE)
    if apart:
        writer.add_key_length_mla(PLAIN + ROTATED)
        writer.add_value_length_mla(VALUE)
    if arch in ("deepseek2", *HYBRIDS):
        write_experts(writer, config, sigmoid=apart)
    writer.add_rope_dimension_count(ROTATED)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "deepseek2":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(YARN["factor"])
        writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * MULTIPLIER)
    if arch == "minicpm3":
        for name in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    byte_level(writer)
    for name, weight in tensors(model, apart=apart):
        writer.add_tensor(name, np.ascontiguousarray(weight))
    finish(writer)


def write_experts(writer: gguf.GGUFWriter, config: hf.PreTrainedConfig, *, sigmoid: bool) -> None:
    writer.add_leading_dense_block_count(EXPERTS["first_k_dense_replace"])
    writer.add_expert_count(getattr(config, "num_local_experts", EXPERTS["n_routed_experts"]))
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)


def tensors(model: hf.PreTrainedModel, *, apart: bool) -> Iterator[tuple[str, Array]]:
    state = {name: each.numpy() for name, each in model.state_dict().items()}
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    if not model.config.tie_word_embeddings:
        yield "output.weight", state["lm_head.weight"]
    for layer in range(model.config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        for name, stem in NAMES.items():
            if (weight := state.get(f"{theirs}{name}.weight")) is not None:
                yield f"{ours}{stem}.weight", weight
        both, gate = (state.get(f"{theirs}self_attn.{name}.weight") for name in ("kv_b_proj", "g_proj"))
        if gate is not None:
            yield f"{ours}{'ssm_g_a' if both is None else 'attn_gate'}.weight", gate
        if both is None:
            yield from delta_tensors(state, theirs, ours)
        elif apart:
            heads = both.reshape(HEADS, PLAIN + VALUE, RANK)
            yield f"{ours}attn_k_b.weight", heads[:, :PLAIN].swapaxes(1, 2)
            yield f"{ours}attn_v_b.weight", heads[:, PLAIN:]
        else:
            yield f"{ours}attn_kv_b.weight", both
        if (bias := state.get(f"{theirs}mlp.gate.e_score_correction_bias")) is not None:
            yield f"{ours}exp_probs_b.bias", bias
        if (fused := state.get(f"{theirs}mlp.experts.gate_up_proj")) is not None:
            gates, ups = np.split(fused, 2, axis=1)
            yield f"{ours}ffn_gate_exps.weight", gates
            yield f"{ours}ffn_up_exps.weight", ups
            yield f"{ours}ffn_down_exps.weight", state[f"{theirs}mlp.experts.down_proj"]


def delta_tensors(state: dict[str, Array], theirs: str, ours: str) -> Iterator[tuple[str, Array]]:
    """Those of Kimi Delta Attention that have other shapes in files, or are no matrices."""
    for part, taps in zip("qkv", np.split(state[f"{theirs}self_attn.conv1d.weight"], 3), strict=True):
        yield f"{ours}ssm_conv1d_{part}.weight", taps.reshape(1, len(taps), 1, -1)
    rates = np.exp(state[f"{theirs}self_attn.forget_gate.A_log"])
    bounded = f"{theirs}self_attn.forget_gate.f_proj.weight" in state  # Ling's
    yield f"{ours}ssm_a", rates.reshape(-1, 1) if bounded else -rates
    yield f"{ours}ssm_dt.bias", state[f"{theirs}self_attn.forget_gate.dt_bias"]


if __name__ == "__main__":
    run(main)

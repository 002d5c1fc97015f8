"""Make the golden model of multi-head latent attention: a tiny DeepSeek-V3, one layer dense, one of experts.

    PYTHON tests/golden/latent.py [OUT]

writes `deepseek2.gguf`, in float32, with the tensors and fields of llama.cpp's converter, and `deepseek2.npz`: tokens,
int32 [64], and transformers' logits after the last 8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from families import small
from make import LOGIT_STEP, Array, fill, forward, random_tokens
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedConfig, PreTrainedModel
from write import byte_level

LAST = 8
HEADS, RANK, QUERY_RANK, PLAIN, ROTATED, VALUE = 2, 32, 32, 32, 16, 16
MULTIPLIER = 0.7
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": MULTIPLIER,
        "mscale_all_dim": MULTIPLIER}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def main(out: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = fill(DeepseekV3ForCausalLM(configuration(YARN)).eval(), seed=71)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    tokens = random_tokens(71)
    write(out / "deepseek2.gguf", model)
    logits = forward(model, None, tokens, position=0)[-LAST:]
    np.savez_compressed(
        out / "deepseek2.npz", tokens=tokens, logits=np.round(logits / LOGIT_STEP) * np.float32(LOGIT_STEP)
    )


def configuration(rope: dict[str, Any]) -> PreTrainedConfig:
    return small(
        DeepseekV3Config, heads=HEADS, kv_heads=HEADS, q_lora_rank=QUERY_RANK, kv_lora_rank=RANK,
        qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTATED, v_head_dim=VALUE, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.5, rms_norm_eps=1e-6, rope=rope,
    )  # fmt: skip


def write(path: Path, model: PreTrainedModel) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_q_lora_rank(QUERY_RANK)
    writer.add_kv_lora_rank(RANK)
    writer.add_key_length(RANK + ROTATED)
    writer.add_value_length(RANK)
    writer.add_key_length_mla(PLAIN + ROTATED)
    writer.add_value_length_mla(VALUE)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(ROTATED)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(YARN["factor"])
    writer.add_rope_scaling_orig_ctx_len(YARN["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * MULTIPLIER)
    byte_level(writer)
    for name, weight in tensors(model):
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: PreTrainedModel) -> Iterator[tuple[str, Array]]:
    state = {name: each.numpy() for name, each in model.state_dict().items()}
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    for layer in range(model.config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        for name, stem in NAMES.items():
            if (weight := state.get(f"{theirs}{name}.weight")) is not None:
                yield f"{ours}{stem}.weight", weight
        both = state[f"{theirs}self_attn.kv_b_proj.weight"].reshape(HEADS, PLAIN + VALUE, RANK)
        yield f"{ours}attn_k_b.weight", both[:, :PLAIN].swapaxes(1, 2)
        yield f"{ours}attn_v_b.weight", both[:, PLAIN:]
        if (bias := state.get(f"{theirs}mlp.gate.e_score_correction_bias")) is not None:
            yield f"{ours}exp_probs_b.bias", bias
            fused = state[f"{theirs}mlp.experts.gate_up_proj"]
            gates, ups = np.split(fused, 2, axis=1)
            yield f"{ours}ffn_gate_exps.weight", gates
            yield f"{ours}ffn_up_exps.weight", ups
            yield f"{ours}ffn_down_exps.weight", state[f"{theirs}mlp.experts.down_proj"]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

"""Golden models of the architectures that llama.cpp alone runs: mixtures of experts, hybrids, windows of several kinds.

llama.cpp's own converter writes their files, because their layouts are its own; only the vocabulary is ours.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py PYTHON tests/golden/fallback.py [OUT [NAME …]]

writes `NAME.gguf`, in float32, and `NAME.npz`: tokens, int32 [64], and transformers' logits after the last 8.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import torch
import transformers as hf
from families import WINDOW, small
from make import GAIN, NORM_SPREAD, fill, forward, random_tokens, rounded
from write import byte_level, bytes_vocabulary, run

LINEAR = {  # of Qwen 3.5's DeltaNet; two of its value heads share a key head
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
SECTIONS = {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_n_groups": 1}
FULL, LAST = "full_attention", 8
MXFP4 = gguf.GGMLQuantizationType.MXFP4  # of gpt-oss's experts, as it is published


def tiny(kind: type[hf.PreTrainedConfig], **others: Any) -> hf.PreTrainedConfig:
    return small(kind, **({"hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 32} | others))


def configurations() -> dict[str, hf.PreTrainedConfig]:
    """By the name of the golden file."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
            "original_max_position_embeddings": 128}  # fmt: skip
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}  # fmt: skip
    return {
        "qwen3moe": tiny(
            hf.Qwen3MoeConfig, head_dim=16, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1, theta=1e6,
            **EXPERTS,
        ),
        "lfm2": tiny(
            hf.Lfm2Config, norm_eps=1e-5, block_auto_adjust_ff_dim=False, conv_L_cache=3, layer_types=["conv", FULL],
            theta=1e6,
        ),
        "qwen35": tiny(hf.Qwen3_5TextConfig, rope=SECTIONS, **LINEAR),
        "gpt-oss": tiny(
            hf.GptOssConfig, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, hidden=32,
            tie_word_embeddings=False,
            rope=yarn, theta=150_000.0, layer_types=["sliding_attention", FULL],
        ),
        "gemma4": tiny(
            hf.Gemma4TextConfig, layers=4, head_dim=16, sliding_window=WINDOW, num_kv_shared_layers=2, ffn=16,
            layer_types=["sliding_attention", FULL] * 2, hidden_size_per_layer_input=4,
            vocab_size_per_layer_input=272, final_logit_softcapping=5.0, use_double_wide_mlp=True,
            per_layer_config={"1": {"head_dim": 32}, "3": {"head_dim": 32}}, rope_parameters=rope,
        ),
        "qwen35moe": tiny(
            hf.Qwen3_5MoeTextConfig, rope=SECTIONS, shared_expert_intermediate_size=16, **EXPERTS, **LINEAR
        ),
        "lfm2moe": tiny(
            hf.Lfm2MoeConfig, norm_eps=1e-5, conv_L_cache=3, layer_types=["conv", FULL], num_dense_layers=1,
            use_expert_bias=True, norm_topk_prob=True, theta=1e6, **EXPERTS,
        ),
        "granitehybrid": tiny(
            hf.GraniteMoeHybridConfig, layer_types=["linear_attention", FULL], num_local_experts=0,
            num_experts_per_tok=0, shared_intermediate_size=32, embedding_multiplier=3.0, logits_scaling=2.0,
            residual_multiplier=0.5, attention_multiplier=0.2, mamba_n_heads=2, mamba_d_head=16,
            position_embedding_type=None, **MAMBA,
        ),
        "nemotron_h": tiny(
            hf.NemotronHConfig, head_dim=16, layers_block_type=["linear_attention", FULL, "mlp"], ssm_state_size=16,
            mamba_num_heads=4, mamba_head_dim=16, n_groups=1, chunk_size=16, layers=3,
        ),
        "falcon-h1": tiny(
            hf.FalconH1Config, layers=1, head_dim=16, tie_word_embeddings=False,
            mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, embedding_multiplier=2.0,
            lm_head_multiplier=0.5, key_multiplier=0.7, attention_out_multiplier=0.8, ssm_in_multiplier=0.9,
            ssm_out_multiplier=0.6, mlp_multipliers=[0.9, 0.8], ssm_multipliers=[0.9, 0.8, 0.7, 0.6, 0.5], **MAMBA,
        ),
        "gemma4moe": tiny(
            hf.Gemma4TextConfig, head_dim=16, kv_heads=2, sliding_window=WINDOW,
            layer_types=["sliding_attention", FULL], hidden_size_per_layer_input=0, final_logit_softcapping=5.0,
            enable_moe_block=True, num_experts=4,
            top_k_experts=2, moe_intermediate_size=16, attention_k_eq_v=True, rope_parameters=rope,
            per_layer_config={"1": {"head_dim": 32, "num_key_value_heads": 1}},
        ),
        "mamba": tiny(hf.MambaConfig, layers=1, time_step_rank=16, use_mambapy=False),
        "falcon-mamba": tiny(
            hf.FalconMambaConfig, layers=1, time_step_rank=16, mixer_rms_eps=1e-5, tie_word_embeddings=False,
        ),
        "jamba": tiny(
            hf.JambaConfig, layers=3, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=3,
            expert_layer_offset=2, num_experts=4, num_experts_per_tok=2, mamba_dt_rank=16, ffn=16,
        ),
    }  # fmt: skip


def main(out: Path, *names: str) -> None:
    for seed, (name, config) in enumerate(configurations().items(), start=61):
        if names and name not in names:
            continue
        model = settle(fill(hf.AutoModelForCausalLM.from_config(config).eval(), seed), seed)
        write(out / f"{name}.gguf", model)
        tokens = random_tokens(seed)
        logits = forward(model, None, tokens, position=0)[-LAST:]
        np.savez_compressed(out / f"{name}.npz", tokens=tokens, logits=rounded(logits))


def settle(model: hf.PreTrainedModel, seed: int) -> hf.PreTrainedModel:
    """Draw what `fill` takes for norms in the ranges that these have: decays, time steps, scales."""
    random = np.random.default_rng(1000 + seed)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        drawn = random.standard_normal(weight.shape)
        if name.endswith("A_log"):
            weight.copy_(torch.from_numpy(0.5 * drawn))
        elif name.endswith(("experts.down_proj", "experts.gate_up_proj")) and model.config.model_type == "gpt_oss":
            rows = np.ascontiguousarray((GAIN * drawn / np.sqrt(weight.shape[1])).swapaxes(1, 2), np.float32)
            exact = gguf.quants.dequantize(gguf.quants.quantize(rows, MXFP4), MXFP4)
            weight.copy_(torch.from_numpy(exact).transpose(1, 2))
        elif name.endswith(("dt_bias", "expert_bias", "sinks")):
            weight.copy_(torch.from_numpy(drawn))
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            weight.copy_(torch.from_numpy(1 + NORM_SPREAD * drawn))
        elif name.endswith("dt_proj.weight"):
            weight.copy_(torch.from_numpy(drawn / np.sqrt(weight.shape[1])))
        elif name.endswith("conv1d.weight"):
            weight.copy_(torch.from_numpy(0.5 * drawn))
        elif "norm" in name and model.config.model_type.startswith("gemma4"):  # these count from 0
            weight.copy_(torch.from_numpy(1 + NORM_SPREAD * drawn))
        elif name.endswith("norm.weight") and model.config.model_type.startswith("qwen3_5"):
            weight.copy_(torch.from_numpy(("linear_attn" in name) + NORM_SPREAD * drawn))  # these from 1
    return model


def write(path: Path, model: hf.PreTrainedModel) -> None:
    """Through a folder of Hugging Face, as users come by their files."""
    from conversion import get_model_class

    def force_quant(_self: Any, name: str, _new: str, _layer: int | None, dims: int) -> Any:
        stems = ("down_proj", "gate_proj", "up_proj", "gate_up_proj")
        is_expert = name.removesuffix(".weight").endswith(stems) and dims == 3
        return MXFP4 if is_expert and model.config.model_type == "gpt_oss" else False

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        kind: Any = get_model_class(type(model).__name__)
        own = {"model_arch": kind.model_arch, "no_mtp": True, "set_vocab": lambda self: byte_level(self.gguf_writer)}
        ours = type(kind.__name__, (kind,), own | {"tensor_force_quant": force_quant})
        hparams = kind.load_hparams(Path(folder), False)
        # Where the converter expects the words of published checkpoints, not those that transformers writes now:
        if model.config.model_type == "granitemoehybrid":
            hparams["layer_types"] = ["mamba", "attention"]
            hparams = {key: value for key, value in hparams.items() if "expert" not in key}
        elif model.config.model_type == "nemotron_h":
            hparams["hybrid_override_pattern"] = "M*-"
            hparams = {key: value for key, value in hparams.items() if "expert" not in key and "group" not in key}
            hparams["n_groups"] = 1
        elif model.config.model_type == "gemma4_text":
            tokens = {token: number for number, token in enumerate(bytes_vocabulary())}
            Path(folder, "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
        elif model.config.model_type.startswith("qwen3_5"):
            hparams["rope_parameters"]["mrope_section"] = [*SECTIONS["mrope_section"], 0]
        converter = ours(
            Path(folder), gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=hparams, model_name=path.stem
        )
        converter.write()


if __name__ == "__main__":
    run(main)

"""Make the golden Hugging Face folders: tiny random models as transformers saves them, and what it answers for them.

Run it through `make golden`, after `make.py`. Beside itself, or into the folder it is given, it writes (with names of
folders behind that, these alone)

    folders/NAME/      config.json, safetensors, tokenizer.json … of every architecture that we read
    folders/NAME.npz   tokens [40], and logits [8, vocab] in float32 after the last of them
    folders/awq, gptq  4-bit checkpoints, packed here as their formats define it, and `weights` [out, in] of one
                       matrix as computed before packing
    folders/spm.model  the vocabulary of spm.gguf in SentencePiece's own format

Weights are drawn as in `make.py`, then rounded to the type that the folder stores, and so are exact there.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
import torch
import transformers as hf
from fallback import MXFP4, settle
from fallback import configurations as mixtures_and_hybrids
from families import LLAMA3, MINISTRAL, WINDOW, YARN, small
from families import configurations as families
from latent import configuration as latent
from latent import glm, minicpm3
from make import fill, rounded, train_sentencepiece
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from write import CHATML, CONTROL, LAYER_NORM, byte_pairs, bytes_vocabulary, run

TOKENS, LAST = 40, 8
GROUP = 32  # of the 4-bit checkpoints
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] "
    "+ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
OF_FAMILIES = ("arcee", "chatglm", "cohere2", "exaone4", "glm4", "nemotron", "seed_oss", "starcoder2")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_ORDER[i] of its eight
SEEDS = {  # of each folder, by name, so that a folder more changes none of the others
    "llama": 51, "mistral": 52, "qwen2": 53, "qwen3": 54, "gemma2": 55, "gemma3_text": 56, "gemma3": 57, "phi3": 58,
    "gpt2": 59, "granite": 60, "smollm3": 61, "ministral3": 62, "granitemoehybrid": 63, "qwen3_moe": 64,
    "qwen3_5_text": 65, "qwen3_5_moe_text": 66, "lfm2": 67, "lfm2_moe": 68, "gpt_oss": 69, "gemma4_text": 70,
    "granite_mamba": 71, "granite_experts": 72, "nemotron_h": 73, "falcon_mamba": 74, "jamba": 75, "arcee": 74,
    "glm": 75, "cohere2": 76, "exaone4": 77, "glm4": 78, "nemotron": 79, "seed_oss": 80, "starcoder2": 81,
    "gemma4_moe": 82, "deepseek_v3": 83, "minicpm3": 84, "glm4_moe_lite": 87, "awq": 71, "gptq": 72,
}  # fmt: skip


def gemma3(**others: Any) -> dict[str, Any]:
    """Options of a small Gemma 3: every second layer sees everything."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    return {
        "layers": 4, "kv_heads": 1, "ffn": 32, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": rope,
    } | others  # fmt: skip


def multimodal() -> hf.Gemma3Config:
    """With a vision tower, which our reader leaves out."""
    text = small(hf.Gemma3TextConfig, **gemma3(layers=2, layer_types=["sliding_attention", "full_attention"]))
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return hf.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)


def configurations() -> dict[str, tuple[Any, torch.dtype]]:
    """By the name of the folder: the configuration and the type that the weights are stored in."""
    return {
        "llama": (
            small(hf.LlamaConfig, head_dim=16, rope=LLAMA3, theta=1e5, tie_word_embeddings=False, attention_bias=True),
            torch.float32,
        ),
        "mistral": (small(hf.MistralConfig, vocab_size=800, head_dim=16, sliding_window=WINDOW), torch.bfloat16),
        "qwen2": (small(hf.Qwen2Config, hidden=48, heads=6, rope=YARN, theta=1e6), torch.bfloat16),
        "qwen3": (small(hf.Qwen3Config, head_dim=16, theta=1e6, tie_word_embeddings=False), torch.float16),
        "gemma2": (
            small(hf.Gemma2Config, vocab_size=802, layers=4, head_dim=16, query_pre_attn_scalar=16,
                sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
            torch.bfloat16,
        ),
        "gemma3_text": (small(hf.Gemma3TextConfig, **gemma3()), torch.bfloat16),
        "gemma3": (multimodal(), torch.bfloat16),
        "phi3": (families()["phi3-longrope"], torch.float16),
        "gpt2": (
            hf.GPT2Config(
                vocab_size=280, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2
            ),
            torch.float32,
        ),
        "granite": (
            small(hf.GraniteConfig, heads=2, kv_heads=1, ffn=16, attention_bias=True, attention_multiplier=0.1,
                embedding_multiplier=1.7, residual_multiplier=0.4, logits_scaling=0.6),
            torch.bfloat16,
        ),
        "smollm3": (small(hf.SmolLM3Config, layers=4, heads=2, kv_heads=1, ffn=16, theta=2e6), torch.float16),
        "ministral3": (
            small(hf.Ministral3Config, heads=2, kv_heads=1, ffn=16, head_dim=16, rope=MINISTRAL),
            torch.bfloat16,
        ),
        "granitemoehybrid": (
            small(hf.GraniteMoeHybridConfig, heads=2, kv_heads=1, num_local_experts=0, num_experts_per_tok=0,
                shared_intermediate_size=16, layer_types=["full_attention"] * 2, position_embedding_type="rope",
                mamba_n_heads=2, attention_multiplier=0.1, embedding_multiplier=1.7, residual_multiplier=0.4,
                logits_scaling=0.6),
            torch.bfloat16,
        ),
        **{name: (config, torch.bfloat16) for name, config in of_2026().items()},
        **{config.model_type: (config, torch.bfloat16) for config in of_families()},
        "gemma4_moe": (mixtures_and_hybrids()["gemma4moe"], torch.bfloat16),
        "deepseek_v3": (latent({}), torch.bfloat16),
        "minicpm3": (minicpm3(), torch.bfloat16),
        "glm4_moe_lite": (glm(), torch.bfloat16),
    }  # fmt: skip


def of_families() -> list[Any]:
    """Those of families.py whose folders hold nothing of their own."""
    found = [families()[name] for name in OF_FAMILIES]
    for config in found:
        if LAYER_NORM.get(config.model_type):
            del config.rms_norm_eps
    return found


def of_2026() -> dict[str, Any]:
    """Those of fallback.py in which the order of value heads counts, and widths are not those that the file says."""
    found = mixtures_and_hybrids()
    for name in ("qwen35", "qwen35moe"):
        found[name].linear_num_key_heads, found[name].linear_num_value_heads = 2, 4
    found["lfm2"].block_auto_adjust_ff_dim, found["lfm2"].block_multiple_of = True, 16  # 22 becomes 32
    found["nemotron_h"].tie_word_embeddings = False  # transformers does not tie them, whatever it says
    found["granite_experts"] = copy.deepcopy(found["granitehybrid"])
    found["granite_experts"].num_local_experts, found["granite_experts"].num_experts_per_tok = 4, 2
    names = {
        "qwen3moe": "qwen3_moe", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "lfm2": "lfm2",
        "lfm2moe": "lfm2_moe", "gpt-oss": "gpt_oss", "gemma4": "gemma4_text",
        "granitehybrid": "granite_mamba", "granite_experts": "granite_experts", "nemotron_h": "nemotron_h",
        "falcon-mamba": "falcon_mamba", "jamba": "jamba",
    }  # fmt: skip
    return {theirs: found[ours] for ours, theirs in names.items()}


def main(out: Path, *names: str) -> None:
    if not names:
        shutil.rmtree(out / "folders", ignore_errors=True)
    (out / "folders").mkdir(parents=True, exist_ok=True)
    for name, (config, dtype) in configurations().items():
        if names and name not in names:
            continue
        seed = SEEDS[name]
        config._attn_implementation = "eager"
        kind = hf.Gemma3ForConditionalGeneration if name == "gemma3" else hf.AutoModelForCausalLM
        model = fill(kind._from_config(config) if name == "gemma3" else kind.from_config(config), seed)
        if name in of_2026() or name == "gemma4_moe":
            model = settle(model, seed)
        folder = out / "folders" / name
        model.to(dtype).save_pretrained(folder, max_shard_size="60KB" if name == "llama" else "1GB")
        read = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        write_answers(folder, read.eval(), seed)
        if name == "gpt_oss":
            as_mxfp4(folder)
        tokenizer_of(name).save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    if names:
        return
    pieces = train_sentencepiece()
    (out / "folders" / "spm.model").write_bytes(pieces.serialized_model_proto())
    for method in ("awq", "gptq"):
        write_quantized(out / "folders" / method, method, SEEDS[method])


def as_mxfp4(folder: Path) -> None:
    """Store experts, which `settle` drew on that grid, as publishers do: bytes of two neighbours, and exponents."""
    path, found = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("experts.down_proj", "experts.gate_up_proj")):
            found[name] = tensor
            continue
        rows = np.ascontiguousarray(tensor.float().numpy().swapaxes(1, 2))
        parts = gguf.quants.quantize(rows, MXFP4).reshape(*rows.shape[:2], -1, 17)
        scales, codes = parts[..., 0], np.concatenate([parts[..., 1:] & 15, parts[..., 1:] >> 4], axis=-1)
        found[f"{name}_scales"] = torch.from_numpy(scales.copy())
        found[f"{name}_blocks"] = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
    save_file(found, path, metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def write_answers(folder: Path, model: hf.PreTrainedModel, seed: int, **others: Any) -> None:
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = np.random.default_rng(100 + seed).integers(3, min(vocab, 272), TOKENS, dtype=np.int32)
    logits = model(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False).logits[0, -LAST:].numpy()
    np.savez_compressed(folder.with_suffix(".npz"), tokens=tokens, logits=rounded(logits), **others)


def tokenizer_of(name: str) -> hf.PreTrainedTokenizerFast:
    if name in ("mistral", "gemma2"):
        return sentencepiece_bpe(gemma=name == "gemma2")
    return byte_level(name)


def byte_level(name: str) -> hf.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that cuts text as the model of that name usually does."""
    tokenizer = byte_pairs(bytes_vocabulary(), ignore_merges=name == "llama")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    if name == "llama" or name.startswith("qwen"):
        regex = "(?i:'s|'t|'re|'ve|'m|'ll|'d)" + words % ("{1,3}" if name == "llama" else "")
        split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    elif name == "gpt2":
        tokenizer.pre_tokenizer = plain
    if name.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    if name == "gpt2":
        tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("[x]  [y]", normalized=False)])
    if name == "llama":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
        )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=CONTROL[1], eos_token=CONTROL[2], unk_token=CONTROL[0],
        pad_token=CONTROL[2], chat_template=CHATML,
    )  # fmt: skip


def sentencepiece_bpe(gemma: bool) -> hf.PreTrainedTokenizerFast:
    """SentencePiece's vocabulary as merges, in the manner of Llama 2, or of Gemma with two more control tokens."""
    pieces = train_sentencepiece()
    vocab = {pieces.IdToPiece(i): i for i in range(pieces.GetPieceSize())}
    scored = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab and not pieces.IsByte(index) and not pieces.IsControl(index):
                scored.append((-pieces.GetScore(index), vocab[left], vocab[right], (left, right)))
    merges = [pair for *_, pair in sorted(scored)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(back)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    if gemma:
        turns = ("<start_of_turn>", "<end_of_turn>")
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in turns])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True,
        chat_template=GEMMA_TEMPLATE if gemma else None,
    )  # fmt: skip


def write_quantized(folder: Path, method: str, seed: int) -> None:
    """A Llama whose linear layers lie on 4-bit grids, packed by hand."""
    config = small(hf.LlamaConfig, hidden=64, heads=4, kv_heads=2, ffn=96, head_dim=16)
    config._attn_implementation = "eager"
    model = fill(hf.AutoModelForCausalLM.from_config(config), seed).eval()
    random = np.random.default_rng(seed)
    state: dict[str, torch.Tensor] = {}
    weights = np.zeros(0)
    for name, weight in model.named_parameters():
        if "proj" not in name:
            state[name] = weight.half()
            weight.copy_(state[name])
            continue
        packed, dense = {"awq": pack_awq, "gptq": pack_gptq}[method](weight.numpy().astype(np.float64), random)
        weight.copy_(torch.from_numpy(dense.astype(np.float16).astype(np.float32)))
        stem = name.removesuffix(".weight")
        state |= {f"{stem}.{part}": torch.from_numpy(np.ascontiguousarray(each)) for part, each in packed.items()}
        if name.endswith("layers.1.mlp.down_proj.weight"):
            weights = dense.astype(np.float32)
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    own = {"zero_point": True, "version": "gemm"} if method == "awq" else {"desc_act": True, "sym": False}
    said["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP, **own}
    (folder / "config.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
    byte_level("awq").save_pretrained(folder)
    write_answers(folder, model, seed, weights=weights)


def grid(weight: Any, groups: Any, random: Any) -> tuple[Any, Any, Any]:
    """Quants [out, in], zeros and float16 scales [out, groups] for the group of every column; clipped a little."""
    count = groups.max() + 1
    zeros = random.integers(5, 11, (len(weight), count))
    spread = np.stack([np.abs(weight[:, groups == group]).max(axis=1) for group in range(count)], axis=1)
    scales = (spread / 5).astype(np.float16)
    quants = np.clip(np.round(weight / scales[:, groups].astype(float)) + zeros[:, groups], 0, 15).astype(np.int64)
    return quants, zeros, scales


def dense(quants: Any, zeros: Any, scales: Any, groups: Any) -> Any:
    return (quants - zeros[:, groups]) * scales[:, groups].astype(np.float64)


def words(nibbles: Any) -> Any:
    """Eight nibbles along the last axis to a word, the first one lowest: int32."""
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(4)
    return np.bitwise_or.reduce(nibbles.astype(np.uint64) << shifts, axis=-1).astype(np.uint32).view(np.int32)


def pack_awq(weight: Any, random: Any) -> tuple[dict[str, Any], Any]:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    groups = np.arange(weight.shape[1]) // GROUP
    quants, zeros, scales = grid(weight, groups, random)

    def pack(values: Any) -> Any:
        return words(values.T.reshape(values.shape[1], -1, 8)[..., list(AWQ_ORDER)])

    packed = {"qweight": pack(quants), "qzeros": pack(zeros), "scales": scales.T}
    return packed, dense(quants, zeros, scales, groups)


def pack_gptq(weight: Any, random: Any) -> tuple[dict[str, Any], Any]:
    """qweight [in / 8, out], qzeros [groups, out / 8] (one less), scales [groups, out], g_idx [in] in any order."""
    groups = random.permutation(np.arange(weight.shape[1]) // GROUP)
    quants, zeros, scales = grid(weight, groups, random)
    rows, columns = weight.shape
    packed = {
        "qweight": words(quants.reshape(rows, columns // 8, 8)).T,
        "qzeros": words((zeros - 1).T.reshape(-1, rows // 8, 8)), "scales": scales.T, "g_idx": groups.astype(np.int32),
    }  # fmt: skip
    return packed, dense(quants, zeros, scales, groups)


if __name__ == "__main__":
    run(main)

"""Write a transformers model and a vocabulary as the GGUF file that llama.cpp expects.

Our own converters are tested against these files, so this goes straight to `gguf.GGUFWriter`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import torch
from gguf import TokenType
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel

Vocabulary = Callable[[gguf.GGUFWriter], None]
"""Adds the tokenizer's fields to a file."""

ARCHITECTURES = {  # GGUF's names, where they differ from transformers'
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "ministral3": "mistral3",
    "glm": "chatglm",
}
INTERLEAVED = ("arcee", "granite", "llama", "mistral3", "smollm3")  # architectures whose queries and keys GGUF reorders
LAYER_NORM = {  # the keys of its epsilon
    "stablelm": "layer_norm_eps", "starcoder2": "norm_epsilon", "nemotron": "norm_eps", "cohere2": "layer_norm_eps",
}  # fmt: skip
STATING_ROTATED = ("chatglm", "cohere2", "ernie4_5", "glm4", "nemotron", "phi3", "stablelm")  # rope.dimension_count
COUNTING_FROM_1 = ("gemma", "gemma2", "gemma3", "nemotron")  # weights of norms, in transformers
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2, as in SmolLM2
MERGES = ["Ġ t", "h e", "i n", "Ġt he", "Ġ a", "e r", "a n", "Ġa n", "Ġan d", "in g", "Ġ Ġ", "r e", "o n"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path, model: PreTrainedModel, vocabulary: Vocabulary) -> None:
    """Write every weight in float32, with all the metadata that llama.cpp's own converter writes."""
    config = model.config
    architecture = architecture_of(config)
    writer = begin(path, architecture, config)
    add_shape(writer, config)
    if architecture != "gpt2":
        add_rope(writer, config)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "phi3":  # 0 tells Phi 4 from Phi 3; llama.cpp ignores any other window
        writer.add_sliding_window(config.sliding_window or 0)
    elif getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture in INTERLEAVED:
        writer.add_vocab_size(config.vocab_size)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    vocabulary(writer)
    for name, weight in tensors(model, architecture):
        writer.add_tensor(name, np.ascontiguousarray(weight))
    finish(writer)


def begin(path: Path, architecture: str, config: PreTrainedConfig) -> gguf.GGUFWriter:
    """A file in float32 that says how large the model is."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem.replace("phi3", "phi 3"))  # for the real one llama.cpp expects certain tokens
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.n_embd if config.model_type == "gpt2" else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(main: Callable[..., None]) -> None:
    """Call it with the folder to write into, which the first argument names, and the other arguments."""
    torch.set_num_threads(1)  # one thread sums in one order
    torch.set_grad_enabled(False)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent, *sys.argv[2:])


def architecture_of(config: PreTrainedConfig) -> str:
    """GGUF's name."""
    return ARCHITECTURES.get(config.model_type, config.model_type)


def add_shape(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    if config.model_type == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if head_size(config) * config.num_attention_heads != config.hidden_size:  # else the readers' default is right
        writer.add_key_length(head_size(config))
        writer.add_value_length(head_size(config))
    if epsilon := LAYER_NORM.get(config.model_type):
        writer.add_layer_norm_eps(getattr(config, epsilon))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """The base for all layers, or for those that see everything; the scaling, as far as GGUF has fields for it."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    local = config.rope_parameters.get("sliding_attention")
    if config.model_type != "gemma2":  # llama.cpp's converter leaves the usual 10000 out
        writer.add_rope_freq_base(rope["rope_theta"])
    if local and local["rope_theta"] != 10_000.0:  # as long as that was the only value, it was not written
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if architecture_of(config) in (*INTERLEAVED, *STATING_ROTATED):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_size(config)))
    if config.model_type == "phi3":  # names no type: what scales is that there are tensors of factors
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope["rope_type"] == "longrope":
            longer = config.max_position_embeddings / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longer) / math.log(original)))
    elif rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if config.model_type == "ministral3":
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def tensors(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """All weights by their names in GGUF, laid out as there."""
    config = model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # a reader takes the embedding where there is no output.weight
        weight = tensor.numpy()
        if architecture in INTERLEAVED and name.endswith("q_proj.weight"):
            weight = interleave(weight, config.num_attention_heads)
        elif architecture in INTERLEAVED and name.endswith("k_proj.weight"):
            weight = interleave(weight, config.num_key_value_heads)
        elif name.endswith(("norm.weight", "layernorm.weight")) and architecture in COUNTING_FROM_1:
            weight = weight + 1  # transformers adds this 1 when it runs
        elif architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            weight = weight.T
        yield names.get_name(name, try_suffixes=(".weight", ".bias")), weight
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        # GGUF has no fields for this scaling: it stores what each frequency is divided by.
        size = head_size(config)
        plain = rope["rope_theta"] ** (-np.arange(0, size, 2, dtype=np.float64) / size)
        scaled = model.model.rotary_emb.inv_freq.double().numpy()
        yield "rope_freqs.weight", (plain / scaled).astype(np.float32)
    elif rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)


def head_size(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def interleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key projection for GGUF's RoPE.

    Hugging Face rotates channel i with i + size/2; GGUF's llama rotates neighbours, 2i with 2i + 1.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def bytes_vocabulary() -> list[str]:
    """Control tokens, the 256 bytes in GPT-2's printable alphabet, and the merged tokens: 272 in all."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]  # moved to U+0100 and up
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    return CONTROL + alphabet + [merge.replace(" ", "") for merge in MERGES]


def byte_pairs(tokens: list[str], **options: Any) -> Tokenizer:
    """Merges bytes, as SmolLM2 does: digits stay apart. options: of `models.BPE`."""
    vocab, merges = {text: number for number, text in enumerate(tokens)}, [tuple(each.split()) for each in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    return tokenizer


def bytes_of(
    tokens: list[str], control: Collection[str], *, end: int = 2, padding: int = 2, template: str = CHATML
) -> Vocabulary:
    """A byte-level BPE tokenizer in the manner of SmolLM2. end, padding: ids of these tokens."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([TokenType.CONTROL if token in control else TokenType.NORMAL for token in tokens])
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(end)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(padding)
        writer.add_add_bos_token(False)
        writer.add_add_space_prefix(False)
        writer.add_chat_template(template)

    return add


byte_level = bytes_of(bytes_vocabulary(), CONTROL)


def sentencepiece_bpe(pieces: sentencepiece.SentencePieceProcessor) -> Vocabulary:
    """A SentencePiece tokenizer with byte fallback, in the manner of Llama 2."""

    def kind(i: int) -> TokenType:
        if pieces.IsUnknown(i):
            return TokenType.UNKNOWN
        if pieces.IsControl(i):
            return TokenType.CONTROL
        return TokenType.BYTE if pieces.IsByte(i) else TokenType.NORMAL

    def add(writer: gguf.GGUFWriter) -> None:
        ids = range(pieces.GetPieceSize())
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([pieces.IdToPiece(i) for i in ids])
        writer.add_token_scores([pieces.GetScore(i) for i in ids])
        writer.add_token_types([kind(i) for i in ids])
        writer.add_bos_token_id(pieces.bos_id())
        writer.add_eos_token_id(pieces.eos_id())
        writer.add_unk_token_id(pieces.unk_id())
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(False)
        writer.add_add_space_prefix(True)

    return add

"""Write a transformers Llama model and a vocabulary as the GGUF file that llama.cpp expects.

Our own converters are tested against these files, so this goes straight to `gguf.GGUFWriter`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
from gguf import TokenType
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

Vocabulary = Callable[[gguf.GGUFWriter], None]
"""Adds the tokenizer's fields to a file."""

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2, as in SmolLM2
MERGES = ["Ġ t", "h e", "i n", "Ġt he", "Ġ a", "e r", "a n", "Ġa n", "Ġan d", "in g", "Ġ Ġ", "r e", "o n"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path, model: LlamaForCausalLM, vocabulary: Vocabulary) -> None:
    """Write every weight in float32, with all the metadata that llama.cpp reads."""
    config = model.config
    head_size, theta = config.head_dim, config.rope_parameters["rope_theta"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if head_size * config.num_attention_heads != config.hidden_size:  # else the readers' default is right
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config.vocab_size)
    vocabulary(writer)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # a reader takes the embedding where there is no output.weight
        weight = tensor.numpy()
        if name.endswith("q_proj.weight"):
            weight = interleave(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = interleave(weight, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(weight))
    if config.rope_parameters["rope_type"] == "llama3":
        # GGUF has no fields for this scaling: it stores what each frequency is divided by.
        plain = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
        scaled = model.model.rotary_emb.inv_freq.double().numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def byte_level(writer: gguf.GGUFWriter) -> None:
    """A byte-level BPE tokenizer in the manner of SmolLM2, with a ChatML template."""
    tokens = bytes_vocabulary()
    plain = len(tokens) - len(CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(CONTROL) + [TokenType.NORMAL] * plain)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHATML)


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

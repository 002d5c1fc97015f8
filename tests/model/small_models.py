"""Tiny random models in any mixture of block types and in any shape, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from gguf.quants import quantize

from edge.formats.blocks import BLOCK_TYPES, FP4, dequantize
from edge.formats.small_floats import E4M3
from edge.types import AnyArray

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GAIN, HEAD_GAIN, NORM_SPREAD, BIAS_SPREAD = 1.2, 3.0, 0.2, 0.5  # as in golden/make.py: logits spread by about 3

# Where blocks have their float16 numbers, a scale and then a minimum's: byte and count.
NUMBERS = {
    "Q4_0": (0, 1), "Q4_1": (0, 2), "Q5_0": (0, 1), "Q5_1": (0, 2), "Q8_0": (0, 1), "IQ4_NL": (0, 1),
    "Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1),
    "IQ4_XS": (0, 1), "IQ3_S": (0, 1), "TQ1_0": (52, 1), "TQ2_0": (64, 1), "IQ3_XXS": (0, 1), "IQ2_XXS": (0, 1),
    "IQ2_XS": (0, 1), "IQ2_S": (0, 1), "IQ1_S": (0, 1), "IQ1_M": (48, 1), "Q1_0": (0, 1), "Q2_0": (0, 1),
}  # fmt: skip
CONTEXT = 512
UNWRITTEN = (  # which the gguf package does not quantize
    "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S",
    "IQ1_S", "IQ1_M", "Q1_0", "Q2_0", "NVFP4",
)  # fmt: skip

Edit = Callable[[dict[str, AnyArray]], None]
"""Changes the weights, by their names without `.weight`, before they are quantized."""


@dataclass(frozen=True)
class Small:
    """A shape. `types`: the block type of all matrices, or by name, with or without the layer; "" is all others'.

    `architecture`: one that `edge/model/architectures` has; Gemma's windows are as large as `window` says.
    """

    layers: int = 1
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head: int = 16
    value: int = 0  # values of a value; 0: those of a key, `head`
    ffn: int = 96
    vocab: int = 272
    tied: bool = True
    window: int = 0
    rope_freqs: bool = False
    types: str | Mapping[str, str] = field(default="F32", hash=False)
    seed: int = 1
    architecture: str = "llama"
    context: int = CONTEXT
    experts: int = 0  # of `ffn` values each, of which `used` serve a token
    used: int = 2

    def type_of(self, name: str) -> str:
        if isinstance(self.types, str):
            return self.types
        stem = name.rpartition(".")[2]
        return self.types.get(name, self.types.get(stem, self.types[""]))


def random_weights(small: Small) -> dict[str, AnyArray]:
    """float32 tensors, matrices [rows, columns]."""
    random = np.random.default_rng(small.seed)

    def matrix(rows: int, columns: int, gain: float = GAIN) -> AnyArray:
        return (random.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def norm(size: int = small.hidden) -> AnyArray:
        return (1 + NORM_SPREAD * random.standard_normal(size)).astype(np.float32)

    queries, keys, value = small.heads * small.head, small.kv_heads * small.head, small.value or small.head
    weights = {"token_embd": matrix(small.vocab, small.hidden, HEAD_GAIN), "output_norm": norm()}
    if not small.tied:
        weights["output"] = matrix(small.vocab, small.hidden, HEAD_GAIN)
    if small.rope_freqs:
        weights["rope_freqs"] = np.linspace(1, 8, small.head // 2, dtype=np.float32)
    for layer in range(small.layers):
        weights |= {
            f"blk.{layer}.attn_norm": norm(),
            f"blk.{layer}.attn_q": matrix(queries, small.hidden),
            f"blk.{layer}.attn_k": matrix(keys, small.hidden),
            f"blk.{layer}.attn_v": matrix(small.kv_heads * value, small.hidden),
            f"blk.{layer}.attn_output": matrix(small.hidden, small.heads * value),
            f"blk.{layer}.ffn_norm": norm(),
            f"blk.{layer}.ffn_gate": matrix(small.ffn, small.hidden),
            f"blk.{layer}.ffn_up": matrix(small.ffn, small.hidden),
            f"blk.{layer}.ffn_down": matrix(small.hidden, small.ffn),
        }
    family = small.architecture
    for layer in range(small.layers):
        at = f"blk.{layer}."
        if small.experts:
            weights[f"{at}ffn_gate_inp"] = matrix(small.experts, small.hidden)
            for name in ("ffn_gate", "ffn_up", "ffn_down"):
                rows, columns = weights.pop(f"{at}{name}").shape
                weights[f"{at}{name}_exps"] = matrix(small.experts * rows, columns).reshape(-1, rows, columns)
        if family in ("qwen3", "qwen3moe", "gemma3"):
            weights |= {f"{at}attn_q_norm": norm(small.head), f"{at}attn_k_norm": norm(small.head)}
        if family in ("gemma2", "gemma3"):
            weights |= {f"{at}post_attention_norm": norm(), f"{at}post_ffw_norm": norm()}
        if family in ("phi3", "gpt2"):
            weights[f"{at}attn_qkv"] = np.concatenate([weights.pop(f"{at}attn_{part}") for part in "qkv"])
        if family == "phi3":
            weights[f"{at}ffn_up"] = np.concatenate([weights.pop(f"{at}ffn_gate"), weights[f"{at}ffn_up"]])
        if family == "gpt2":
            del weights[f"{at}ffn_gate"]
    if family == "gpt2":
        weights["position_embd"] = matrix(small.context, small.hidden, HEAD_GAIN)
    biased = {"qwen2": ("attn_q", "attn_k", "attn_v"), "gpt2": ("attn", "ffn", "output_norm")}.get(family, ())
    for name in [name for name in weights if name.rpartition(".")[2].startswith(biased)]:
        bias = random.standard_normal(len(weights[name])) * BIAS_SPREAD
        weights[f"{name}.bias"] = bias.astype(np.float32)
    return weights


def random_bytes(kind: str, rows: int, columns: int, seed: int) -> AnyArray:
    """Blocks of any bytes, uint8 [rows, blocks, bytes of a block]."""
    _, values, size, _ = next(each for each in BLOCK_TYPES.values() if each.name == kind)
    return np.random.default_rng(seed).integers(0, 256, (rows, columns // values, size), dtype=np.uint8)


def set_numbers(raw: AnyArray, kind: str, numbers: AnyArray) -> None:
    """Write float16 numbers, [rows, blocks, 1 or 2], or fewer that are the same for all."""
    start, count = NUMBERS[kind]
    halves = np.broadcast_to(numbers.astype(np.float16), (*raw.shape[:2], count)).copy()
    if kind == "IQ1_M":  # four bits of the number at the end of each of four words
        words = np.ascontiguousarray(raw[:, :, start:]).view("<u2") & 0xFFF
        fours = halves.view("<u2") >> np.array([0, 4, 8, 12], np.uint16) << 12
        raw[:, :, start:] = (words | fours).view(np.uint8)
        return
    raw[:, :, start : start + 2 * count] = halves.view(np.uint8)


def random_quants(kind: str, rows: int, columns: int, deviation: float, seed: int) -> AnyArray:
    """Random weights with this standard deviation and mean 0, uint8 [rows, row bytes]."""
    raw = random_bytes(kind, rows, columns, seed)
    if kind == "NVFP4":
        wanted = np.random.default_rng(seed).uniform(0.5, 1.5, (*raw.shape[:2], 4)) * deviation / np.std(FP4) * 2
        raw[..., :4] = np.abs(E4M3[:127] - wanted[..., None]).argmin(axis=-1)
        return raw.reshape(rows, -1)
    two = NUMBERS[kind][1] == 2
    scaled, minima = [], []
    for found, numbers in ((scaled, [1, 0][: 1 + two]), (minima, [0, 1][: 1 + two])):
        set_numbers(raw, kind, np.array(numbers))
        found.append(dequantize(raw.reshape(rows, -1), kind))
    minimum = -np.mean(scaled) / np.mean(minima) if two else 0.0
    scale = deviation / np.std(scaled[0] + minimum * minima[0])
    uneven = np.random.default_rng(seed).uniform(0.5, 1.5, (*raw.shape[:2], 1))
    set_numbers(raw, kind, scale * uneven * np.array([1, minimum][: 1 + two]))
    return raw.reshape(rows, -1)


@dataclass(frozen=True)
class Special:
    """What a tokenizer has beside bytes: more control tokens, user-defined ones, and a chat template. Byte pairs that
    are one token: `\\n\\n`, as in Qwen's vocabulary."""

    control: tuple[str, ...] = ()
    defined: tuple[str, ...] = ()
    template: str | None = None


def write_small(
    path: Path,
    small: Small,
    edit: Edit | None = None,
    *,
    raw: Mapping[str, AnyArray] | None = None,
    special: Special | None = None,
    **fields: Any,
) -> Path:
    """Write a GGUF file.

    raw: bytes of some tensors, uint8 [rows, row bytes], instead of quantized weights. fields: more metadata, named
    without the architecture and with `__` for dots; a string or a number.
    """
    weights = random_weights(small)
    if edit:
        edit(weights)
    writer = gguf.GGUFWriter(path, small.architecture)
    writer.add_name(path.stem)
    writer.add_block_count(small.layers)
    writer.add_context_length(small.context)
    writer.add_embedding_length(small.hidden)
    writer.add_feed_forward_length(small.ffn)
    writer.add_head_count(small.heads)
    writer.add_head_count_kv(small.kv_heads)
    writer.add_key_length(small.head)
    writer.add_value_length(small.value or small.head)
    if small.architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_rope_dimension_count(small.head)
    writer.add_vocab_size(small.vocab)
    if small.window:
        writer.add_sliding_window(small.window)
    if small.experts:
        writer.add_expert_count(small.experts)
        writer.add_expert_used_count(small.used)
        writer.add_expert_feed_forward_length(small.ffn)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in fields.items():
        add[type(value)](f"{small.architecture}.{key.replace('__', '.')}", value)
    _add_tokenizer(writer, small.vocab, special or Special(), ["t h"] if special is None else ["t h", "Ċ Ċ"])
    for name, weight in weights.items():
        exact = weight.ndim == 1 or name == "position_embd" or name.endswith("ffn_gate_inp")
        kind = "F32" if exact else small.type_of(name)
        chosen = GGMLQuantizationType[kind]
        if raw and name in raw:
            data = raw[name]
        elif kind in UNWRITTEN:
            rows = int(np.prod(weight.shape[:-1]))
            data = random_quants(kind, rows, weight.shape[-1], float(weight.std()), small.seed + len(name))
            data = data.reshape(*weight.shape[:-1], -1)
        else:
            data = quantize(weight, chosen)
        writer.add_tensor(name if "." in name and name.endswith(".bias") else f"{name}.weight", data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def token_texts(vocab: int, special: Special, merges: list[str]) -> list[str]:
    """The vocabulary: control tokens, bytes, merged pairs, user-defined tokens, and words that nothing is merged to."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = [*CONTROL, *special.control, *alphabet, *(each.replace(" ", "") for each in merges), *special.defined]
    assert len(tokens) <= vocab, f"a vocabulary needs at least {len(tokens)} tokens"
    return tokens + [f"word{index}" for index in range(vocab - len(tokens))]


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int, special: Special, merges: list[str]) -> None:
    """A byte-level BPE tokenizer as in golden/write.py."""
    tokens = token_texts(vocab, special, merges)
    kinds = dict.fromkeys((*CONTROL, *special.control), TokenType.CONTROL)
    kinds |= dict.fromkeys(special.defined, TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if special.template is not None:
        writer.add_chat_template(special.template)

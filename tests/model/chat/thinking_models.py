"""Tiny models that think, in the manner of known families: their tokens and templates, and weights built so that each
token has one successor, or each position one token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from small_models import Edit, Small, Special, token_texts, write_small

from edge.types import AnyArray

_FOLDER = Path(__file__).parent / "templates" / "thinking"
_TEMPLATES = {path.stem: path.read_text("utf-8").removesuffix("\n") for path in _FOLDER.glob("*.jinja")}
# As Qwen3's: the model opens its thoughts itself, and an empty thought keeps it from thinking.
QWEN = _TEMPLATES["qwen"]
ALWAYS = _TEMPLATES["always"]  # as DeepSeek-R1's: the prompt opens the thoughts, and there is no switch
GEMMA4 = _TEMPLATES["gemma4"]  # the system turn asks for thoughts, in a channel of their own
HARMONY = _TEMPLATES["harmony"]  # gpt-oss's: a system message with the effort, and a channel for each message

SPECIALS = {
    "qwen": Special(defined=("<think>", "</think>"), template=QWEN),
    "always": Special(defined=("<think>", "</think>"), template=ALWAYS),
    "gemma4": Special(control=("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"), template=GEMMA4),
    "harmony": Special(
        control=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"), template=HARMONY
    ),
}
MERGES = ["t h", "Ċ Ċ"]


def write_chain(path: Path, special: Special, *chains: Sequence[str]) -> Path:
    """A model in which each token of a chain is followed by the next. Attention adds nothing; the feed-forward layer is
    a memory from tokens to their successors. Shaped as `llama-gqa-tied`."""
    small = Small(layers=2)
    ids = {text: index for index, text in enumerate(token_texts(small.vocab, special, MERGES))}
    follows = {ids[one]: ids[other] for chain in chains for one, other in pairwise(chain)}

    def edit(weights: dict[str, AnyArray]) -> None:
        unit = weights["token_embd"] / np.linalg.norm(weights["token_embd"], axis=1, keepdims=True)
        weights["token_embd"][:] = unit * np.sqrt(small.hidden)
        for name in weights:
            if name.endswith("norm"):
                weights[name][:] = 1
            elif name.endswith(("attn_output", "ffn_down", "ffn_gate", "ffn_up")):
                weights[name][:] = 0
        for slot, (one, other) in enumerate(follows.items()):
            weights["blk.0.ffn_gate"][slot] = weights["blk.0.ffn_up"][slot] = unit[one]
            weights["blk.0.ffn_down"][:, slot] = unit[other] * np.sqrt(small.hidden)

    return write_small(path, small, edit, special=special)


def write_script(path: Path, special: Special, start: int, script: Sequence[int], context: int = 512) -> Path:
    """A model that answers a prompt of `start` tokens with these tokens, whatever the prompt: positions choose."""
    small = Small(architecture="gpt2", context=context)
    return write_small(path, small, _by_position(start, script), special=special)


def _by_position(start: int, script: Sequence[int]) -> Edit:
    def edit(weights: dict[str, AnyArray]) -> None:
        embeddings = weights["token_embd"]
        for name in weights:
            if name.endswith((".bias", "attn_output", "ffn_down")):
                weights[name][:] = 0
            elif name.endswith("norm"):
                weights[name][:] = 1
        weights["position_embd"][:] = 0
        for index, token in enumerate(script):
            weights["position_embd"][start - 1 + index] = 8 * embeddings[token]

    return edit

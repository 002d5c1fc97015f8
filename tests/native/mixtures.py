"""Mixtures whose routers have favourites and whose choices persist, as those of trained models.

Uniform choices cannot test a cache: whatever it evicts, it finds as many.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_models import Small, write_small

from edge.model.model import Model, open_model
from edge.types import AnyArray, IntArray

TOPICS = 4
SHAPE = {
    "layers": 3, "hidden": 256, "heads": 4, "kv_heads": 2, "head": 64, "ffn": 64, "experts": 24, "used": 3,
    "architecture": "qwen3moe",
}  # fmt: skip
_LIKED, _OF_TOPIC = 1.0, 1.0


def skewed_model(path: Path, *, types: dict[str, str] | None = None, **others: object) -> Model:
    """Tokens have a direction in common, in which some experts are liked better by Zipf's law, and one for each topic
    (token mod TOPICS), in which others are."""
    small = Small(**{**SHAPE, "types": types or {"": "Q4_0"}, **others})  # type: ignore[arg-type]
    random = np.random.default_rng(3)

    def edit(weights: dict[str, AnyArray]) -> None:
        table = weights["token_embd"]
        large = 0.5 * float(np.sqrt(np.mean(table**2)) * np.sqrt(small.hidden))
        table[:, : TOPICS + 1] = 0
        table[:, 0] = large
        table[np.arange(len(table)), 1 + np.arange(len(table)) % TOPICS] = large
        for layer in range(small.layers):
            router = weights[f"blk.{layer}.ffn_gate_inp"]
            router[:, 0] = -_LIKED * np.log(1 + random.permutation(small.experts)) / 10
            router[:, 1 : 1 + TOPICS] = _OF_TOPIC * random.standard_normal((small.experts, TOPICS)) / 10
            weights[f"blk.{layer}.ffn_norm"][: TOPICS + 1] = 1
            weights[f"blk.{layer}.attn_output"] *= 0.2  # an average of tokens, and so the same for all

    return open_model(write_small(path, small, edit))


def of_topics(vocab: int, count: int, seed: int = 1) -> IntArray:
    """Tokens of a text that changes its topic every 40 tokens or so."""
    random = np.random.default_rng(seed)
    topic, tokens = 0, np.empty(count, np.int32)
    for at in range(count):
        topic = random.integers(TOPICS) if random.random() < 1 / 40 else topic
        tokens[at] = random.integers(3 // TOPICS + 1, vocab // TOPICS) * TOPICS + topic
    return tokens

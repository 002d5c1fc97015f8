"""The golden models of architectures whose headers llama.cpp tries, made by golden/fallback.py: mixtures, hybrids."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from conftest import GOLDEN
from test_gguf_file import GGUF

from edge.backends.base import Engine
from edge.model.model import Model, open_model
from edge.types import FloatArray, IntArray

STRING = 8
FALLBACKS = (
    "deepseek2", "falcon-h1", "falcon-mamba", "gemma4", "gemma4moe", "gpt-oss", "granitehybrid", "jamba", "kimi-linear",
    "lfm2", "lfm2moe", "ling", "mamba", "nemotron_h",
    "qwen35", "qwen35moe", "qwen3moe",
)  # fmt: skip


@lru_cache
def open_fallback(name: str) -> tuple[Model, IntArray, FloatArray]:
    """The model, 64 tokens, and transformers' logits after the last 8 of them."""
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return open_model(GOLDEN / f"{name}.gguf"), arrays["tokens"], arrays["logits"]


def logits_of(engine: Engine, tokens: IntArray, pieces: list[int]) -> FloatArray:
    """Logits after every token, [n, vocabulary], of a text that comes in pieces, without what was before."""
    engine.kv.truncate(0)
    parts = np.split(tokens, np.cumsum(pieces)[:-1])
    return np.concatenate([engine.forward_all(part).copy() for part in parts])


def write_undescribed(path: Path, architecture: str = "xverse") -> Path:
    """A small Llama under another name, by default XVERSE, which llama.cpp alone runs."""
    file = GGUF.read(GOLDEN / "llama-gqa-tied.gguf")
    file.metadata = {key.replace("llama.", f"{architecture}."): value for key, value in file.metadata.items()}
    file.metadata["general.architecture"] = (STRING, architecture)
    return file.write(path)

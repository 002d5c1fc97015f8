"""Soft prompts: behind them, a model answers what PEFT answers; others' are refused."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hf_folders import FOLDERS
from peft_prefixes import KINDS, LAST, OUT, TOKENS, VIRTUAL

from edge.backends import find_backend
from edge.backends.base import EngineConfig, GivenEngine
from edge.converters.huggingface.architectures import of_gguf
from edge.converters.huggingface.reader import convert_folder
from edge.model.adapters.prefix import INTERLEAVED, read_prefix
from edge.model.model import Model, open_model
from edge.types import FloatArray


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("prefix")
    for name in {name for name, _ in KINDS.values()}:
        convert_folder(FOLDERS / name, folder / f"{name}.gguf", type="F32")
    return {path.stem: open_model(path) for path in folder.glob("*.gguf")}


def logits(model: Model, folder: Path, backend: str) -> FloatArray:
    """Those after the last of TOKENS."""
    prefix = read_prefix(folder).open(model.spec)
    config = EngineConfig(64, 8, "f32", 2, logits_rows=8)
    engine = cast(GivenEngine, find_backend(backend, model.file, model.spec).load(model.file, model.spec, config))
    if prefix.saved:
        engine.append_rows(prefix.rows)
    tokens = TOKENS if prefix.saved else np.concatenate([prefix.ids, TOKENS])
    found = engine.forward_all(tokens, prefix.given)[-LAST:].copy()
    assert engine.kv.length == VIRTUAL + TOKENS.size
    engine.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_equals_peft(models: dict[str, Model], kind: str) -> None:
    with np.load(OUT / "logits.npz") as expected:
        found = logits(models[KINDS[kind][0]], OUT / kind, "reference")
        np.testing.assert_allclose(found, expected[kind], atol=2e-4)


def test_interleaved_architectures_are_those_of_the_converter() -> None:
    for name in ("llama", "granite", "mistral3", "smollm3", "qwen2", "qwen3", "phi3", "gpt2"):
        assert (of_gguf(name).layouts.get("attn_k") == "interleaved") == (name in INTERLEAVED)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_prefix_on_cpu_equals_peft(models: dict[str, Model], kind: str) -> None:
    with np.load(OUT / "logits.npz") as expected:
        np.testing.assert_allclose(logits(models["llama"], OUT / kind, "cpu"), expected[kind], atol=2e-4)

"""Soft prompts: behind them, a model answers what PEFT answers; others' are refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, load_engine
from hf_folders import FOLDERS
from peft_adapters import AFTER_PREFIX as TOKENS
from peft_adapters import LAST, VIRTUAL
from peft_adapters import PREFIX_KINDS as KINDS
from peft_adapters import PREFIXES as OUT
from test_cli import edge

from edge.backends.base import GivenEngine
from edge.converters.huggingface.architectures import of_gguf
from edge.converters.huggingface.reader import convert_folder
from edge.errors import InputError
from edge.model.adapters.prefix import INTERLEAVED, read_prefix, write_prefix
from edge.model.model import Model, open_model
from edge.types import FloatArray


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("prefix")
    for name in {name for name, _ in KINDS.values()}:
        convert_folder(FOLDERS / name, folder / f"{name}.gguf", type="F32")
    return {path.stem: open_model(path) for path in folder.glob("*.gguf")}


def logits(model: Model, folder: Path, backend: str) -> FloatArray:
    """Those after the last of TOKENS. backend: such as `cpu` or `gpu@wgpu:0`."""
    prefix, engine = read_prefix(folder).open(model.spec), cast(GivenEngine, load_engine(model, backend, "f32"))
    if prefix.saved:
        engine.append_rows(prefix.rows)
    tokens = TOKENS if prefix.saved else np.concatenate([prefix.ids, TOKENS])
    found = engine.forward_all(tokens, prefix.given)[-LAST:].copy()
    assert engine.kv.length == VIRTUAL + TOKENS.size
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "reference") for kind in KINDS), *product(("prompt", "prefix"), ("cpu", f"gpu@{SOME_GPU}"))],
)
def test_prefix_equals_peft(models: dict[str, Model], kind: str, backend: str) -> None:
    with np.load(OUT / "logits.npz") as expected:
        found = logits(models[KINDS[kind][0]], OUT / kind, backend)
        np.testing.assert_allclose(found, expected[kind], atol=1e-3 if backend.startswith("gpu") else 2e-4)


def test_interleaved_architectures_are_those_of_the_converter() -> None:
    for name in ("llama", "granite", "mistral3", "smollm3", "qwen2", "qwen3", "phi3", "gpt2"):
        assert (of_gguf(name).layouts.get("attn_k") == "interleaved") == (name in INTERLEAVED)


@pytest.mark.parametrize("kind", ["p-tuning", "cartridge"])
def test_file_of_edge_convert_is_its_folder(models: dict[str, Model], kind: str, tmp_path: Path) -> None:
    made = tmp_path / "pirate.safetensors"
    done = edge("convert", str(OUT / kind), str(made), "--base", str(models["llama"].path))
    assert done.returncode == 0, done.stderr
    found, folder = read_prefix(made), read_prefix(OUT / kind)
    assert (found.name, found.base, found.keys, found.size) == ("pirate", folder.base, folder.keys, folder.size)
    np.testing.assert_array_equal(found.tensor.read(), folder.tensor.read())
    done = edge("convert", str(OUT / kind), str(made.with_suffix(".gguf")), "--base", str(models["llama"].path))
    assert (done.returncode, "becomes a .safetensors file: not pirate.gguf" in done.stderr) == (2, True)
    with pytest.raises(InputError, match="belongs to another model"):
        write_prefix(OUT / "prompt", made, open_model(GOLDEN / "llama-gqa-tied.gguf").spec)

"""Drafts by an assistant of Gemma 4: transformers' logits, and the same answers as without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import exhaustive, load_engine
from drafters import always_drafting
from hf_folders import FOLDERS
from test_cli import edge_here as run_edge
from test_cli import json_here as edge_json
from test_gguf_file import GGUF

import edge
from edge.backends.base import Engine, EngineConfig
from edge.backends.drafting import StatesEngine
from edge.backends.reference.assistant import Assistant
from edge.backends.token_table import TokenTable
from edge.converters.huggingface.reader import convert_folder
from edge.errors import UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.drafters.assistant import layers_of, read_assistant, source_layers
from edge.model.model import Model, open_model
from edge.run.drafting.assistant import AssistantDrafter
from edge.sampling import SamplingParams

PROMPT = np.random.default_rng(2).integers(5, 200, 60).astype(np.int32)
TORCH = FOLDERS / "gemma4_assistant.npz"

always = always_drafting()


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its assistant."""
    folder = tmp_path_factory.mktemp("gemma4")
    paths = folder / "model.gguf", folder / "assistant.gguf"
    for path, name in zip(paths, ("gemma4_text", "gemma4_assistant"), strict=True):
        convert_folder(FOLDERS / name, path)
    return paths


class Alone:
    """An assistant that drafts for one engine, which runs every text anew."""

    def __init__(self, model: Model, path: Path, engine: Engine) -> None:
        file, network = read_gguf(path), model.spec.network
        spec = read_assistant(file)
        self.assistant, self.engine, self.layers = Assistant(file, spec), engine, None
        if hasattr(engine, "open_assistant"):
            config = EngineConfig(1, 1, engine.config.kv_dtype, threads=2)
            self.layers = engine.open_assistant(*layers_of(file, spec, network), config)
        self.sources, self.scale = source_layers(network), np.float32(network.embedding_scale)
        self.file = model.file

    def draft(self, text: Any, count: int) -> tuple[list[int], list[Any], list[Any]]:
        """Tokens, the model's states after them, and what the head says before them: tokens and logits."""
        self.engine.kv.truncate(0)
        state = cast(StatesEngine, self.engine).hidden(text[:-1])[-1]
        engine = cast(Any, self.engine)
        rows = {} if self.layers else {window: engine.rows(layer) for window, layer in self.sources.items()}
        self.table = TokenTable(self.file, "token_embd.weight")
        token, tokens, states, heads = int(text[-1]), list[int](), list[Any](), list[Any]()
        for _ in range(count):
            embedding = next(self.table.read(np.array([token], np.int32)))[1][0] * self.scale
            if self.layers:
                normed = self.layers.run(self.assistant.start(embedding, state))
            else:
                normed = self.assistant.normed(embedding, state, rows)
            heads.append(self.assistant.logits_of(normed))
            token, state = self.assistant.finish(normed)
            tokens.append(token)
            states.append(state)
        self.table.close()
        return tokens, states, heads


@pytest.mark.parametrize(("name", "dtype", "within"), [
    ("reference", "f32", 1e-4), exhaustive("cpu", "f32", 1e-4), exhaustive("cpu", "f16", 0.02),
    exhaustive("cpu", "int8", 0.3), exhaustive("cpu", "int4", 2.0),
])  # fmt: skip
def test_logits_match_transformers(
    pair: tuple[Path, Path], name: str, dtype: str, within: float, engines: Callable[[Engine], Engine]
) -> None:
    """Of rows in every KV dtype, in a window and behind it, run token by token: chunks attend in BF16 on some CPUs."""
    model, torch = open_model(pair[0]), np.load(TORCH)
    engine = engines(load_engine(model, name, dtype, capacity=64, chunk=1))
    alone = Alone(model, pair[1], engine)
    for number, count in enumerate((int(torch["short"]), len(torch["tokens"]))):
        drafted, states, heads = alone.draft(torch["tokens"][:count], torch["drafts"].shape[1])
        tokens, logits = heads[0]
        assert tokens.size == 4 * 17  # 4 of 16 centroids
        expected = torch["logits"][number, 0][tokens]
        assert np.sum(np.abs(logits - expected) < within) >= (tokens.size if dtype != "int4" else 17)
        if dtype == "f32":
            assert drafted == torch["drafts"][number].tolist()
            np.testing.assert_allclose(states, torch["states"][number], atol=1e-4)
            np.testing.assert_allclose(heads[2][1], torch["logits"][number, 2][heads[2][0]], atol=1e-4)


@pytest.mark.parametrize("rows", [300, 64])
def test_drafts_follow_the_text_and_change_no_token(
    pair: tuple[Path, Path], rows: int, always: None, engines: Callable[[Engine], Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Behind rejected drafts, a second prompt and a shared beginning, greedily and drawn; without evictions each draft
    is that of a whole new run of the text."""
    made, draft = list[tuple[Any, Any]](), AssistantDrafter.draft

    def noted(self: AssistantDrafter, text: Any, most: int) -> Any:
        found = draft(self, text, most)
        made.append((text.copy(), found))
        return found

    def answers(**options: Any) -> list[str]:
        texts, drawn = [], SamplingParams(temperature=1.0, seed=3)
        with edge.load(pair[0], backend="cpu", threads=1, max_kv_size=rows, kv_dtype="f32", **options) as session:
            for prompt, follow_up in ((PROMPT, False), (PROMPT[:9], True), (np.append(PROMPT[:50], 7), False)):
                texts.append(session.generate(prompt, max_tokens=40, ignore_eos=True, follow_up=follow_up))
            texts.append(session.generate(PROMPT, max_tokens=40, ignore_eos=True, sampling=drawn))
        return texts

    plain = answers(speculate="off")
    monkeypatch.setattr(AssistantDrafter, "draft", noted)
    assert answers(draft=pair[1]) == plain
    assert len(made) > 20
    if rows == 300:
        model = open_model(pair[0])
        alone = Alone(model, pair[1], engines(load_engine(model, "reference", "f32", capacity=300, chunk=64)))
        same = [alone.draft(text, found.size)[0] == found.tolist() for text, found in made[::9]]
        assert sum(same) > 0.9 * len(same) > 5  # two tokens may be equally likely


def test_assistant_is_no_model(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Commands name the option, and convert and inspect its file."""
    with pytest.raises(UnsupportedError, match="runs with it alone: --draft"):
        open_model(pair[1])
    for path in (pair[1], FOLDERS / "gemma4_assistant"):
        shown = run_edge("inspect", str(path)).stdout
        assert "for the model whose states have 16 values" in shown
        assert "4 of 16 centroids, 68 of 272 rows of the head" in shown
    out = tmp_path / "a.gguf"
    run_edge("convert", str(FOLDERS / "gemma4_assistant"), str(out))
    assert out.read_bytes()[-2000:] == pair[1].read_bytes()[-2000:]
    refused = run_edge("convert", str(FOLDERS / "gemma4_assistant"), str(tmp_path / "x"), "--to", "onnx")
    assert "a drafter becomes GGUF in its own types" in refused.stderr
    assert edge_json("inspect", str(pair[1]), "--json")["spec"] is None


def test_head_without_centroids_is_read_whole(
    pair: tuple[Path, Path], tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    """As in files of llama.cpp's converter: the likeliest of all tokens, among which are those of the centroids."""
    model, path = open_model(pair[0]), pair[1]
    whole = GGUF.read(path)
    for name in ("masked_embd_centroids.weight", "masked_embd_ordering"):
        del whole.tensors[name]
    engine = engines(load_engine(model, "reference", "f32", capacity=64, chunk=64))
    some, all_ = (Alone(model, each, engine) for each in (path, whole.write(tmp_path / "whole.gguf")))
    tokens = np.load(TORCH)["tokens"]
    (few, values), (every, logits) = (each.draft(tokens, 1)[2][0] for each in (some, all_))
    assert every.tolist() == list(range(272))
    np.testing.assert_allclose(logits[few], values, atol=1e-5)

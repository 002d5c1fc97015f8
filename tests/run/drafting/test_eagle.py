"""Drafts by an EAGLE-3 head: the logits of its formulas in torch, and the same answers as without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import exhaustive
from drafters import always_drafting
from hf_folders import FOLDERS
from test_cli import edge_here as run_edge
from test_gguf_file import GGUF
from test_mtp_drafts import MODEL, WARM, answers, drafted

from edge.backends import engine_named
from edge.backends.base import Engine, EngineConfig
from edge.backends.drafting import MTPEngine, StatesEngine
from edge.backends.reference.weights import read_rows
from edge.converters.huggingface.eagle import convert_eagle
from edge.errors import EdgeError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.drafters.draft import open_draft
from edge.model.model import open_model
from edge.sampling import SamplingParams

TORCH = FOLDERS / "eagle3.npz"

always = always_drafting(2)


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eagle") / "head.gguf"
    convert_eagle(FOLDERS / "eagle3", open_model(MODEL), path)
    return path


@pytest.mark.parametrize("name", ["reference", exhaustive("cpu")])
def test_logits_match_torch(name: str, head: Path, engines: Callable[[Engine], Engine]) -> None:
    """Of tokens with the model's features, in chunks and behind each other, and of one with the head's own state."""
    model, draft, torch, backend = open_model(MODEL), open_draft(head), np.load(TORCH), engine_named(name)
    config = EngineConfig(64, 16, "f32", threads=2)
    taps = draft.taps
    target = engines(backend.load(model.file, model.spec, EngineConfig(64, 16, "f32", threads=2, taps=taps)))
    own = cast(MTPEngine, engines(backend.load(draft.file, draft.spec, config)))
    tokens, states = torch["tokens"], list[Any]()
    for first in range(0, tokens.size, 16):
        target.forward(tokens[first : first + 16])
        states.append(cast(StatesEngine, target).layer_states(16).copy())
    features = np.concatenate(states)[:-1]

    def run(states: Any, following: Any) -> Any:
        own.give(states, read_rows(model.file, "token_embd.weight", following))
        return own.forward(np.zeros(len(states), np.int32)).copy()

    logits = [
        run(features[first:last], tokens[first + 1 : last + 1])
        for first, last in ((0, 16), (16, 32), (32, 40), *((at, at + 1) for at in range(40, 47)))
    ]
    np.testing.assert_allclose(logits[2:], torch["logits"], atol=2e-4)
    chained = run(own.states(1), torch["next"][None])
    np.testing.assert_allclose(chained, torch["chained"], atol=2e-4)
    np.testing.assert_allclose(own.states(1)[0], torch["state"], atol=2e-4)


@pytest.mark.parametrize(("rows", "sampling"), [(300, SamplingParams()), (64, WARM)])
def test_drafts_change_no_token_and_most_are_right(
    head: Path, rows: int, sampling: SamplingParams, request: pytest.FixtureRequest
) -> None:
    """Behind rejected drafts, a second prompt and a shared beginning, with evictions and without."""
    plain, _, _ = answers(MODEL, sampling, max_kv_size=rows, speculate="off")
    request.getfixturevalue("always")
    found, reports, plan = answers(MODEL, sampling, max_kv_size=rows, draft=head)
    assert found == plain
    assert plan.config.taps == [0, 1]
    assert not plan.config.mtp
    tried, right = drafted(reports)
    assert tried > 60
    assert right > (0.6 if sampling is not WARM else 0.2) * tried


def test_head_is_no_model(head: Path, tmp_path: Path) -> None:
    """Commands name the options, and convert and inspect its file."""
    with pytest.raises(UnsupportedError, match="drafts beside its model: --draft"):
        open_model(head)
    shown = run_edge("inspect", str(head)).stdout
    assert "for the model whose states have 64 values" in shown
    assert "for the states that enter its layers 0, 1" in shown
    refused = run_edge("convert", str(FOLDERS / "eagle3"), str(tmp_path / "x.gguf"))
    assert "an EAGLE-3 head: convert it with --base" in refused.stderr
    out = tmp_path / "h.gguf"
    run_edge("convert", str(FOLDERS / "eagle3"), str(out), "--base", str(MODEL), "--type", "q8_0")
    assert {info.type for info in read_gguf(out).tensors.values()} == {"Q8_0", "F32", "I64"}


def test_folders_of_other_forms_become_the_same_file(head: Path, tmp_path: Path) -> None:
    """Speculators nests settings, and NVIDIA numbers outputs of layers; the usual layers are those of EAGLE."""
    folder, config = tmp_path / "head", json.loads((FOLDERS / "eagle3" / "config.json").read_text())
    shutil.copytree(FOLDERS / "eagle3", folder)
    layers = config.pop("eagle_aux_hidden_state_layer_ids")
    outer = {"speculators_model_type": "eagle3", "draft_vocab_size": config.pop("draft_vocab_size")}
    for said, words in (
        ({**outer, "eagle_aux_hidden_state_layer_ids": layers, "transformer_layer_config": config}, ""),
        ({**config, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]}}, "as many as a hidden state has"),
        ({**config, **outer}, "target_layers must name"),
        ({**config, **outer, "fc_norm": True}, "fc_norm is true, which is not supported"),
    ):
        (folder / "config.json").write_text(json.dumps(said))
        if words:
            with pytest.raises(EdgeError, match=words):
                convert_eagle(folder, open_model(MODEL), tmp_path / "again.gguf")
        else:
            convert_eagle(folder, open_model(MODEL), tmp_path / "again.gguf")
            assert GGUF.read(tmp_path / "again.gguf").tensors == GGUF.read(head).tensors

"""Drafts by an EAGLE-3 head: the logits of its formulas in torch, and the same answers as without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, examples, exhaustive
from drafters import always_drafting
from hf_folders import FOLDERS
from test_cli import edge_here as run_edge
from test_fuzz_engine import mutant
from test_gguf_file import ARRAY, GGUF, I32, U32
from test_mtp_drafts import MODEL, WARM, answers, drafted

import edge
from edge.backends import engine_named
from edge.backends.base import Engine, EngineConfig
from edge.backends.drafting import MTPEngine, StatesEngine
from edge.backends.reference.weights import read_rows
from edge.converters.huggingface.eagle import convert_eagle
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.drafters.draft import open_draft
from edge.model.drafters.eagle import read_eagle, tokens_of
from edge.model.model import open_model
from edge.options import Options
from edge.plan.plan import make_plan
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


def test_wrong_drafts_change_no_token(head: Path, tmp_path: Path, always: None) -> None:
    """Of a head whose rows are those of other tokens. (That such drafts end is a test of `test_mtp_drafts.py`.)"""
    file = GGUF.read(head)
    shape, kind, data = file.tensors["d2t"]
    file.tensors["d2t"] = shape, kind, np.roll(np.frombuffer(data, np.int64), 7).tobytes()
    found, reports, _ = answers(MODEL, draft=file.write(tmp_path / "wrong.gguf"))
    tried, right = drafted(reports)
    assert found == answers(MODEL, speculate="off")[0]
    assert right < 0.2 * tried


def test_plan_counts_head(head: Path) -> None:
    cpu, spec = engine_named("cpu"), open_model(MODEL).spec
    plain, plan = (
        make_plan(spec, cpu, Options.parse(max_kv_size=300, threads=1, **more), process=64 << 20)
        for more in ({"speculate": "off"}, {"draft": head})
    )
    own = cpu.footprint(open_draft(head).spec, plan.draft)
    assert plan.bytes.draft > own.weights + own.kv + own.scratch + own.runtime
    assert plan.bytes.total > plain.bytes.total + plan.bytes.draft


@pytest.mark.parametrize(("target", "options", "error", "words"), [
    (MODEL, {"sequences": 2}, UnsupportedError, "drafts for one sequence: leave --sequences out"),
    (MODEL, {"backend": "reference"}, UnsupportedError, "for the cpu engine here"),
    (GOLDEN / "qwen35.gguf", {}, InputError, "an EAGLE-3 head of another model than"),
    (GOLDEN / "llama-one-layer.gguf", {}, InputError, "an EAGLE-3 head of another model than|its tokens are not those"),
])  # fmt: skip
def test_models_without_this_head_are_refused(
    head: Path, target: Path, options: dict[str, Any], error: type[EdgeError], words: str
) -> None:
    with pytest.raises(error, match=words):
        edge.load(target, **{"backend": "cpu", "max_kv_size": 300, "draft": head, **options})


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


@pytest.mark.parametrize(("change", "words"), [
    (lambda file: file.tensors.pop("output.weight"), "has no output.weight"),
    (lambda file: file.tensors.pop("fc.weight"), "no tensor blk.0.fc.weight"),
    (lambda file: file.metadata.pop("eagle3.target_layers"), "eagle3.target_layers is missing"),
    (lambda file: file.metadata.update({"eagle3.block_count": (U32, 2)}), "2 layers, where an EAGLE-3 head has one"),
    (lambda file: file.metadata.update({"eagle3.target_layers": (ARRAY, (I32, [1, 1]))}), "each once"),
    (lambda file: file.metadata.update({"eagle3.target_layers": (ARRAY, (I32, [0, 2]))}), "another model"),
    (lambda file: file.tensors.update(d2t=(*file.tensors["d2t"][:2], bytes(len(file.tensors["d2t"][2])))), "twice"),
])  # fmt: skip
def test_damaged_heads_are_refused(head: Path, tmp_path: Path, change: Callable[[GGUF], Any], words: str) -> None:
    file = GGUF.read(head)
    change(file)
    with pytest.raises((ModelFormatError, UnsupportedError, InputError), match=words):
        edge.load(MODEL, backend="cpu", max_kv_size=300, draft=file.write(tmp_path / "damaged.gguf"))


def test_mutated_files_load_or_raise_one_line(head: Path, tmp_path: Path) -> None:
    base, path, read = GGUF.read(head), tmp_path / "mutant.gguf", 0
    for index in range(examples(300)):
        path.write_bytes(mutant(index, [base]))
        with suppress(EdgeError):
            read += read_eagle(file := read_gguf(path)).layers
            tokens_of(file, 272)
    assert read > 10

"""Models, assistants and heads that draft: what a plan counts for them, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from speech_models import write_model
from test_assistant import pair  # noqa: F401
from test_eagle import head  # noqa: F401
from test_gguf_file import ARRAY, GGUF, I32, U32

import edge
from edge.backends import engine_named
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.model.drafters.draft import open_draft
from edge.model.model import open_model
from edge.options import Options
from edge.plan.plan import make_plan

Files = Callable[[str], Path]
LARGE, OTHER = "llama-gqa-tied", "llama-one-layer"
ORDER = "masked_embd_ordering"


@pytest.fixture
def file_of(pair: tuple[Path, Path], head: Path) -> Files:  # noqa: F811
    """Files by their names: gemma4 and its assistant, the head of mtp, and golden models."""
    made = {"gemma4": pair[0], "assistant": pair[1], "head": head}
    return lambda name: made.get(name, GOLDEN / f"{name}.gguf")


@pytest.mark.parametrize(("model", "drafter"), [("gemma4", "assistant"), ("mtp", "head"), (LARGE, OTHER)])
def test_plan_counts_drafter(file_of: Files, model: str, drafter: str) -> None:
    cpu, spec, draft = engine_named("cpu"), open_model(file_of(model)).spec, file_of(drafter)
    plain, plan = (
        make_plan(spec, cpu, Options.parse(max_kv_size=300, threads=1, **more), process=64 << 20)
        for more in ({"speculate": "off"}, {"draft": draft})
    )
    file = Options.parse(draft=draft).draft_file
    layers = file.layers_for(spec)[1] if drafter == "assistant" else open_draft(draft).spec
    need = cpu.footprint(layers, plan.draft)
    assert plan.bytes.draft >= need.weights + need.scratch + (need.kv + need.runtime) * (drafter != "assistant")
    assert plan.predicted_peak == plan.bytes.total >= plain.bytes.total + plan.bytes.draft
    assert plan.draft.capacity == 300 or drafter == "assistant"


@pytest.mark.parametrize(("model", "drafter", "options", "error", "words"), [
    ("gemma4", "assistant", {"sequences": 2}, UnsupportedError, "drafts for one sequence: leave --sequences out"),
    ("gemma4", "assistant", {"speculate": "off"}, InputError, "leave one out"),
    ("gemma4", "assistant", {"backend": "reference"}, UnsupportedError, "for the cpu engine here"),
    (LARGE, "assistant", {}, InputError, "its tokens are not those|another Gemma 4"),
    ("mtp", "head", {"sequences": 2}, UnsupportedError, "drafts for one sequence: leave --sequences out"),
    ("mtp", "head", {"backend": "reference"}, UnsupportedError, "for the cpu engine here"),
    ("qwen35", "head", {}, InputError, "an EAGLE-3 head of another model than"),
    (OTHER, "head", {}, InputError, "an EAGLE-3 head of another model than|its tokens are not those"),
    (LARGE, "spm", {}, InputError, "its tokens are not those of "),
    (LARGE, OTHER, {"speculate": "off"}, InputError, "leave one out"),
    (LARGE, OTHER, {"backend": "reference"}, UnsupportedError, "for the cpu engine here, not for the reference engine"),
    (LARGE, OTHER, {"kv_policy": "h2o"}, UnsupportedError, "kv.policy.h2o goes without drafts"),
    (LARGE, "qwen35", {}, (InputError, UnsupportedError), "recurrent layers|tokens are not"),
    (LARGE, "no-such-model", {}, InputError, "no such model file: .*no-such-model"),
])  # fmt: skip
def test_unsuitable_drafters_are_refused(
    file_of: Files, model: str, drafter: str, options: dict[str, Any], error: Any, words: str
) -> None:
    with pytest.raises(error, match=words):
        edge.load(file_of(model), draft=file_of(drafter), **{"backend": "cpu", "max_kv_size": 300, **options})


def test_model_that_hears_does_not_draft(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="continues no text"):
        open_draft(write_model(tmp_path))


def repeated(shape: tuple[int, ...], kind: int, data: bytes) -> tuple[tuple[int, ...], int, bytes]:
    return shape, kind, data[:4] * (len(data) // 4)


def zeros(shape: tuple[int, ...], kind: int, data: bytes) -> tuple[tuple[int, ...], int, bytes]:
    return shape, kind, bytes(len(data))


@pytest.mark.parametrize(("drafter", "change", "words"), [
    ("assistant", lambda file: file.tensors.pop(ORDER), "does not divide 272 tokens by centroid"),
    ("assistant", lambda file: file.tensors.pop("nextn.post_projection.weight"), "no tensor nextn.post_projection"),
    ("assistant", lambda file: file.tensors.pop("token_embd.weight"), "has no token_embd.weight"),
    ("assistant", lambda file: file.metadata.pop("gemma4-assistant.embedding_length_out"), "length_out is missing"),
    ("assistant", lambda file: file.tensors.update({ORDER: repeated(*file.tensors[ORDER])}), "twice"),
    ("head", lambda file: file.tensors.pop("output.weight"), "has no output.weight"),
    ("head", lambda file: file.tensors.pop("fc.weight"), "no tensor blk.0.fc.weight"),
    ("head", lambda file: file.metadata.pop("eagle3.target_layers"), "eagle3.target_layers is missing"),
    ("head", lambda file: file.metadata.update({"eagle3.block_count": (U32, 2)}), "2 layers, where an EAGLE-3"),
    ("head", lambda file: file.metadata.update({"eagle3.target_layers": (ARRAY, (I32, [1, 1]))}), "each once"),
    ("head", lambda file: file.metadata.update({"eagle3.target_layers": (ARRAY, (I32, [0, 2]))}), "another model"),
    ("head", lambda file: file.tensors.update(d2t=zeros(*file.tensors["d2t"])), "twice"),
])  # fmt: skip
def test_damaged_drafters_are_refused(
    file_of: Files, tmp_path: Path, drafter: str, change: Callable[[GGUF], Any], words: str
) -> None:
    file = GGUF.read(file_of(drafter))
    change(file)
    model = file_of("gemma4" if drafter == "assistant" else "mtp")
    with pytest.raises((ModelFormatError, UnsupportedError, InputError), match=words):
        edge.load(model, backend="cpu", max_kv_size=300, draft=file.write(tmp_path / "damaged.gguf"))

"""Drafts by models and layers with rows of their own in exported models: Python's drafts, and the same answers."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from bundles import Pair, recorded_session
from conftest import exhaustive
from ctypes_bundle import BundleSession, open_bundle
from drafters import always_drafting
from test_draft_model import LARGE
from test_eagle import head  # noqa: F401
from test_gguf_file import GGUF
from test_mtp_drafts import HELD_OUT, MODEL, at_random  # noqa: F401
from test_runtime_assistant import eager
from test_runtime_drafts import GREEDY, ROWS, WARM

from edge.apps.enums import Role
from edge.apps.sections.model_file import ENTRY, HEADER, MAGIC, Section
from edge.apps.sections.model_file import MODEL as MODEL_EDGE
from edge.errors import EdgeError, ModelFormatError
from edge.model.drafters.eagle import FEATURE_NORM

always = always_drafting()
AUTO, OFF = 0, 1  # EDGE_SPECULATE_…


def with_norm(path: Path, folder: Path) -> Path:
    """A head that normalises features, as some do."""
    file = GGUF.read(path)
    size = file.tensors["fc.weight"][0][0]
    file.tensors[FEATURE_NORM] = (size,), 0, np.random.default_rng(3).uniform(0.5, 2, size).astype("<f4").tobytes()
    return file.write(folder / "normed.gguf")


@pytest.mark.parametrize(("by", "options"), [
    ("layer", {}), ("head", {}), ("model", {"max_kv_size": 512}), exhaustive("model", {}),
    exhaustive("random", {}), exhaustive("layer", {"kv_dtype": "int4"}),
    exhaustive("layer", {"kv_policy": "full", "max_kv_size": 512}), exhaustive("head", {"kv_dtype": "int8"}),
    exhaustive("normed", {}),
])  # fmt: skip
def test_drafts_are_those_of_python(
    by: str, options: dict[str, Any], always: None, at_random: Path, head: Path, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    """Answers of a conversation are the same, and of as many drafted tokens as many are right. It has follow-ups, and
    evictions, also of the layer's rows."""
    model, chosen = at_random if by == "random" else MODEL, ROWS | options
    if by == "normed":
        head = with_norm(head, tmp_path)
    if by == "model":
        model = LARGE
    if by in ("head", "normed", "model"):
        chosen["draft"] = str(LARGE if by == "model" else head)
    folder, library = eager(model, **chosen)
    with (
        recorded_session(str(model), **chosen) as (python, recorded),
        open_bundle(folder, library) as bundle,
        bundle.session() as exported,
    ):
        both, drafted, accepted = Pair(python, exported, recorded), 0, 0
        for text, sampling in zip(HELD_OUT, (GREEDY, WARM | {"seed": 7}, GREEDY), strict=True):
            both.ask(text, raw=True, max_tokens=70, **sampling)
            assert python.report is not None
            assert python.report.drafted is not None
            drafted += python.report.drafted.tokens
            accepted += python.report.drafted.accepted
            used = exported.use()
            if (by, options) != ("model", {}):  # which shortens its text at another time
                assert (used["drafted"], used["accepted"]) == (drafted, accepted)
        assert drafted > 120  # where a pass verifies three drafts, 157 by the model itself
        assert by in ("random", "normed") or accepted > 60
        planned = json.loads((folder / "manifest.json").read_text())["plan"]["bytes"]
        assert planned["scratch"] < used["scratch"]
        assert 0 <= planned["scratch"] + planned["draft"] - drafting_weights(folder) - used["scratch"] < 2 << 20


def drafting_weights(folder: Path) -> int:
    """Bytes of the weights of what drafts in a bundle."""
    data = (folder / MODEL_EDGE).read_bytes()
    at = data.rindex(MAGIC)
    count = np.frombuffer(data, HEADER, 1, at)["sections"][0]
    sections = np.frombuffer(data, ENTRY, count, at + HEADER.itemsize)
    return int(sections["size"][sections["kind"] == Section.WEIGHTS].item())


def test_damaged_layers_are_refused(tmp_path: Path) -> None:
    folder, library = eager(MODEL, **ROWS)
    data = bytearray((folder / "model.edge").read_bytes())
    data[data.rindex(b"EDGEMDL1") + 200] ^= 0xFF
    (tmp_path / "model.edge").write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"damaged|belongs to"), open_bundle(tmp_path, library):
        pass


def turns(session: BundleSession, seed: int, speculate: int) -> list[Any]:
    """What 40 random calls return, also those that are refused."""
    found, saved, random = list[Any](), b"", Random(seed)
    for step in range(40):
        kind, tokens = random.random(), [random.randint(5, 60) for _ in range(random.randint(1, 60))]
        temperature, most = random.choice([0.0, 1.0]), random.randint(1, 40)
        session.set(temperature=temperature, seed=step, max_tokens=most, ignore_eos=1, speculate=speculate)
        try:
            if kind < 0.5:
                found.append(session.answer(tokens, Role.IDS)[0])
            elif kind < 0.75:
                session.rewind(random.randint(0, 3))
            elif kind < 0.82:
                saved = session.save()
            elif kind < 0.92 and saved:
                session.load(saved)
            else:
                session.append(Role.IDS, tokens)
                found.append([piece.token for piece in islice(session.pieces(), 4)])  # and no more of the answer
        except EdgeError as refused:
            found.append(str(refused))
        found.append(session.use()["rows"])
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", ["layer", "head", "model"])
def test_random_turns_are_the_same_without_drafts(by: str, head: Path) -> None:  # noqa: F811
    """Answers, also abandoned ones, are rewound, saved and loaded; rows are evicted."""
    drafts = {"layer": {"kv_policy": "streaming"}, "head": {"draft": str(head)}, "model": {"draft": str(LARGE)}}[by]
    model = LARGE if by == "model" else MODEL
    folder, library = eager(model, max_kv_size=96, prefill_step_size=16, threads=2, **drafts)
    drafted = 0
    with open_bundle(folder, library) as bundle:
        for seed in range(8):
            with bundle.session() as one, bundle.session() as other:
                assert turns(one, seed, AUTO) == turns(other, seed, OFF), seed
                drafted += one.use()["drafted"]
                assert other.use()["drafted"] == 0
    assert drafted > 100

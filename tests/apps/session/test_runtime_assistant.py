"""Drafts by an assistant of Gemma 4 in exported models: transformers' tokens, and the same answers as without."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import Pair, bundle_sources, recorded_session
from conftest import GOLDEN, exhaustive
from ctypes_bundle import BundleSession, open_bundle
from runtime_library import C_FILES, build
from test_assistant import TORCH, pair  # noqa: F401
from test_cli import edge as run_edge
from test_runtime_drafts import GREEDY, ROWS, WARM, _Both, repeated

from edge.apps.enums import Role
from edge.errors import ModelFormatError
from edge.run.drafting.drafter import Drafter
from edge.types import IntArray

EAGER = Path(__file__).parents[1] / "runtime" / "eager_model.c"


def eager(path: Path, **options: Any) -> tuple[Path, Path]:
    """A bundle's folder, and a library of it that always drafts with what is in section DRAFT."""
    model, parts = bundle_sources(str(path), **options)
    runtime = [path for path in C_FILES if path.name != "drafts.c"]
    return model.parent, build([*runtime, EAGER, *parts], ("-shared", "-fPIC"), ".so")


def drafted(session: BundleSession, library: ctypes.CDLL, token: int, most: int) -> list[int]:
    found = (ctypes.c_int32 * most)()
    return found[: library.assist(session.handle, token, most, found)]


def test_drafts_are_those_of_transformers(pair: tuple[Path, Path]) -> None:  # noqa: F811
    """From rows within a window, and behind it; the state of a prompt's last token is that of a chunk."""
    torch = np.load(TORCH)
    folder, path = eager(pair[0], draft=str(pair[1]), **ROWS)
    for number, count in enumerate((int(torch["short"]), len(torch["tokens"]))):
        with open_bundle(folder, path) as bundle, bundle.session(max_tokens=2, **GREEDY) as session:
            session.append(Role.IDS, torch["tokens"][: count - 1].tolist())
            next(piece for piece in session.pieces() if piece.token is not None)
            expected = torch["drafts"][number].tolist()
            assert drafted(session, bundle.library, int(torch["tokens"][count - 1]), 3) == expected


@pytest.mark.parametrize("options", [
    {}, exhaustive({"kv_dtype": "int8"}), exhaustive({"kv_dtype": "int4"}),
])  # fmt: skip
def test_answers_are_the_same_with_an_assistant(options: dict[str, Any], pair: tuple[Path, Path]) -> None:  # noqa: F811
    """The conversation has evictions and follow-ups."""
    folder, library = eager(pair[0], draft=str(pair[1]), **ROWS | options)
    with (
        recorded_session(str(pair[0]), **ROWS | options) as (python, recorded),
        open_bundle(folder, library) as bundle,
        bundle.session() as exported,
    ):
        both = Pair(python, exported, recorded)
        both.ask(repeated(60), max_tokens=90, **GREEDY)
        both.ask(repeated(20, 2), max_tokens=50, seed=7, **WARM)
        both.ask(repeated(150, 3), max_tokens=40, seed=3, **WARM)
        used = exported.use()
        assert used["drafted"] > 20
        assert used["accepted"] < used["drafted"]
        planned = json.loads((folder / "manifest.json").read_text())["plan"]["bytes"]
        assert planned["scratch"] < used["scratch"] <= planned["scratch"] + planned["draft"]


def test_damaged_assistants_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    folder, library = eager(pair[0], draft=str(pair[1]), **ROWS)
    data = bytearray((folder / "model.edge").read_bytes())
    inner = data.rindex(b"EDGEMDL1")
    for place, words in ((inner, "this is not a model.edge"), (inner + 200, "table of sections|damaged|belongs to")):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        (tmp_path / "model.edge").write_bytes(changed)
        with pytest.raises(ModelFormatError, match=words), open_bundle(tmp_path, library):
            pass


class _Fixed(Drafter):
    """Drafts the same tokens, in 3 seconds each."""

    share, caught_up = 0.2, 0

    def draft(self, text: IntArray, most: int) -> IntArray:
        return np.full(most, 9, np.int32)


def test_model_drafts_where_the_python_session_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get the same text, times of passes, and numbers of accepted tokens."""
    seconds, clock = 0.02, iter(np.arange(0, 1e6, 0.02))
    monkeypatch.setattr("edge.run.drafting.ahead.time.perf_counter", lambda: float(next(clock)))
    both, rng, lengths = _Both(5, _Fixed(), seconds), np.random.default_rng(5), set[int]()
    text = rng.integers(0, 40, 400).tolist()
    for number, token in enumerate(text):
        both.note([token])
        found = both.propose(int(rng.integers(0, 6)))
        lengths.add(len(found) if found[:1] == [9] else 0)
        both.time(len(found), (1 + 0.1 * len(found)) * 0.1)
        if found:
            both.judge(len(found), int(rng.integers(0, len(found) + 1)) if number < 200 else 0)
        both.check_gain()
        if number == 300:
            both.begin()
    assert lengths > {0, 2}


def test_exports_name_the_drafter(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    refused = run_edge("export", str(pair[0]), "-o", str(tmp_path / "b"), "--draft", str(pair[0]))
    assert refused.returncode == 2
    assert "a model with per-layer embeddings drafts in no export" in refused.stderr
    other = str(GOLDEN / "llama-gqa-tied.gguf")
    for command in (["export", other, "-o", str(tmp_path / "b")], ["plan", other, "--device", "pixel-9"]):
        refused = run_edge(*command, "--draft", str(pair[1]))
        assert refused.returncode == 2
        assert "an assistant of another Gemma 4 than llama-gqa-tied" in refused.stderr
    refused = run_edge("export", str(pair[0]), "-o", str(tmp_path / "b"), "--draft", str(pair[1]), "--gpu")
    assert "a bundle with --draft runs on the CPU" in refused.stderr

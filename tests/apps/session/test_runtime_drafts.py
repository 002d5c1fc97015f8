"""Drafts in exported models, copied or by models and layers that have rows of their own: they are Python's, and change
no answer."""

from __future__ import annotations

import ctypes
import json
from ctypes import POINTER, byref, c_double, c_int32, c_uint32, c_uint64, c_void_p
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import build_with, bundle_of, pair_of
from conftest import GOLDEN, exhaustive
from ctypes_bundle import open_bundle
from drafters import always_drafting
from runtime_library import load_runtime
from test_assistant import TORCH, pair  # noqa: F401
from test_draft_model import LARGE
from test_eagle import head  # noqa: F401
from test_mtp_drafts import HELD_OUT
from test_mtp_drafts import MODEL as PREDICTS

from edge import export
from edge.apps.enums import Role, Speculate
from edge.apps.sections.model_file import ENTRY, HEADER, MAGIC, Section
from edge.apps.sections.model_file import MODEL as MODEL_EDGE
from edge.errors import EdgeError, ModelFormatError
from edge.plan.plan import DRAFT_TEXT_BYTES
from edge.run.drafting.ahead import Ahead
from edge.run.drafting.drafter import Drafter
from edge.types import IntArray

MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
COPYING, DRAFTING = "eager_drafts.c", "eager_model.c"  # drafts.c that drafts always
TEXT = "The quick brown fox jumps over the lazy dog. "
GREEDY = {"temperature": 0, "ignore_eos": 1}
WARM = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repeat_penalty": 1.1, "ignore_eos": 1}


def repeated(count: int, seed: int = 1) -> list[int]:
    """Ids of which half are those before."""
    found: list[int] = np.random.default_rng(seed).integers(3, 200, count // 2).tolist()
    return found + found


@pytest.mark.parametrize(("name", "options"), [
    (MODEL, {}), exhaustive("qwen35", {}), exhaustive("gemma4", {}),  # dense; a gated delta net; a ring
    exhaustive(MODEL, {"kv_dtype": "int4"}), exhaustive(MODEL, {"kv_dtype": "f32", "threads": 1}),
    exhaustive(MODEL, {"kv_policy": "full", "max_kv_size": 512}), exhaustive("phi3-longrope", {}),
])  # fmt: skip
def test_answers_are_the_same_with_drafts(name: str, options: dict[str, Any]) -> None:
    """The conversation has evictions and follow-ups."""
    with pair_of(name, eager=COPYING, **ROWS | options) as both:
        both.ask(repeated(60), max_tokens=90, **GREEDY)
        both.ask(repeated(20, 2), max_tokens=50, seed=7, **WARM)
        both.ask(TEXT, raw=True, max_tokens=160, **GREEDY)
        if options.get("kv_policy") != "full":  # which has no room for it
            both.ask(repeated(150, 3), max_tokens=40, seed=3, **WARM, time=100.0)
        used = both.exported.use()
        assert 0 < used["accepted"] < used["drafted"]


@pytest.mark.parametrize("name", [MODEL, exhaustive("qwen35")])
def test_calls_between_tokens_drop_drafts(name: str) -> None:
    """Saving, trimming and breaking off an answer see the rows of tokens that were generated, and no others."""
    model, library = build_with((COPYING,), name, "-shared", "-fPIC", **ROWS)
    with open_bundle(model.parent, library) as bundle:

        def run(disturbed: bool, **options: Any) -> tuple[list[int | None], bytes]:
            with bundle.session(max_tokens=60, **GREEDY, **options) as session:
                session.append(Role.IDS, repeated(60))
                tokens, rows = list[int | None](), list[int]()
                said = (piece for piece in session.pieces() if piece.finish or piece.token is not None)  # no progress
                for number, piece in enumerate(said):
                    tokens.append(piece.token)
                    rows.append(session.use()["rows"])
                    if disturbed and number % 3 == 0:
                        session.set(max_tokens=60, **GREEDY, **options)
                    if number == 40:
                        break
                assert rows == sorted(rows)
                assert rows[-1] == rows[0] + 40
                session.append(Role.IDS, [5, 6, 7])
                tokens += [piece.token for piece in session.pieces()]
                assert (session.use()["drafted"] > 0) == (options.get("speculate") != Speculate.OFF)
                return tokens, session.save()

        expected = run(False, speculate=Speculate.OFF)
        assert run(False) == expected
        assert run(True) == expected


class _Arena(ctypes.Structure):
    _fields_ = [("memory", c_void_p), ("used", c_uint64)]


_ASK = ctypes.CFUNCTYPE(c_uint32, c_void_p, c_uint32, POINTER(c_int32), POINTER(c_double))


class _Model(ctypes.Structure):
    _fields_ = [("share", c_double), ("of", c_void_p), ("ask", _ASK)]


class Both:
    """The C library's drafts and Python's, which are told the same."""

    def __init__(self, most: int, model: Drafter | None = None, seconds: float = 0.0) -> None:
        """model: drafts, in `seconds`."""
        self._library = load_runtime("drafts.c")
        self._library.drafts_layout.restype = c_void_p
        self._library.drafts_gain.restype = c_double
        self._memory = ctypes.create_string_buffer(DRAFT_TEXT_BYTES + 4096)
        start = -(-ctypes.addressof(self._memory) // 64) * 64
        arena = _Arena(start, 0)
        self._c, self._most = c_void_p(self._library.drafts_layout(byref(arena))), most
        assert arena.used <= DRAFT_TEXT_BYTES + 1024
        self.python = Ahead(most, model)

        def ask(_of: Any, count: int, draft: Any, taken: Any) -> int:
            assert model is not None
            for number, token in enumerate(model.draft(np.zeros(0, np.int32), count)):
                draft[number] = int(token)
            taken[0] = seconds
            return count

        self._ask = _ASK(ask)
        self._by = byref(_Model(model.share, None, self._ask)) if model else None

    def note(self, tokens: list[int]) -> None:
        self.python.note(np.array(tokens, np.int32))
        self._library.drafts_add(self._c, (c_int32 * len(tokens))(*tokens), len(tokens))

    def propose(self, room: int, behind: int = 0) -> list[int]:
        draft, expected = (c_int32 * self._most)(), self.python.propose(room, 1, behind).tolist()
        assert draft[: self._library.drafts_propose(self._c, room, behind, self._by, draft)] == expected
        return list(expected)

    def time(self, drafted: int, seconds: float, behind: int = 0) -> None:
        self.python.time(1, drafted, seconds, behind)
        self._library.drafts_time(self._c, 1 + drafted, behind, c_double(seconds))

    def judge(self, drafted: int, accepted: int) -> None:
        self.python.judge(drafted, accepted)
        self._library.drafts_judge(self._c, drafted, accepted)

    def begin(self) -> None:
        self.python.begin()
        self._library.drafts_begin(self._c)

    def check_gain(self) -> None:
        assert self._library.drafts_gain(self._c) == pytest.approx(self.python.report().gain or 0.0)


class Fixed(Drafter):
    """Drafts the same tokens."""

    share, caught_up = 0.2, 0

    def draft(self, text: IntArray, most: int) -> IntArray:
        return np.full(most, 9, np.int32)


@pytest.mark.parametrize("model", [None, Fixed()], ids=["copies", "model"])
def test_draft_lengths_are_those_of_the_python_session(model: Drafter | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get the same text, times of passes and of the model's drafts, and numbers of accepted tokens."""
    seconds, clock, most = 0.02, count(0.0, 0.02), 7
    monkeypatch.setattr("edge.run.drafting.ahead.time.perf_counter", lambda: float(next(clock)))
    both, rng, lengths, modelled = Both(most, model, seconds), np.random.default_rng(3), set[int](), 0
    phrases = [rng.integers(0, rng.choice([2, 5000]), rng.integers(2, 30)) for _ in range(60)]
    text = np.concatenate([phrases[each] for each in rng.integers(0, 60, 120)]).tolist()
    costs = [0.0, 1.0, 1.3, 1.35, 1.4, 1.9, 2.0, 2.6, 2.7]
    while text:
        size = int(rng.choice([1] * 18 + [5, 40]))
        both.note(text[:size])
        text = text[size:]
        if rng.random() < 0.1:
            continue  # as between the parts of a prompt
        behind = int(rng.choice([0, 1023, 1024, 5000, 16384]))
        drafted = both.propose(int(rng.integers(0, most + 1)), behind)
        lengths.add(len(drafted))
        modelled += drafted[:1] == [9]
        both.time(len(drafted), costs[1 + len(drafted)] * float(rng.uniform(0.9, 2.5)), behind)
        if drafted:
            both.judge(len(drafted), int(rng.integers(0, len(drafted) + 1)))
        both.check_gain()
    assert lengths >= {0, 2, most}
    assert (modelled > 0) == (model is not None)
    both.begin()
    both.time(0, 1.0)
    both.check_gain()
    both, phrase = Both(most), list(range(100, 200))  # of matches of 100 and 63 tokens, the longer one
    both.note([*phrase, 1, *phrase[-63:], 2, *phrase])
    assert both.propose(most)[0] == 1


# Models and layers that draft


always = always_drafting()


def bytes_planned(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "manifest.json").read_text())["plan"]["bytes"]
    return found


@pytest.mark.parametrize(("by", "options"), [
    ("layer", {}), ("head", {}), ("model", {"max_kv_size": 512}), exhaustive("model", {}),
])  # fmt: skip
def test_drafts_are_those_of_python(
    by: str, options: dict[str, Any], always: None, head: Path  # noqa: F811
) -> None:  # fmt: skip
    """Answers of a conversation are the same, and of as many drafted tokens as many are right. It has follow-ups, and
    evictions, also of the layer's rows; then turns that are abandoned, taken back and loaded."""
    model, chosen = str(LARGE if by == "model" else PREDICTS), ROWS | options
    drafts = {"head": head, "model": LARGE}
    if by in drafts:
        chosen["draft"] = str(drafts[by])
    folder, drafted, accepted = bundle_of(model, **chosen), 0, 0
    with pair_of(model, eager=DRAFTING, **chosen) as both:
        for text, sampling in zip(HELD_OUT, (GREEDY, WARM | {"seed": 7}, GREEDY), strict=True):
            both.ask(text, raw=True, max_tokens=70, **sampling)
            assert both.python.report is not None
            assert both.python.report.drafted is not None
            drafted += both.python.report.drafted.tokens
            accepted += both.python.report.drafted.accepted
            used = both.exported.use()
            if (by, options) != ("model", {}):  # which shortens its text at another time
                assert (used["drafted"], used["accepted"]) == (drafted, accepted)
        assert drafted > 120  # where a pass verifies three drafts, 157 by the model itself
        assert accepted > 60
        planned = bytes_planned(folder)
        assert planned["scratch"] < used["scratch"]
        assert 0 <= planned["scratch"] + planned["draft"] - drafting_weights(folder) - used["scratch"] < 2 << 20
        both.forget()
        both.ask(repeated(20), max_tokens=20, **GREEDY)
        state = both.exported.save()
        expected = both.ask(repeated(10), max_tokens=20, **GREEDY)
        for is_loaded in (False, True):
            both.exported.append(Role.IDS, [5, 6, 7])
            assert [both.exported.next().finish for _ in range(3)] == [0, 0, 0]
            both.exported.rewind(1 if is_loaded else 2)
            if is_loaded:
                both.exported.load(state)
            assert both.exported.answer(repeated(10), Role.IDS) == expected


def drafting_weights(folder: Path) -> int:
    """Bytes of the weights of what drafts in a bundle."""
    data = (folder / MODEL_EDGE).read_bytes()
    at = data.rindex(MAGIC)
    count = np.frombuffer(data, HEADER, 1, at)["sections"][0]
    sections = np.frombuffer(data, ENTRY, count, at + HEADER.itemsize)
    return int(sections["size"][sections["kind"] == Section.WEIGHTS].item())


@pytest.mark.parametrize("by", ["layer", "assistant"])
def test_damaged_drafts_are_refused(by: str, pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    name, more = (str(PREDICTS), {}) if by == "layer" else (str(pair[0]), {"draft": str(pair[1])})
    model, library = build_with((DRAFTING,), name, "-shared", "-fPIC", **ROWS, **more)
    data = model.read_bytes()
    inner = data.rindex(MAGIC)
    for place, words in ((inner, "this is not a model.edge"), (inner + 200, "table of sections|damaged|belongs to")):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        (tmp_path / MODEL_EDGE).write_bytes(changed)
        with pytest.raises(ModelFormatError, match=words), open_bundle(tmp_path, library):
            pass


def test_drafts_are_those_of_transformers(pair: tuple[Path, Path]) -> None:  # noqa: F811
    """From rows within a window, and behind it; the state of a prompt's last token is that of a chunk."""
    torch, found = np.load(TORCH), (ctypes.c_int32 * 3)()
    model, library = build_with((DRAFTING,), str(pair[0]), "-shared", "-fPIC", draft=str(pair[1]), **ROWS)
    for number, length in enumerate((int(torch["short"]), len(torch["tokens"]))):
        with open_bundle(model.parent, library) as bundle, bundle.session(max_tokens=2, **GREEDY) as session:
            session.append(Role.IDS, torch["tokens"][: length - 1].tolist())
            next(piece for piece in session.pieces() if piece.token is not None)
            assert bundle.library.assist(session.handle, int(torch["tokens"][length - 1]), 3, found) == 3
            assert [*found] == torch["drafts"][number].tolist()


@pytest.mark.parametrize("options", [{}, exhaustive({"kv_dtype": "int4"})])
def test_answers_are_the_same_with_an_assistant(options: dict[str, Any], pair: tuple[Path, Path]) -> None:  # noqa: F811
    """The conversation has evictions and follow-ups."""
    name, more = str(pair[0]), {"draft": str(pair[1])}
    with pair_of(name, bundle=more, eager=DRAFTING, **ROWS | options) as both:
        both.ask(repeated(60), max_tokens=90, **GREEDY)
        both.ask(repeated(20, 2), max_tokens=50, seed=7, **WARM)
        both.ask(repeated(150, 3), max_tokens=40, seed=3, **WARM)
        used, planned = both.exported.use(), bytes_planned(bundle_of(name, **ROWS | options | more))
        assert used["drafted"] > 20
        assert used["accepted"] < used["drafted"]
        assert planned["scratch"] < used["scratch"] <= planned["scratch"] + planned["draft"]


def test_exports_name_the_drafter(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    for model, draft, is_for_gpu, says in (
        (pair[0], pair[0], False, "a model with per-layer embeddings drafts in no export"),
        (GOLDEN / "llama-gqa-tied.gguf", pair[1], False, "an assistant of another Gemma 4 than llama-gqa-tied"),
        (pair[0], pair[1], True, "a bundle with --draft runs on the CPU"),
    ):
        with pytest.raises(EdgeError, match=says):
            export(model, tmp_path / "bundle", draft=str(draft), gpu=is_for_gpu)

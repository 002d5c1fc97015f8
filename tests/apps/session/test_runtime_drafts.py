"""Drafts in exported models: the same answers with and without, and those of the Python session."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_double, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import Pair, bundle_sources, recorded_session
from conftest import exhaustive
from ctypes_bundle import open_bundle
from hypothesis import given
from hypothesis import strategies as st
from runtime_library import C_FILES, build, load_runtime
from test_runtime_adapters import RANK, adapter_of, packed
from test_speculation import repetitive_texts

from edge.apps.enums import Finish, Role, Speculate
from edge.errors import InputError
from edge.plan.plan import DRAFT_TEXT_BYTES
from edge.run.drafting.ahead import Ahead
from edge.run.drafting.drafter import Drafter

MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
EAGER = Path(__file__).parents[1] / "runtime" / "eager_drafts.c"
TEXT = "The quick brown fox jumps over the lazy dog. "
GREEDY = {"temperature": 0, "ignore_eos": 1}
WARM = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repeat_penalty": 1.1, "ignore_eos": 1}


def repeated(count: int, seed: int = 1) -> list[int]:
    """Ids of which half are those before."""
    found: list[int] = np.random.default_rng(seed).integers(3, 200, count // 2).tolist()
    return found + found


def eager(name: str, **options: Any) -> tuple[Path, Path]:
    """A bundle's folder, and a library of it that always drafts."""
    model, parts = bundle_sources(name, **options)
    runtime = [path for path in C_FILES if path.name != "drafts.c"]
    return model.parent, build([*runtime, EAGER, *parts], ("-shared", "-fPIC"), ".so")


@contextmanager
def eager_pair(name: str, **options: Any) -> Iterator[Pair]:
    folder, library = eager(name, **options)
    with (
        recorded_session(name, **options) as (python, recorded),
        open_bundle(folder, library) as bundle,
        bundle.session() as exported,
    ):
        yield Pair(python, exported, recorded)


@pytest.mark.parametrize(("name", "options"), [
    (MODEL, {}), exhaustive("qwen35", {}), exhaustive("gemma4", {}),  # dense; a gated delta net; a ring
    exhaustive(MODEL, {"kv_dtype": "int8"}), exhaustive(MODEL, {"kv_dtype": "int4"}),
    exhaustive(MODEL, {"kv_dtype": "f32", "threads": 1}), exhaustive(MODEL, {"kv_policy": "window"}),
    exhaustive(MODEL, {"kv_policy": "full", "max_kv_size": 512}), exhaustive("lfm2", {}),
    exhaustive("falcon-h1", {}), exhaustive("granitehybrid", {"kv_dtype": "int8"}), exhaustive("gemma3", {}),
    exhaustive("gpt-oss", {}), exhaustive("qwen35moe", {}), exhaustive("llama-window", {}),
    exhaustive("phi3-longrope", {}), exhaustive("mistral3", {}),
])  # fmt: skip
def test_answers_are_the_same_with_drafts(name: str, options: dict[str, Any]) -> None:
    """The conversation has evictions and follow-ups."""
    with eager_pair(name, **ROWS | options) as pair:
        pair.ask(repeated(60), max_tokens=90, **GREEDY)
        pair.ask(repeated(20, 2), max_tokens=50, seed=7, **WARM)
        pair.ask(TEXT, raw=True, max_tokens=160, **GREEDY)
        if options.get("kv_policy") != "full":  # which has no room for it
            pair.ask(repeated(150, 3), max_tokens=40, seed=3, **WARM, time=100.0)
        used = pair.exported.use()
        assert 0 < used["accepted"] < used["drafted"]


@pytest.mark.parametrize(
    ("name", "rank"), [(MODEL, 0), *(exhaustive(*each) for each in (("gemma3", 0), ("qwen35", 0), (MODEL, RANK)))]
)
def test_calls_between_tokens_drop_drafts(name: str, rank: int) -> None:
    """Saving, trimming and breaking off an answer see the rows of tokens that were generated, and no others. rank: of
    an adapter, whose products are added up as in steps."""
    folder, library = eager(name, lora_rank=rank, **ROWS)
    adapter = packed(name, adapter_of(name, 1), folder) if rank else None
    with open_bundle(folder, library) as bundle:

        def run(disturbed: bool, **options: Any) -> tuple[list[int | None], bytes]:
            with bundle.session(max_tokens=60, **GREEDY, **options) as session:
                if adapter:
                    session.set_adapter(adapter)
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
                return tokens, session.save()

        expected = run(False, speculate=Speculate.OFF)
        assert run(False) == expected
        assert run(True) == expected


def test_drafts_can_be_switched_off() -> None:
    folder, library = eager(MODEL, **ROWS)
    with open_bundle(folder, library) as bundle, bundle.session(speculate=Speculate.OFF, **GREEDY) as session:
        session.set(speculate=Speculate.OFF, max_tokens=40, **GREEDY)
        _, _, finish = session.answer(repeated(40), Role.IDS)
        assert finish == Finish.LENGTH
        assert session.use()["drafted"] == 0
        with pytest.raises(InputError, match="2 is not an edge_speculate"):
            session.set(speculate=2)


class _Arena(ctypes.Structure):
    _fields_ = [("memory", c_void_p), ("used", c_uint64)]


_ASK = ctypes.CFUNCTYPE(c_uint32, c_void_p, c_uint32, POINTER(c_int32), POINTER(c_double))


class _Model(ctypes.Structure):
    _fields_ = [("share", c_double), ("of", c_void_p), ("ask", _ASK)]


class _Both:
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


def test_draft_lengths_are_those_of_the_python_session() -> None:
    """Both get the same text, times of passes, and numbers of accepted tokens."""
    both, most = _Both(7), 7
    rng, lengths = np.random.default_rng(3), set[int]()
    phrases = [rng.integers(0, 5000, rng.integers(2, 30)) for _ in range(60)]
    text = np.concatenate([phrases[each] for each in rng.integers(0, 60, 120)]).tolist()
    costs = [0.0, 1.0, 1.3, 1.35, 1.4, 1.9, 2.0, 2.6, 2.7]
    for token in text:
        both.note([token])
        behind = int(rng.choice([0, 1023, 1024, 5000, 16384]))
        drafted = len(both.propose(int(rng.integers(0, most + 1)), behind))
        lengths.add(drafted)
        both.time(drafted, costs[1 + drafted] * float(rng.uniform(0.9, 2.5)), behind)
        if drafted:
            both.judge(drafted, int(rng.integers(0, drafted + 1)))
        both.check_gain()
    assert lengths >= {0, 2, most}
    both.begin()
    both.time(0, 1.0)
    both.check_gain()


@given(repetitive_texts(), st.integers(0, 3))
def test_copied_drafts_are_those_of_the_python_session(pieces: list[list[int]], skipped: int) -> None:
    """Whatever the text: the longest match, of many places; where it is not verified, the same is learned."""
    both = _Both(5)
    for rows in range(1, 7):
        for _ in range(3):
            both.time(rows - 1, 1 + 0.3 * rows)
    for number, piece in enumerate(pieces):
        for part in [piece] if number % 3 == 0 else [[token] for token in piece]:
            both.note(part)
            if len(part) > skipped or number % 2:
                both.propose(5)

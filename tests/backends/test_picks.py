"""Tokens that an engine chooses itself: sessions generate what they generate token by token, and keep the same rows.

The engine here is the native one, which picks by its own logits, some tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, FakeMeter, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking_models import SPECIALS, write_chain

from edge.backends import find_backend
from edge.backends.base import Engine
from edge.backends.checks import check_tokens
from edge.errors import NOT_FINITE, EngineError
from edge.model.model import Model, open_model
from edge.prompt_cache.cache import PromptCache
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.sampling import SamplingParams
from edge.types import FloatArray, IntArray

PROMPT = np.arange(5, 25, dtype=np.int32)
NEXT = np.arange(40, 47, dtype=np.int32)


class Picking:
    """PickingEngine over a real engine. most: tokens that it chooses at once."""

    most_candidates, most_banned = 64, 48

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine, self._most = engine, most
        self.capabilities = replace(engine.capabilities, picks=True)
        self.bursts: list[int] = []
        self.forwards = self.tops = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, tokens: IntArray) -> FloatArray:
        self.forwards += 1
        return self._engine.forward(tokens)

    def run_greedy(self, token: int, count: int, banned: IntArray) -> IntArray:
        check_tokens(np.full(count, token), self._engine.spec.vocab, self._engine.kv.free)
        found: list[int] = []
        while len(found) < min(count, self._most):
            logits = self._engine.forward(np.array([token], np.int32))
            logits[banned] = -np.inf
            token = int(logits.argmax())
            if np.isnan(logits[token]):
                if not found:
                    raise EngineError(NOT_FINITE)
                self._engine.kv.truncate(self._engine.kv.length - 1)
                break
            found.append(token)
        self.bursts.append(len(found))
        return np.array(found, np.int32)

    def forward_top(self, tokens: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        self.tops += 1
        logits = self._engine.forward(tokens)
        ids = np.argsort(-logits, kind="stable")[:count].astype(np.int32)
        return ids, logits[ids]


class PickingBackend:
    def __init__(self, module: ModuleType, most: int) -> None:
        self._module, self._most = module, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def load(self, *arguments: Any) -> Picking:
        return Picking(self._module.load(*arguments), self._most)


Pair = tuple[Session, Session]


@contextmanager
def both(model: Model, most: int = 256, **options: Any) -> Iterator[Pair]:
    """Two sessions alike, but for an engine of the second that picks."""
    options = {"backend": "cpu", "threads": 1, "speculate": "off", **options}
    cached = options.pop("cached", False)

    def own() -> dict[str, Any]:
        cache = {"prompt_cache": PromptCache(memory="8MiB")} if cached else {}
        return {**options, **cache, "meter": FakeMeter(per_byte=1e-6)}

    def find(*arguments: Any) -> Any:
        return PickingBackend(find_backend(*arguments), most)

    with load(model, **own()) as plain, pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.plan.engines.find_backend", find)
        with load(model, **own()) as picking:
            yield plain, picking


def state(session: Session) -> tuple[object, ...]:
    """The parts of a session that two equal generations leave equal."""
    kv, report, sequence = session.engine.kv, session.report, session._sequence
    saved = kv.save() if kv.positions.ndim == 1 else None
    return (
        report.text,
        report.tokens,
        report.stop_reason,
        report.thoughts and replace(report.thoughts, seconds=0, joules=0),
        report.kv,
        kv.positions.tolist(),
        saved and bytes(saved.data),
        saved and saved.tail and bytes(saved.tail),
        sequence.pending,
        sequence.rows.fed,
    )


def engine_of(pair: Pair) -> Picking:
    return pair[1].engine


def golden(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


# Sessions


@pytest.mark.parametrize("most", [1, 3, 256])
@pytest.mark.parametrize("policy", ["full", "streaming", "knorm", "h2o", "snapkv", "tova"])
def test_policies_evict_as_token_by_token(policy: str, most: int) -> None:
    with both(golden("llama-gqa-tied"), most, max_kv_size=64, kv_policy=policy) as pair:
        for session in pair:
            assert list(session.stream(PROMPT, max_tokens=120, ignore_eos=True))
        assert state(pair[0]) == state(pair[1])
        bursts = engine_of(pair).bursts
    longest = {"h2o": 1}.get(policy, most)  # what tokens behind an end pay would stay
    assert max(bursts) == longest if longest < 256 else max(bursts) > 2


ENDS = ("eos", "stop", "length", "close", "interrupt", "terminate", "trim")


@pytest.fixture(scope="module", params=[("llama-gqa-tied", 48, False), ("gemma3", 128, True)], ids=["evicting", "ring"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    name, rows, cached = request.param
    with both(golden(name), max_kv_size=rows, kv_policy="streaming", cached=cached) as sessions:
        yield sessions


@given(how=st.sampled_from(ENDS), at=st.integers(1, 70), data=st.data())
@settings(max_examples=examples(15))
def test_answers_end_where_they_do_token_by_token(pair: Pair, how: str, at: int, data: st.DataObject) -> None:
    """By an end of turn, a stop string or the caller; memory may be given back in between. The next turn goes on."""
    prompt = np.array(data.draw(st.lists(st.integers(3, 270), min_size=1, max_size=30)), np.int32)
    ids = answer(pair, prompt)
    for session in pair:
        tokenizer = session.tokenizer
        session.terminated = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "end_ids", frozenset({ids[at]} if how == "eos" else ()))
            stop = b"".join(map(tokenizer.piece, ids[at : at + 3])).decode(errors="replace") if how == "stop" else ""
            stream = session.stream(prompt, stop=stop or None, max_tokens=at if how == "length" else 75)
            for number, _ in enumerate(stream):
                if number == at // 2 and how in ("close", "interrupt", "terminate", "trim"):
                    getattr(stream if how == "close" else session, how)(*[0.0] * (how == "trim"))
    assert state(pair[0]) == state(pair[1])
    for session in pair:
        session.terminated = False
        session.generate(NEXT, follow_up=True, max_tokens=8, ignore_eos=True)
    assert state(pair[0]) == state(pair[1])


def answer(pair: Pair, prompt: IntArray) -> list[int]:
    """The tokens of a greedy answer."""
    ran: list[int] = []
    forward = pair[0].engine.forward

    def record(tokens: IntArray) -> FloatArray:
        ran.extend(tokens.tolist())
        return forward(tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair[0].tokenizer, "end_ids", frozenset[int]())
        patch.setattr(pair[0].engine, "forward", record)
        for session in pair:
            session.generate(prompt, max_tokens=75)
    return ran[-74:]


def test_thoughts_end_where_they_do_token_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget for thoughts drops tokens that were run ahead, feeds others, and bans the mark that opens thoughts."""
    monkeypatch.setattr("edge.run.drafting.ahead.BURST_S", 60.0)  # bursts are as long as on a fast engine
    chain = ["Ċ", "<think>", *"abcdefghijklmnopqrstuvw", "</think>", "ĊĊ", *"XYZ", "<think>"]
    model = open_model(write_chain(tmp_path / "qwen.gguf", SPECIALS["qwen"], chain))
    with both(model, max_kv_size=128) as pair:
        for think in (None, False, 3, *range(10, 20)):
            told = [list[str](), list[str]()]
            for session, each in zip(pair, told, strict=True):
                session.generate("hi", think=think, on_thought=each.append, max_tokens=60)
            assert state(pair[0]) == state(pair[1])
            assert told[0] == told[1]
        assert max(engine_of(pair).bursts) > 2


@pytest.mark.parametrize("least", [5, 15, 23])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answers_have_their_least_tokens(tmp_path: Path, least: int, temperature: float) -> None:
    """Ends of a turn are drawn from there on, by engines that choose ahead as well."""
    chain = ["Ċ", *"abcdefghijklmnopqr", "<|im_end|>"]
    model = open_model(write_chain(tmp_path / "qwen.gguf", SPECIALS["qwen"], chain))
    sampling = SamplingParams(min_tokens=least, temperature=temperature, seed=1)
    with both(model, max_kv_size=128) as pair:
        for session in pair:
            session.generate("hi", sampling=sampling, max_tokens=60)
        report = pair[0].report
        assert report.tokens.generated >= max(18, least)
        assert state(pair[0]) == state(pair[1])


@pytest.mark.parametrize(
    ("params", "tops"),
    [
        (SamplingParams(temperature=0.8, seed=3), True),
        (SamplingParams(temperature=2.5, top_k=62, top_p=0.7, min_p=0.0, seed=4), True),
        (SamplingParams(temperature=2.5, top_k=64, seed=5), False),  # beside two banned tokens
        (SamplingParams(temperature=1.0, top_k=0, seed=6), False),
        (SamplingParams(temperature=0.8, repeat_penalty=1.2, seed=7), False),
        (SamplingParams(repeat_penalty=1.2), False),
    ],
    ids=str,
)
def test_draws_from_candidates_are_those_from_all_logits(params: SamplingParams, tops: bool) -> None:
    with both(golden("llama-gqa-tied"), max_kv_size=64) as pair:
        for session in pair:
            session.generate(PROMPT, sampling=params, max_tokens=60, ignore_eos=True)
        assert state(pair[0]) == state(pair[1])
        engine = engine_of(pair)
        assert (engine.tops == 59) == tops
        assert not engine.bursts


def test_tokens_ahead_stay_within_the_energy_budget() -> None:
    with both(golden("llama-gqa-tied"), max_kv_size=256) as pair:
        for session in pair:
            session.generate(PROMPT, max_tokens=200, ignore_eos=True)
        report = pair[0].report
        joules = report.energy.joules / 2
        for session in pair:
            session.generate(PROMPT, max_tokens=200, ignore_eos=True, energy_limit=joules)
            assert session.report.stop_reason == "energy"
            assert session.report.energy.joules <= joules
        assert state(pair[0]) == state(pair[1])
        assert max(engine_of(pair).bursts) > 4


def test_damaged_weights_are_noticed_behind_the_tokens_before() -> None:
    """The logits of one pass have a NaN."""
    with both(golden("llama-gqa-tied"), max_kv_size=256) as pair:
        for session in pair:
            native = session.engine._engine if isinstance(session.engine, Picking) else session.engine
            forward = native.forward

            def damaged(tokens: IntArray, native: Any = native, forward: Any = forward) -> FloatArray:
                logits: FloatArray = forward(tokens)
                if native.kv.length == PROMPT.size + 30:
                    logits[7] = np.nan
                return logits

            native.forward = damaged
            with pytest.raises(EngineError, match="NaN"):
                session.generate(PROMPT, max_tokens=60, ignore_eos=True)
            assert session.report.tokens.generated == 30
        assert state(pair[0]) == state(pair[1])

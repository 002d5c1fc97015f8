"""Sampling: draws against NumPy's, cuts and penalties against llama.cpp's own chain. The sampler of apps, which
`tests/apps/session/test_runtime_sampler.py` compares with this one, holds the whole of it."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import open_golden
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.backends.llamacpp.library import is_installed, library
from edge.backends.llamacpp.tokenizer import open_vocabulary
from edge.errors import InputError, ModelFormatError
from edge.run.sampling.sampler import (
    DRY_BREAKERS,
    Sampler,
    draw,
    dry,
    min_p,
    penalize,
    softmax,
    subtract,
    top_k,
    top_p,
    xtc,
)
from edge.run.starting.loading import load
from edge.sampling import SamplingParams, choose_sampling, parse_bias
from edge.types import FloatArray

LLAMA = open_golden("llama-gqa-tied").model
needs_llama_cpp = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")


def random_logits(size: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).normal(scale=3, size=size).astype(np.float32)


def test_ends_are_drawn_once_there_are_enough_tokens() -> None:
    logits = np.array([0, 9, 0, 8, 7], np.float32)
    sample = Sampler(SamplingParams(min_tokens=2), banned=[3], ends=[1, 3])
    drawn = []
    for count in (0, 1, 2):
        sample.count(count)
        drawn.append(sample(logits.copy()))
    assert drawn == [4, 4, 1]
    assert sample.banned.tolist() == [3]
    assert Sampler(SamplingParams(), ends=[1])(logits) == 1
    with pytest.raises(InputError, match="--min-tokens must be from 0"):
        SamplingParams(min_tokens=-1)


@pytest.mark.parametrize("left", [1, 5, 400, 900])
def test_masked_draws_equal_draws_from_all(left: int) -> None:
    """NumPy's own choice by the probabilities of all tokens, most of which are 0."""
    for seed in range(20):
        logits = random_logits(1000)
        logits[np.random.default_rng(seed).permutation(1000)[left:]] = -np.inf
        got = draw(logits, SamplingParams(1.0, top_k=0, top_p=1.0, min_p=0.0), np.random.default_rng(seed))
        assert got == np.random.default_rng(seed).choice(1000, p=softmax(logits.astype(np.float64)))


def test_no_seed_is_another_seed_each_time() -> None:
    logits = np.zeros(1000, np.float32)
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0)
    samplers = [Sampler(params) for _ in range(2)]
    assert len({tuple(sample(logits) for _ in range(8)) for sample in samplers}) == 2
    assert params.with_seed().seed != params.with_seed().seed
    assert SamplingParams().with_seed().seed is None  # greedy draws nothing
    assert SamplingParams(temperature=1.0, seed=3).with_seed().seed == 3


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -0.1}, "--temp must be from 0 to 100"), ({"temperature": math.nan}, "--temp"),
    ({"temperature": 101}, "--temp"), ({"top_k": -1}, "--top-k"),
    ({"top_p": 1.1}, "--top-p must be from 0 to 1, not 1.1"), ({"top_p": math.nan}, "--top-p"),
    ({"min_p": -0.1}, "--min-p"), ({"repeat_penalty": 0}, "--repeat-penalty"),
    ({"repeat_penalty": math.inf}, "--repeat-penalty"), ({"presence_penalty": -2.5}, "--presence-penalty"),
    ({"frequency_penalty": math.nan}, "--frequency-penalty"), ({"seed": -1}, "--seed"),
])  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)


def left_by(logits: FloatArray, *samplers: Any) -> dict[int, float]:
    """Tokens and logits that samplers of llama.cpp leave."""
    lib = library()
    entries = (lib.llama_token_data * logits.size)()
    for token, logit in enumerate(logits.tolist()):
        entries[token] = lib.llama_token_data(token, logit, 0.0)
    found = lib.llama_token_data_array(entries, logits.size, -1, False)
    for sampler in samplers:
        lib.llama_sampler_apply(sampler, ctypes.byref(found))
        lib.llama_sampler_free(sampler)
    return {found.data[index].id: found.data[index].logit for index in range(found.size)}


def llama_cpp_survivors(logits: FloatArray, params: SamplingParams, recent: list[int]) -> dict[int, float]:
    """Tokens and logits that llama.cpp's own sampler chain leaves."""
    lib = library()
    samplers = [
        lib.llama_sampler_init_penalties(
            logits.size, 64, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        ),
        lib.llama_sampler_init_top_k(params.top_k),
        lib.llama_sampler_init_top_p(params.top_p, 1),
        lib.llama_sampler_init_min_p(params.min_p, 1),
    ]
    for token in recent:
        lib.llama_sampler_accept(samplers[0], token)
    return left_by(logits, *samplers)


@needs_llama_cpp
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0),
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=10, top_p=0.5, min_p=0.0, repeat_penalty=1.3),
    SamplingParams(temperature=1.0, top_k=10, top_p=0.9, presence_penalty=1.5, frequency_penalty=-0.7),
    SamplingParams(temperature=1.0, top_k=1),
], ids=str)  # fmt: skip
def test_surviving_tokens_equal_llama_cpps(params: SamplingParams, seed: int) -> None:
    logits, recent = random_logits(3000, seed), [int(token) for token in random_logits(3000, seed).argsort()[-3:]]
    recent.append(recent[0])
    survivors = llama_cpp_survivors(logits, params, recent)

    drawn, counts = np.unique(recent, return_counts=True)
    penalize(logits, drawn, params.repeat_penalty)
    subtract(logits, drawn, counts, params.presence_penalty, params.frequency_penalty)
    tokens = top_k(logits, params.top_k or logits.size)
    probabilities = softmax(logits[tokens].astype(np.float64))
    keep = min(top_p(probabilities, params.top_p), min_p(probabilities, params.min_p))
    assert set(tokens[:keep].tolist()) == set(survivors)
    np.testing.assert_allclose(logits[tokens[:keep]], [survivors[token] for token in tokens[:keep].tolist()], rtol=1e-6)


def test_sampling_is_as_chosen_or_as_file_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are those that llama.cpp reads and its converter writes from generation_config.json."""
    recommended = {
        "general.sampling.temp": 0.6, "general.sampling.top_k": -1, "general.sampling.top_p": 0.9,
        "general.sampling.min_p": 0.0, "general.sampling.penalty_repeat": 1.1, "general.sampling.mirostat": 2,
    }  # fmt: skip
    assert choose_sampling({}) == SamplingParams()
    assert choose_sampling(recommended) == SamplingParams(0.6, 0, 0.9, 0.0, 1.1)
    assert choose_sampling(recommended, temperature=0.0, top_k=None, seed=3) == SamplingParams(0, 0, 0.9, 0, 1.1, 3)
    for wrong in (-1.0, "much", float("nan"), True):
        with pytest.raises(ModelFormatError, match=r"state it, as in --temp 0\.7"):
            choose_sampling({"general.sampling.temp": wrong})
        assert choose_sampling({"general.sampling.temp": wrong}, temperature=0.5).temperature == 0.5
    with pytest.raises(InputError, match="--temp must be from 0 to 100, not -1"):
        choose_sampling(recommended, temperature=-1)
    model = LLAMA
    with load(model, backend="reference", max_kv_size=64, threads=1) as session:
        session.generate("one", max_tokens=2)
        assert session.report.seed is None  # greedy
        monkeypatch.setitem(model.file.metadata, "general.sampling.temp", 0.6)
        session.generate("one", max_tokens=2)
        assert session.report.seed is not None


# DRY and XTC


class _Owner:
    """Frees the vocabulary of llama.cpp."""


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    owner = _Owner()
    yield open_vocabulary(owner, LLAMA.path)[1]
    del owner


# Few tokens, so that they repeat; 60 to 63 are letters, and 13 and 29 are '*' or ':' and the like.
TOKENS = st.lists(st.sampled_from([60, 61, 62, 60, 61, 62, 63, 13, 29]), min_size=1, max_size=60)


@needs_llama_cpp
@given(
    tokens=TOKENS, allowed=st.integers(1, 4), last=st.sampled_from([8, 30, 64]), base=st.sampled_from([1.0, 1.75, 4])
)
@settings(max_examples=100)
def test_dry_is_llama_cpps(theirs: Any, tokens: list[int], allowed: int, last: int, base: float) -> None:
    lib, ours = library(), LLAMA.tokenizer
    params = SamplingParams(dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_last_n=last)
    breakers = (ctypes.c_char_p * len(DRY_BREAKERS))(*DRY_BREAKERS)
    sampler = lib.llama_sampler_init_dry(theirs, 0.8, base, allowed, last, breakers, len(DRY_BREAKERS))
    for token in tokens:
        lib.llama_sampler_accept(sampler, token)
    logits = np.random.default_rng(0).normal(size=272).astype(np.float32)
    expected = left_by(logits, sampler)
    dry(logits, array("i", tokens[-last:]), params, lambda each: any(b in ours.piece(each) for b in DRY_BREAKERS))
    assert logits.tolist() == pytest.approx([expected[token] for token in range(272)], rel=1e-5, abs=1e-5)


@needs_llama_cpp
@given(seed=st.integers(0, 1 << 20), threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.5]))
def test_xtc_is_llama_cpps(seed: int, threshold: float) -> None:
    logits = np.random.default_rng(seed).normal(scale=2, size=60).astype(np.float32)
    expected = left_by(logits, library().llama_sampler_init_xtc(1.0, threshold, 1, seed))
    assert set(np.flatnonzero(xtc(softmax(logits.astype(np.float64)), threshold)).tolist()) == set(expected)


def test_xtc_leaves_no_forbidden_token_alone() -> None:
    """Whose probability reaches a threshold of 0, too."""
    forbidden = softmax(np.array([2.0, -np.inf, 1.0, 0.5]))
    assert xtc(forbidden, 0.0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("value", ["28", "a=1", "1=b", "-1=2", "1=nan", {1: float("inf")}, 3])
def test_invalid_biases_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="bias takes"):
        parse_bias(value)

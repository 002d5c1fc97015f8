"""DRY and XTC against llama.cpp's samplers."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.backends.llamacpp.library import is_installed, library
from edge.backends.llamacpp.tokenizer import open_vocabulary
from edge.errors import InputError
from edge.model.model import open_model
from edge.run.sampling.sampler import DRY_BREAKERS, Sampler, dry, softmax, xtc
from edge.sampling import SamplingParams, parse_bias

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")
MODEL = GOLDEN / "llama-gqa-tied.gguf"


class _Owner:
    """Frees the vocabulary of llama.cpp."""


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    owner = _Owner()
    yield open_vocabulary(owner, MODEL)[1]
    del owner


def apply(sampler: Any, logits: Any) -> dict[int, float]:
    lib = library()
    entries = (lib.llama_token_data * logits.size)()
    for token, logit in enumerate(logits.tolist()):
        entries[token] = lib.llama_token_data(token, logit, 0.0)
    found = lib.llama_token_data_array(entries, logits.size, -1, False)
    lib.llama_sampler_apply(sampler, ctypes.byref(found))
    lib.llama_sampler_free(sampler)
    return {found.data[index].id: found.data[index].logit for index in range(found.size)}


# Few tokens, so that they repeat; 60 to 63 are letters, and 13 and 29 are '*' or ':' and the like.
TOKENS = st.lists(st.sampled_from([60, 61, 62, 60, 61, 62, 63, 13, 29]), min_size=1, max_size=60)


@given(
    tokens=TOKENS, allowed=st.integers(1, 4), last=st.sampled_from([8, 30, 64]), base=st.sampled_from([1.0, 1.75, 4])
)
@settings(max_examples=100)
def test_dry_is_llama_cpps(theirs: Any, tokens: list[int], allowed: int, last: int, base: float) -> None:
    lib, ours = library(), open_model(MODEL).tokenizer
    params = SamplingParams(dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_last_n=last)
    breakers = (ctypes.c_char_p * len(DRY_BREAKERS))(*DRY_BREAKERS)
    sampler = lib.llama_sampler_init_dry(theirs, 0.8, base, allowed, last, breakers, len(DRY_BREAKERS))
    for token in tokens:
        lib.llama_sampler_accept(sampler, token)
    logits = np.random.default_rng(0).normal(size=272).astype(np.float32)
    expected = apply(sampler, logits)
    dry(logits, array("i", tokens[-last:]), params, lambda each: any(b in ours.piece(each) for b in DRY_BREAKERS))
    assert logits.tolist() == pytest.approx([expected[token] for token in range(272)], rel=1e-5, abs=1e-5)


@given(seed=st.integers(0, 1 << 20), threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.5]))
def test_xtc_is_llama_cpps(seed: int, threshold: float) -> None:
    logits = np.random.default_rng(seed).normal(scale=2, size=60).astype(np.float32)
    expected = apply(library().llama_sampler_init_xtc(1.0, threshold, 1, seed), logits)
    assert set(np.flatnonzero(xtc(softmax(logits.astype(np.float64)), threshold)).tolist()) == set(expected)


def test_sampler_applies_both() -> None:
    """Greedy with DRY leaves a loop that it would stay in; XTC never draws the likeliest of two that pass."""
    params = SamplingParams(dry_multiplier=5.0, dry_allowed_length=1)
    sample = Sampler(params)
    drawn = [sample(np.array([3.0, 2.0, 1.0], np.float32)) for _ in range(6)]
    assert drawn[:2] == [0, 0]
    assert len(set(drawn)) > 1
    params = SamplingParams(temperature=1.0, seed=1, xtc_probability=1.0, xtc_threshold=0.05)
    sample = Sampler(params)
    assert {sample(np.array([3.0, 2.0, 1.0, -9.0], np.float32)) for _ in range(50)} == {2}
    assert not Sampler(params).greedy
    assert Sampler(params).candidates == 40


@pytest.mark.parametrize("value", ["28", "a=1", "1=b", "-1=2", "1=nan", {1: float("inf")}, 3])
def test_invalid_biases_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="bias takes"):
        parse_bias(value)

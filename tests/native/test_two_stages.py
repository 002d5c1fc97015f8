"""A head in two stages against the whole head: the largest logits and their order are the same to the last bit.

Layers of these models add nothing: a token's hidden state is its row of `token_embd`, normalised, so that heads and
hidden states can be as bad as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Small, write_small

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import open_weights
from edge.errors import EngineError
from edge.model.model import Model, open_model
from edge.types import AnyArray, FloatArray, IntArray

pytest.importorskip("edge.backends.tvm")
pytest.importorskip("tvm_ffi")

DRAFTS = 3
HIDDEN, VOCAB = 256, 1067  # more than one band of tiles; the last tile has rows that are no tokens
COUNTS = (1, 2, 7, 16)
TIED = Small(hidden=32, vocab=1103, heads=1, kv_heads=1, ffn=32, tied=True, types={"": "F16", "token_embd": "Q8_0"})


def write(folder: Path, states: FloatArray, head: AnyArray, kind: str = "Q8_0") -> Model:
    """states: float32 [VOCAB, HIDDEN]. head: blocks of this kind, uint8 [VOCAB, row bytes]."""
    small = Small(
        hidden=HIDDEN, vocab=VOCAB, heads=1, kv_heads=1, ffn=32, tied=False,
        types={"": "F16", "token_embd": "F32", "output": kind},
    )  # fmt: skip

    def pass_through(weights: dict[str, AnyArray]) -> None:
        weights["token_embd"] = states
        weights["output_norm"][:] = 1
        for name in ("blk.0.attn_output", "blk.0.ffn_down"):
            weights[name][:] = 0

    return open_model(write_small(folder / "model.gguf", small, pass_through, raw={"output": head}))


def blocks(quants: AnyArray, scales: AnyArray) -> AnyArray:
    """Q8_0 from int8 [VOCAB, HIDDEN] and float16 [VOCAB, HIDDEN / 32]."""
    numbers = scales.astype("<f2").view(np.uint8).reshape(VOCAB, -1, 2)
    return np.concatenate([numbers, quants.view(np.uint8).reshape(VOCAB, -1, 32)], axis=-1).reshape(VOCAB, -1)


def open_engine(model: Model, threads: int = 2) -> Any:
    config = EngineConfig(capacity=8, chunk=8, kv_dtype="f16", threads=threads, logits_rows=8, drafts=DRAFTS)
    return find_backend("cpu", model.file, model.spec).load(model.file, model.spec, config)


def sorted_logits(logits: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
    order = np.lexsort((np.arange(logits.size), -logits))
    order = np.concatenate([np.flatnonzero(np.isnan(logits)), order[~np.isnan(logits[order])]])[:count]
    return order.astype(np.int32), logits[order]


def check(engine: Any, tokens: IntArray) -> None:
    """Both stages run for each of the tokens: alone, and in drafts of different lengths."""
    places = [slice(at, at + 1) for at in range(len(tokens))]
    places += [slice(at, at + 2 + number % DRAFTS) for number, at in enumerate(range(0, len(tokens) - 1, DRAFTS))]
    for place in places:
        part = tokens[place]
        engine.kv.truncate(0)
        logits = [engine.forward(token[None]).copy() for token in part]
        for count in COUNTS:
            engine.kv.truncate(0)
            engine.stages.go_on()
            found = engine.verify_top(part, count) if part.size > 1 else [engine.forward_top(part, count)]
            for (ids, values), whole in zip(found, logits, strict=True):
                expected_ids, expected = sorted_logits(whole, count)
                np.testing.assert_array_equal(ids, expected_ids)
                np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))
        lower, upper = engine.stages.bounds
        padded = np.pad(logits[0], (0, -logits[0].size % 16), constant_values=-np.inf).reshape(-1, 16)
        with np.errstate(invalid="ignore"):
            largest = np.fmax.reduce(padded, axis=1)
        assert (lower[:-1] <= largest[:-1]).all()
        assert ((upper >= largest) | ~np.isfinite(largest)).all()
    assert engine.stages.tokens >= len(places) * len(COUNTS)


def bad_states(random: np.random.Generator) -> FloatArray:
    states = random.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    states[10:20] = np.eye(HIDDEN)[:10] * 1e3  # one channel
    states[20:30, random.integers(0, HIDDEN, 3)] *= 200
    states[30:40, 32:] = 0  # one block
    states[40:45] = 1
    states[45:50] = np.sign(states[45:50])
    states[50:55] *= np.float32(1e-25)
    states[55] = 0
    states[56:60] *= np.float32(1e15)
    return states


@pytest.mark.slow
@settings(max_examples=examples(4), deadline=None)
@given(seed=st.integers(0, 1 << 30), spread=st.sampled_from([0.0, 1.0, 4.0]), threads=st.sampled_from([1, 2, 3]))
def test_largest_logits_are_those_of_the_whole_head(
    tmp_path_factory: pytest.TempPathFactory, seed: int, spread: float, threads: int
) -> None:
    """spread: powers of ten between scales."""
    random = np.random.default_rng(seed)
    quants = random.integers(-128, 128, (VOCAB, HIDDEN)).astype(np.int8)
    scales = 0.01 * random.standard_normal((VOCAB, 8)) * 10 ** (spread * random.standard_normal((VOCAB, 1)) / 2)
    scales = np.clip(scales, -60000, 60000).astype(np.float16)
    quants[100:140] = quants[100]  # equal rows
    scales[100:140] = scales[100]
    quants[200:210], quants[210:215], quants[215:220] = 0, 127, -128
    scales[220:230] = np.float16(6e-8)  # the smallest
    scales[230:235] = 0
    model = write(tmp_path_factory.mktemp("head"), bad_states(random), blocks(quants, scales))
    engine = open_engine(model, threads)
    try:
        check(engine, np.concatenate([np.arange(10, 60, 3), random.integers(60, VOCAB, 8)]).astype(np.int32))
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_tied_heads_of_one_block(
    isa: str, tmp_path: Path, engines: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All low bits are read in the first stage. On another CPU's code, too."""
    monkeypatch.setenv("EDGE_ISA", isa)
    engine = engines(open_engine(open_model(write_small(tmp_path / "model.gguf", TIED))))
    check(engine, np.arange(5, 1100, 120, dtype=np.int32))


def test_layouts_with_halves_are_packed_apart(tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path / "model.gguf", TIED))
    whole, halved = (make_layout(model.file, model.spec, halve=halve) for halve in (False, True))
    assert halved.places["token_embd"].halved
    assert open_weights(model.file, whole).path != open_weights(model.file, halved).path


@pytest.mark.slow
def test_row_counts_once_its_logits_are_there(
    tmp_path: Path, engines: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption between the stages leaves none."""
    random = np.random.default_rng(5)
    quants = random.integers(-127, 128, (VOCAB, HIDDEN)).astype(np.int8)
    head = blocks(quants, np.full((VOCAB, 8), 0.01, np.float16))
    engine = engines(open_engine(write(tmp_path, bad_states(random), head)))

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    token = np.array([7], np.int32)
    with monkeypatch.context() as patched:
        patched.setattr(engine.stages, "survivors", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.forward_top(token, 1)
    assert engine.kv.length == 0
    ids, _ = engine.forward_top(token, 3)
    engine.kv.truncate(0)
    assert ids.tolist() == sorted_logits(engine.forward(token), 3)[0].tolist()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.forward_top(token, 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_found(tmp_path: Path, engines: Callable[[Any], Any], number: float) -> None:
    random = np.random.default_rng(5)
    scales = np.full((VOCAB, 8), 0.01, np.float16)
    scales[700, 3] = number
    quants = random.integers(-127, 128, (VOCAB, HIDDEN)).astype(np.int8)
    engine = engines(open_engine(write(tmp_path, bad_states(random), blocks(quants, scales))))
    check(engine, np.arange(56, 70, dtype=np.int32))


@pytest.mark.slow
def test_flat_logits_take_the_whole_head(tmp_path: Path, engines: Callable[[Any], Any]) -> None:
    """All rows are equal: no bound excludes any, and two stages are tried ever more rarely."""
    random = np.random.default_rng(6)
    quants = np.tile(random.integers(-127, 128, (1, HIDDEN)).astype(np.int8), (VOCAB, 1))
    head = blocks(quants, np.full((VOCAB, 8), 0.01, np.float16))
    engine = engines(open_engine(write(tmp_path, bad_states(random), head)))
    for _ in range(40):
        engine.kv.truncate(0)
        ids, _ = engine.forward_top(np.array([77], np.int32), 3)
        assert ids.tolist() == [0, 1, 2]
    assert engine.stages.tiles_read == engine.stages.tokens * engine.stages.bounds[0].size
    assert engine.stages.tokens < 8
    assert engine.stages.whole == 40 - engine.stages.tokens

"""KV rows in 4 bits: the codes in NumPy, those that compiled code writes, and what attention makes of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Engines, exhaustive, load_engine, open_golden
from heads_oracle import HeadOracle
from hypothesis import given
from hypothesis import strategies as st
from small_models import Small, write_small

from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.kv import row_formats as codes
from edge.backends.tvm.kv.householder import reflect
from edge.backends.tvm.targets import choose_target
from edge.model.model import Model, open_model
from edge.types import AnyArray, FloatArray, IntArray

CAPACITY, CHUNK = 128, 8
HEADS = (16, 32, 48, 64, 80, 96, 128, 256)
INT4 = "int4"

heads = st.sampled_from(HEADS)
seeds = st.integers(0, 2**32 - 1)


def some_rows(seed: int, *shape: int) -> FloatArray:
    """A few dimensions far larger than the others, as keys have them."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=shape) * np.exp(2 * random.normal(size=shape[-1]))
    return (rows + 10 * random.normal(size=shape[-1]) * (random.random(shape[-1]) < 0.1)).astype(np.float32)


# In NumPy


@given(heads, seeds, st.floats(-3, 1))
def test_rows_come_back_within_half_a_step(head: int, seed: int, size: float) -> None:
    rows = some_rows(seed, 5, head) * np.float32(10**size)
    stored, scales = codes.encode(INT4, rows)
    assert stored.dtype == np.uint8
    assert stored.max() <= codes.STEPS
    scale, least = np.split(scales.astype(np.float32), 2, axis=-1)
    error = codes.hadamard(codes.decode(INT4, stored, scales)) - codes.hadamard(rows)
    rounding = 2.0**-10 * (codes.STEPS * scale + np.abs(least)) + 1e-6  # of the scales, to float16
    assert (np.abs(error) <= 0.5 * scale + rounding).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_rows_without_a_range_are_stored(value: float) -> None:
    rows = codes.hadamard(np.full((2, 64), value, np.float32))
    np.testing.assert_allclose(codes.decode(INT4, *codes.encode(INT4, rows)), rows, atol=1e-5)


def test_rows_beyond_float16_are_cut_to_it() -> None:
    rows = codes.decode(INT4, *codes.encode(INT4, np.full((1, 64), 1e6, np.float32)))
    assert np.isfinite(rows).all()
    assert rows.max() > 1e5


# In compiled code


@pytest.fixture(params=[(64, 6, 2, 0), *(exhaustive(each) for each in ((80, 1, 1, 0), (10, 4, 2, 0), (32, 4, 2, 9)))])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    """Values of a head, heads, KV heads, and a window. With weights in float32 nothing is rounded but the rows."""
    head, count, kv_heads, window = request.param
    small = Small(hidden=48, heads=count, kv_heads=kv_heads, head=head, ffn=64, layers=2, types="F32", window=window)
    return open_model(write_small(tmp_path / "model.gguf", small))


def some_tokens(model: Model, count: int) -> IntArray:
    return np.random.default_rng(7).integers(3, model.spec.vocab, count).astype(np.int32)


def native(model: Model, dtype: str) -> NativeEngine:
    return load_engine(model, "cpu", dtype, capacity=CAPACITY, chunk=CHUNK, observes=True)


def unpack_values(dtype: str, elements: AnyArray) -> AnyArray:
    """Codes [..., head]. int4: a byte holds two that are 16 apart, of every 32; 8 apart, of the last 16."""
    if dtype != INT4:
        return elements
    parts = [elements[..., start : start + 16] for start in range(0, elements.shape[-1], 16)]
    return np.concatenate([half for part in parts for half in (part & 15, part >> 4)], axis=-1)


def stored(engine: NativeEngine, kind: str) -> tuple[AnyArray, AnyArray]:
    """The codes and scales of all rows, as they lie in memory."""
    store = engine.kv.store
    rows, kept = store.regions.rows(np.arange(engine.kv.length)), store.rows
    unpack = codes.unpack_keys if kind == "key" else unpack_values
    return unpack(store.dtype, kept.gather(f"{kind}s", rows)), kept.gather(f"{kind}_scales", rows)


@pytest.mark.parametrize("step", [1, 5])
def test_compiled_codes_equal_numpys(model: Model, engines: Engines, step: int) -> None:
    """Rows of the first layer depend on no others, and so are the same before they are rounded."""
    exact, rounded = (native(model, dtype) for dtype in ("f32", INT4))
    for engine in (exact, rounded):
        engines(engine)
        engine.kv.store.rows.normals[:] = 0  # products are not summed in NumPy's order
        tokens = some_tokens(model, 40)
        for start in range(0, tokens.size, step):
            engine.forward(tokens[start : start + step])
    for kind in ("key", "value"):
        (rows, _), (found, scales) = stored(exact, kind), stored(rounded, kind)
        first = model.spec.kv_heads
        expected, expected_scales = codes.encode(INT4, rows[:first])
        np.testing.assert_array_equal(scales[:first], expected_scales)
        np.testing.assert_array_equal(found[:first], expected)


class RoundedRows(np.ndarray[Any, np.dtype[np.float32]]):
    """A layer's array [KV heads, rows, head] that, on their way in, takes from rows what 4 bits cannot hold."""

    normals: FloatArray

    def __array_finalize__(self, other: Any) -> None:
        self.normals = getattr(other, "normals", np.zeros(0, np.float32))

    def __setitem__(self, index: Any, rows: Any) -> None:
        head, normals = rows.shape[-1], self.normals
        padded = np.zeros((*rows.shape[:-1], normals.shape[-1]), np.float32)
        padded[..., :head] = rows
        codes_and_scales = codes.encode(INT4, reflect(padded, normals))
        super().__setitem__(index, reflect(codes.decode(INT4, *codes_and_scales), normals)[..., :head])


def rounded(rows: list[FloatArray], normals: FloatArray) -> list[RoundedRows]:
    """Of each layer."""
    views = [each.view(RoundedRows) for each in rows]
    for view, own in zip(views, normals.reshape(len(rows), len(rows[0]), -1), strict=True):
        view.normals = own
    return views


@pytest.mark.parametrize("sizes", [[1], [8, 1, 3]], ids=["steps", "chunks"])
def test_attention_sees_the_rounded_rows(model: Model, engines: Engines, sizes: list[int]) -> None:
    """A value at the edge between two codes may fall to either side, which changes few logits by little."""
    tokens, at = some_tokens(model, 60), 0
    engine, oracle = native(model, INT4), HeadOracle(model, CAPACITY, CHUNK)
    engines(engine)
    engine.observe(1)
    plain = oracle.forward_all(tokens)
    oracle.reset()
    rows = oracle.engine.kv
    normals = engine.kv.store.rows.normals
    assert np.abs(np.linalg.norm(normals, axis=-1) - 1).max() < 1e-5
    rows.keys, rows.values = rounded(rows.keys, normals), rounded(rows.values, np.zeros_like(normals))
    differences, costs = [], []
    for count in itertools.cycle(sizes):
        part = tokens[at : at + count]
        expected = np.asarray(oracle.forward_all(part, observed=1))
        differences.append(np.abs(engine.forward_all(part) - expected))
        costs.append(np.abs(plain[at : at + count] - expected))
        at += count
        if at >= tokens.size:
            break
    difference, cost = np.concatenate(differences), np.concatenate(costs)
    if sizes != [1] and choose_target().pair_rows:  # queries and values are rounded to BF16, too
        assert difference.mean() < 0.15 * cost.mean()
    else:
        assert np.median(difference) < 1e-3
        assert difference.mean() < 0.05 * cost.mean()
    np.testing.assert_allclose(engine.kv.attention, oracle.rows_of(oracle.attention), atol=0.05)


@pytest.mark.parametrize("close_gaps", [False, True])
def test_kept_rows_and_rotated_sinks_are_unchanged(engines: Engines, *, close_gaps: bool) -> None:
    engine = native(open_golden("llama-gqa-tied").model, INT4)
    engines(engine)
    engine.forward_all(some_tokens(open_golden("llama-gqa-tied").model, 60))
    before, keys = [stored(engine, kind) for kind in ("key", "value")], engine.kv.keys(0)
    rows = np.concatenate([np.arange(4), np.arange(30, 60)]).astype(np.int32)
    engine.kv.keep(rows, close_gaps=close_gaps)
    order = engine.kv._lists.physical[0, : rows.size]
    for kind, (old, old_scales) in zip(("key", "value"), before, strict=True):
        found, scales = (each[:, order] for each in stored(engine, kind))
        moved = slice(4 if close_gaps and kind == "key" else 0, None)  # the sinks are rotated
        np.testing.assert_array_equal(found[:, moved], old[:, rows][:, moved])
        np.testing.assert_array_equal(scales[:, moved], old_scales[:, rows][:, moved])
    if close_gaps:
        sizes = np.linalg.norm(keys[:, :4], axis=-1)
        np.testing.assert_allclose(np.linalg.norm(engine.kv.keys(0)[:, :4], axis=-1), sizes, rtol=0.1)

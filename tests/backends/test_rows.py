"""Rows whose values are smaller than keys, and positions of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import load_engine, some_tokens
from heads_oracle import HeadOracle, follow_evictions
from small_models import Small, write_small
from test_architectures import open_family

from edge.backends.base import GivenEngine
from edge.errors import InputError
from edge.kv import KVView, make_policy
from edge.model.model import Model, open_model
from edge.model.parts.places import Places
from edge.model.tensors import find_network
from edge.types import AnyArray

CLOSE = 2e-4
on_engines = pytest.mark.parametrize("backend", ["reference", "cpu"])


def load(model: Model, backend: str, **settings: Any) -> GivenEngine:
    return cast(GivenEngine, load_engine(model, backend, "f32", **settings))


@pytest.fixture
def unequal(tmp_path: Path) -> Model:
    return open_model(write_small(tmp_path / "unequal.gguf", Small(layers=2, head=24, value=16)))


def test_values_smaller_than_keys_with_streaming(unequal: Model) -> None:
    engine, oracle = (load(unequal, each, chunk=16) for each in ("cpu", "reference"))
    tokens = some_tokens(60, 3)
    rows = np.asarray(make_policy("streaming").rows_to_keep(KVView(40), 24))
    for each in (engine, oracle):
        each.forward(tokens[:40])
        each.kv.keep(rows, close_gaps=True)
    saved = engine.kv.save()
    np.testing.assert_allclose(engine.forward_all(tokens[40:50]), oracle.forward_all(tokens[40:50]), atol=CLOSE)
    for token in tokens[50:]:
        np.testing.assert_allclose(engine.forward(token[None]), oracle.forward(token[None]), atol=CLOSE)
    expected = engine.forward(tokens[:1]).copy()
    engine.kv.truncate(0)
    engine.kv.append(saved)
    engine.forward_all(tokens[40:])
    np.testing.assert_allclose(engine.forward(tokens[:1]), expected, atol=CLOSE)
    for each in (engine, oracle):
        each.close()


def test_values_smaller_than_keys_head_by_head(unequal: Model) -> None:
    engine = load(unequal, "cpu", chunk=16, logits_rows=16, observes=True)
    follow_evictions(engine, HeadOracle(unequal, capacity=128, chunk=16))
    engine.close()


def test_a_span_sees_all_of_itself(unequal: Model) -> None:
    """On the CPU as in the reference engine, whose answers to pictures are transformers'."""
    tokens, sees, found = some_tokens(30, 4), np.arange(30, dtype=np.int32), []
    sees[10:20] = 19  # the first pass ends before it, since a chunk of 12 would divide it
    places = Places(np.arange(30, dtype=np.int32), sees)
    assert [(each.start, each.stop) for each in places.passes(12)] == [(0, 10), (10, 22), (22, 30)]
    own = places.positions
    for backend in ("reference", "cpu"):
        engine = load(unequal, backend, chunk=12, logits_rows=12)
        found.append(engine.forward_all(tokens, places=places).copy())
        engine.kv.truncate(0)
        np.testing.assert_allclose(engine.forward(tokens, places=places), found[-1][-1], atol=CLOSE)
        engine.kv.truncate(0)
        with pytest.raises(InputError, match="a span of more than 12 tokens"):
            engine.forward_all(tokens, places=Places(own, np.full(30, 29, np.int32)))
        for wrong in (Places(own, sees[::-1]), Places(own - 1, sees), Places(own[1:], sees)):
            with pytest.raises(InputError, match=r"places|positions"):
                engine.forward_all(tokens, places=wrong)
        assert engine.kv.length == 0
        engine.close()
    np.testing.assert_allclose(*found, atol=CLOSE)


@on_engines
def test_positions_of_three_components(backend: str) -> None:
    """A picture of 3 × 4 between texts: rows follow each other, and the text behind it goes on at the largest."""
    model = open_family("qwen35").model
    engine, oracle = (load(model, each, capacity=64, chunk=32, logits_rows=32) for each in (backend, "reference"))
    network = find_network(engine.spec)
    rope = next(each for each in network.ropes if each.dim)
    assert (sum(rope.sections), network.components) == (rope.dim // 2, 3)
    tokens, text, close = some_tokens(24, 5), Places.after(0, 24), 1e-5 if backend == "reference" else 2e-3
    expected = engine.forward_all(tokens).copy()
    engine.kv.truncate(0)
    same = Places(np.repeat(text.positions[:, None], 3, axis=1), text.sees)
    np.testing.assert_array_equal(engine.forward_all(tokens, places=same), expected)
    engine.kv.truncate(0)
    places = _with_picture(6, 3, 4, 24)
    assert places.next_position == 6 + 4 + 6
    found = engine.forward_all(tokens, places=places).copy()
    np.testing.assert_allclose(found[:6], expected[:6], atol=close)
    np.testing.assert_allclose(found, oracle.forward_all(tokens, places=places), atol=close)
    assert np.abs(found[-1] - expected[-1]).max() > 0.01
    assert engine.kv.next_position == 16
    np.testing.assert_allclose(engine.forward(tokens[:1]), oracle.forward(tokens[:1]), atol=close)
    engine.kv.truncate(0)  # only distances matter
    moved = engine.forward_all(tokens, places=Places(places.positions + 100, places.sees))
    np.testing.assert_allclose(moved, found, atol=1e-3 + close)
    engine.close()


def _with_picture(before: int, height: int, width: int, count: int) -> Places:
    positions = np.repeat(np.arange(count)[:, None], 3, axis=1)
    cells: AnyArray = np.stack(np.mgrid[:1, :height, :width], axis=-1).reshape(-1, 3)
    end = before + len(cells)
    positions[before:end] = before + cells
    positions[end:] = before + max(height, width) + np.arange(count - end)[:, None]
    return Places(positions.astype(np.int32), np.arange(count, dtype=np.int32))

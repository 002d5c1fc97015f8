"""Rows of any shape, and positions of any kind, beside plain formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import load_engine, some_tokens
from plain import Plain
from small_models import Small, write_small
from test_architectures import open_family, require_native

from edge.backends.base import EngineConfig, GivenEngine, ObservedEngine
from edge.backends.kv_cache import HeadKVCache
from edge.backends.reference import ENGINE
from edge.backends.rope import find_rotation
from edge.backends.tvm.packing.cores import supports
from edge.errors import InputError
from edge.formats.gguf import read_gguf
from edge.kv import KVView, make_policy
from edge.model.cores import Attention, RowShape
from edge.model.model import Model, open_model
from edge.model.parts.places import Places
from edge.model.structure.layers import Block
from edge.model.tensors import find_network
from edge.run.sequences.eviction import view_for
from edge.types import AnyArray

UNEQUAL = Small(layers=2, head=24, value=16)
CLOSE = 2e-4
on_engines = pytest.mark.parametrize("backend", ["reference", "cpu"])


def load(model: Model, backend: str, **settings: Any) -> GivenEngine:
    if backend == "cpu":
        require_native()
    return cast(GivenEngine, load_engine(model, backend, "f32", **settings))


def unequal(folder: Path) -> Model:
    return open_model(write_small(folder / "unequal.gguf", UNEQUAL))


@pytest.fixture
def plain() -> Plain:
    return Plain(UNEQUAL)


@on_engines
def test_values_smaller_than_keys_with_streaming(backend: str, plain: Plain, tmp_path: Path) -> None:
    engine = load(unequal(tmp_path), backend, chunk=16)
    tokens, policy = some_tokens(60, 3), make_policy("streaming")
    np.testing.assert_allclose(engine.forward_all(tokens[:40]), plain.run(tokens[:40]), atol=CLOSE)
    rows = np.asarray(policy.rows_to_keep(KVView(40), 24))
    engine.kv.keep(rows, close_gaps=True)
    plain.keep([rows], close_gaps=True)
    saved = engine.kv.save()
    np.testing.assert_allclose(engine.forward_all(tokens[40:50]), plain.run(tokens[40:50]), atol=CLOSE)
    for token in tokens[50:]:
        np.testing.assert_allclose(engine.forward(token[None]), plain.run(token[None])[0], atol=CLOSE)
    expected = engine.forward(tokens[:1]).copy()
    engine.kv.truncate(0)
    engine.kv.append(saved)
    engine.forward_all(tokens[40:])
    np.testing.assert_allclose(engine.forward(tokens[:1]), expected, atol=CLOSE)
    engine.close()


def test_values_that_are_a_part_of_keys_rotated_behind_them(tmp_path: Path) -> None:
    """Rows as latent attention has them, in the reference engine."""

    def without_values(weights: dict[str, AnyArray]) -> None:
        for layer in range(UNEQUAL.layers):
            del weights[f"blk.{layer}.attn_v"]

    def latent(block: Block) -> Block:
        if not isinstance(block.core, Attention):
            return block
        rope = replace(block.core.rope, first=16, dim=8)
        return replace(block, core=replace(block.core, shared_values=True, rope=rope))

    spec, plain = unequal(tmp_path).spec, Plain(UNEQUAL, shared=True)
    network = find_network(spec)
    network = replace(network, layers=tuple(tuple(map(latent, layer)) for layer in network.layers))
    assert network.rows == (RowShape(2, 24, 16, (16, 8), shared=True),) * 2
    assert network.row_values == (2 * 24,) * 2
    file = read_gguf(write_small(tmp_path / "latent.gguf", UNEQUAL, without_values))
    spec = replace(spec, network=network, rope_dim=8)
    engine = ENGINE.load(file, spec, EngineConfig(64, 16, "f32", 1, logits_rows=16))
    assert engine.kv.nbytes == 4 * 64 * sum(network.row_values)
    assert "whose values" in str(supports(next(core for core in network.cores if isinstance(core, Attention))))
    tokens = some_tokens(60, 6)
    np.testing.assert_allclose(engine.forward_all(tokens[:40]), plain.run(tokens[:40]), atol=CLOSE)
    rows = np.asarray(make_policy("streaming").rows_to_keep(KVView(40), 24))
    engine.kv.keep(rows, close_gaps=True)
    plain.keep([rows], close_gaps=True)
    engine.kv.shrink(48)
    saved = engine.kv.save()
    engine.kv.truncate(0)
    engine.kv.append(saved)
    np.testing.assert_allclose(engine.forward_all(tokens[40:]), plain.run(tokens[40:]), atol=CLOSE)
    engine.close()


def test_values_smaller_than_keys_with_a_score_policy(plain: Plain, tmp_path: Path) -> None:
    engine = load(unequal(tmp_path), "cpu", chunk=16, observes=True)
    observed, tokens, policy = cast(ObservedEngine, engine), some_tokens(60, 5), make_policy("h2o")
    kv = cast(HeadKVCache, engine.kv)
    observed.observe(16)
    np.testing.assert_allclose(engine.forward_all(tokens[:40]), plain.run(tokens[:40]), atol=CLOSE)
    paid = np.array(plain.attention).reshape(2, 2, 40)
    np.testing.assert_allclose(kv.attention, paid, atol=CLOSE)
    rows = policy.rows_to_keep(view_for(kv, policy.needs), 24)
    assert not isinstance(rows, np.ndarray)
    kv.keep_heads(rows)
    plain.keep(rows)
    np.testing.assert_allclose(engine.forward_all(tokens[40:]), plain.run(tokens[40:]), atol=CLOSE)
    engine.close()


@on_engines
def test_a_span_sees_all_of_itself(backend: str, plain: Plain, tmp_path: Path) -> None:
    engine = load(unequal(tmp_path), backend, chunk=12, logits_rows=12)
    tokens, sees = some_tokens(30, 4), np.arange(30, dtype=np.int32)
    sees[10:20] = 19  # the first pass ends before it, since a chunk of 12 would divide it
    places = Places(np.arange(30, dtype=np.int32), sees)
    assert [(each.start, each.stop) for each in places.passes(12)] == [(0, 10), (10, 22), (22, 30)]
    expected = plain.run(tokens, sees=sees)
    np.testing.assert_allclose(engine.forward_all(tokens, places=places), expected, atol=CLOSE)
    engine.kv.truncate(0)
    np.testing.assert_allclose(engine.forward(tokens, places=places), expected[-1], atol=CLOSE)
    engine.kv.truncate(0)
    own = places.positions
    with pytest.raises(InputError, match="a span of more than 12 tokens"):
        engine.forward_all(tokens, places=Places(own, np.full(30, 29, np.int32)))
    for wrong in (Places(own, sees[::-1]), Places(own - 1, sees), Places(own[1:], sees)):
        with pytest.raises(InputError, match=r"places|positions"):
            engine.forward_all(tokens, places=wrong)
    assert engine.kv.length == 0
    engine.close()


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


def test_angles_by_component() -> None:
    model = open_family("qwen35").model
    network = find_network(model.spec)
    rope = next(each for each in network.ropes if each.dim)
    rotation, positions = find_rotation(model.file, network, halves=network.halves), np.array([[7, 12, 16]])
    cos, sin = rotation.tables(0, positions)
    for pair, component in enumerate(rope.components):
        angle = positions[0, component] * rope.base ** (-2 * pair / rope.dim)
        assert (cos[0, pair], sin[0, pair]) == pytest.approx((np.cos(angle), np.sin(angle)), abs=1e-6)


def test_interleaved_and_contiguous_sections() -> None:
    network = find_network(open_family("qwen35").model.spec)
    rope = next(each for each in network.ropes if each.dim)
    wide = replace(rope, dim=64, sections=(11, 11, 10), interleaved=True)
    assert wide.components == (*([0, 1, 2] * 10), 0, 1)
    contiguous = replace(rope, dim=128, sections=(16, 24, 24), interleaved=False)
    assert contiguous.components == (*[0] * 16, *[1] * 24, *[2] * 24)


def _with_picture(before: int, height: int, width: int, count: int) -> Places:
    positions = np.repeat(np.arange(count)[:, None], 3, axis=1)
    cells: AnyArray = np.stack(np.mgrid[:1, :height, :width], axis=-1).reshape(-1, 3)
    end = before + len(cells)
    positions[before:end] = before + cells
    positions[end:] = before + max(height, width) + np.arange(count - end)[:, None]
    return Places(positions.astype(np.int32), np.arange(count, dtype=np.int32))

"""Counting what a pass asks of a device, against sums made in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import open_golden
from hypothesis import given
from hypothesis import strategies as st

from edge.backends.base import EngineConfig
from edge.backends.counts import Footprint
from edge.devices.integer_products import missing
from edge.devices.probe import measure_ceilings
from edge.formats.blocks import nbytes
from edge.lab.prediction.work import work_of
from edge.model.cores import Attention
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec

CONFIG = EngineConfig(capacity=64, chunk=64, kv_dtype="f16", threads=1)
NEED = Footprint(weights=10_000, kv=6_400, scratch=0, runtime=0)
GOLDEN = open_golden("llama-gqa-tied").model.spec
SPEC = replace(GOLDEN, network=None, window=0, layer_values=GOLDEN.kv_values)


def with_windows(windows: Sequence[int]) -> ModelSpec:
    """Layers with these windows."""
    core = Attention(SPEC.heads, SPEC.kv_heads, SPEC.head_dim, 1.0)
    layers = tuple((Block("attn_norm", replace(core, window=window)),) for window in windows)
    return replace(SPEC, layers=len(windows), network=Network(SPEC.hidden, SPEC.vocab, layers))


def pairs(windows: list[int], tokens: int, context: int) -> int:
    """Rows that each token sees in each layer, one by one."""
    return sum(min(context + i + 1, window or 1 << 40) for window in windows for i in range(tokens))


@given(
    tokens=st.integers(1, 40), context=st.integers(0, 60), windows=st.lists(st.sampled_from((0, 1, 7, 33)), min_size=1)
)
def test_attention_is_counted_pair_by_pair(tokens: int, context: int, windows: list[int]) -> None:
    spec = with_windows(windows)
    head = spec.vocab * spec.hidden
    work = work_of(spec, CONFIG, NEED, tokens, context)
    attention = 4 * spec.heads * spec.head_dim * pairs(windows, tokens, context)
    assert work.flops == pytest.approx(2 * (spec.parameters - head) * tokens + 2 * head + attention)
    rows = sum(min(context + tokens, window or 1 << 40) for window in windows) / len(windows)
    assert work.kv_bytes == pytest.approx(100 * rows)
    assert work.weight_bytes == NEED.weights


def test_layers_with_windows_read_their_windows() -> None:
    """Two of three layers have a ring, of 30 rows of 10 bytes each; the rows of the other are 6,400 bytes."""
    spec = with_windows((16, 0, 16))
    need = replace(NEED, kv=6_400 + 600, fixed_kv=600)
    assert work_of(spec, CONFIG, need, 1, 39).kv_bytes == pytest.approx(100 * (40 + 16 + 16))
    assert work_of(spec, CONFIG, need, 1, 9).kv_bytes == pytest.approx(100 * 3 * 10)


def test_embeddings_of_layers_are_looked_up_too(tmp_path: Path) -> None:
    """Gemma 4 E2B: 4.63B parameters, of which 2.3B are "effective"."""
    spec = read_spec(outline_model(known_models()["gemma4:e2b"], "Q4_0", tmp_path / "outline.gguf"))
    assert spec.parameters - spec.table_parameters == pytest.approx(2.3e9, rel=0.02)
    need = Footprint(weights=spec.weight_bytes, kv=6_400, scratch=0, runtime=0)
    read = work_of(spec, CONFIG, need, 1, 0)
    assert read.weight_bytes == spec.weight_bytes - nbytes("Q6_K", 262_144 * 35 * 256)
    assert read.flops == pytest.approx(2 * 2.3e9, rel=0.02)


def test_ceilings_are_measured_in_process_of_its_own() -> None:
    parts: list[float] = []
    measured = measure_ceilings(1, 0.05, parts.append)
    assert measured.read_bytes_per_s > 1e6
    assert measured.f32_flops > 1e6
    assert measured.threads == 1
    if missing() is None:
        assert measured.int8_ops is not None
        assert measured.int8_ops > 1e6
    else:
        assert measured.int8_ops is None
    assert parts == sorted(parts)
    assert parts[-1] == 1

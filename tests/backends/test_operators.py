"""Times of operators: what the native engine tells, nothing missing or counted twice, and figures that are right.

How long anything takes is never judged, except that parts are not longer than the whole that they are parts of.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import Small, write_small

from edge.backends import find_backend
from edge.backends.base import PHASES, EngineConfig, Operator
from edge.backends.operators import Piece, pieces
from edge.backends.tvm.cpu.timing import NANOSECONDS, read_counters
from edge.backends.tvm.engine import NativeEngine
from edge.errors import InputError, UnsupportedError
from edge.model.model import Model, open_model

CONFIG = EngineConfig(capacity=64, chunk=8, kv_dtype="f16", threads=2)
LAYERS, TOKENS, CONTEXT = 2, 11, 20  # a chunk of 8 tokens, and one of 3
SMALL = Small(layers=LAYERS, types="Q4_0")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Two layers of Q4_0: hidden 64, 4 heads of 16, 2 KV heads, feed-forward 96, 272 tokens, no head of its own."""
    return open_model(write_small(tmp_path_factory.mktemp("operators") / "small.gguf", SMALL))


def times_of(
    model: Model, backend: str, config: EngineConfig = CONFIG, *, tokens: int = TOKENS, context: int = CONTEXT
) -> list[Operator]:
    module = find_backend(backend, model.file, model.spec)
    found = module.operators(model.file, model.spec, config, tokens=tokens, context=context, passes=2)
    assert all(each.phase in PHASES and each.seconds >= 0 and each.calls > 0 for each in found)
    return found


def only(operators: list[Operator], name: str, layer: int | None = 0) -> Operator:
    (found,) = (each for each in operators if (each.name, each.layer) == (name, layer))
    return found


CHUNK_LAYER = ["attn norm", "qkv", "attend", "quantize mixed", "output", "ffn norm", "gate up", "quantize ffn", "down"]
STEP_LAYER = [*CHUNK_LAYER[:3], "merge", *CHUNK_LAYER[3:]]


@pytest.mark.parametrize(("tokens", "inside"), [(1, STEP_LAYER), (TOKENS, CHUNK_LAYER)])
def test_tvm_tells_every_phase_once_a_layer(quantized: Model, tokens: int, inside: list[str]) -> None:
    found = times_of(quantized, "cpu", tokens=tokens)
    expected = [("embed", None), *((name, layer) for layer in range(LAYERS) for name in inside)]
    assert [(each.name, each.layer) for each in found] == [*expected, ("output norm", None), ("head", None)]
    assert {each.calls for each in found} == {-(-tokens // CONFIG.chunk)}
    assert all(each.waited is not None and 0 <= each.waited <= 1 for each in found)


def test_tvm_counts_bytes_and_flops(quantized: Model) -> None:
    block = 2 + 16  # bytes of 32 weights
    heads, seen = 4, sum(CONTEXT + index + 1 for index in range(TOKENS))
    chunk, step = times_of(quantized, "cpu"), times_of(quantized, "cpu", tokens=1)
    for name, values in {"qkv": 64 * 128, "output": 64 * 64, "gate up": 64 * 192, "down": 96 * 64}.items():
        assert only(chunk, name).bytes == 2 * values * block // 32  # read by both pieces
        assert only(step, name).bytes == values * block // 32
        assert (only(chunk, name).flops, only(step, name).flops) == (2 * TOKENS * values, 2 * values)
    assert only(chunk, "attend").flops == 4 * heads * 16 * seen
    assert only(chunk, "attend").bytes == 2 * 2 * 2 * 16 * (CONTEXT + 8 + CONTEXT + TOKENS)  # K, V; KV heads; f16
    assert only(step, "attend").flops == 4 * heads * 16 * (CONTEXT + 1)
    for found in (chunk, step):
        head = only(found, "head", None)
        assert (head.flops, head.bytes) == (2 * 272 * 64, 272 * 64 * block // 32)
        assert only(found, "attn norm").bytes == 64 * 4 * only(found, "attn norm").calls
        assert only(found, "quantize ffn").bytes is only(found, "quantize ffn").flops is None
    assert only(chunk, "embed", None).bytes == TOKENS * 64 * block // 32


def test_timed_pass_gives_the_same_logits_and_sums_its_phases(quantized: Model) -> None:
    """The parts lie inside of the whole, by the same clock."""
    plain = NativeEngine(quantized.file, quantized.spec, CONFIG)
    timed = NativeEngine(quantized.file, quantized.spec, CONFIG, timed=True)
    try:
        for tokens in (np.arange(19), np.array([5]), np.array([7])):
            timed.times[:] = 0
            started = time.perf_counter_ns()
            logits = timed.forward(tokens)
            lasted = time.perf_counter_ns() - started
            assert np.array_equal(logits, plain.forward(tokens))
            counted = read_counters(timed.times, LAYERS)
            parts = counted[0, :, 1:, :, NANOSECONDS]
            assert 0 < parts.sum() <= lasted
            assert (parts >= 0).all()
    finally:
        plain.close()
        timed.close()


@pytest.mark.parametrize(
    "bad",
    [{"tokens": 0}, {"tokens": 65, "context": 0}, {"context": -1}, {"context": 64}, {"context": 60, "tokens": 5}],
    ids=str,
)
def test_figures_that_do_not_fit_are_refused(quantized: Model, bad: dict[str, int]) -> None:
    with pytest.raises(InputError):
        times_of(quantized, "cpu", **bad)


@pytest.mark.parametrize("backend", ["reference", "onnx", "llamacpp"])
def test_other_engines_cannot_tell(quantized: Model, backend: str) -> None:
    with pytest.raises(UnsupportedError, match="does not tell where its time goes"):
        times_of(quantized, backend)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 50))
def test_operators_count_the_rows_that_tokens_see(context: int, tokens: int, step: int, window: int) -> None:
    parts = list(pieces(tokens, context, step))
    assert [row for part in parts for row in range(part.before, part.before + part.count)] == [
        *range(context, context + tokens)
    ]
    assert all(part.count <= step for part in parts)
    for part in parts:
        seen = [
            {row for row in range(last + 1) if not window or row > last - window}
            for last in range(part.before, part.before + part.count)
        ]
        assert part.seen(window) == sum(map(len, seen))
        assert part.rows(window) == len(set().union(*seen))
    assert Piece(3, 2).seen(0) == 4 + 5

"""What every engine must do. A new engine adds one row to ENGINES; the answers are those of transformers."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import (
    CAPACITY,
    CHUNK,
    SINKS,
    SOME_GPU,
    Engines,
    Golden,
    bring_back,
    examples,
    exhaustive,
    load_engine,
    open_golden,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Small, write_small

from edge.backends.base import Engine, GivenEngine
from edge.backends.kv_cache import CapacityError, KVState
from edge.backends.reference import ReferenceEngine
from edge.errors import EngineError, InputError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.kv import KVView, make_policy
from edge.model.model import Model, open_model
from edge.model.parts.given import GivenRows
from edge.model.tensors import find_network
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class Row:
    """An engine in one of its settings, and how exact it is.

    tolerance: largest error of a logit; their standard deviation is 3.
    correlation: with rows of few bits, the least correlation of a token's logits with the expected ones instead.
    onnx rounds rows with scales that are fixed beforehand, cpu with one for every row.
    Drivers without a GPU compile for long, so make test has the exact rows of one; `test_gpu_rows.py` has the attention
    of all.
    """

    backend: str
    kv_dtype: str
    tolerance: float = 0.0
    correlation: float | None = None

    def __str__(self) -> str:
        return f"{self.backend}-{self.kv_dtype}"

    @property
    def wings(self) -> list[pytest.MarkDecorator]:
        return [pytest.mark.wing(wing) for start, wing in _WINGS.items() if re.match(f"{start}(:|$)", self.backend)]


_WINGS = {
    "llamacpp": "llama.cpp", "cpu": "the native engine", "onnx": "ONNX Runtime", "onnx@qnn": "QNN's emulator",
    "gpu@wgpu": "Vulkan", "gpu@opencl": "OpenCL",
}  # fmt: skip
ENGINES = (
    Row("reference", "f32", tolerance=1e-3),
    Row("llamacpp", "f32", tolerance=1e-3),
    Row("llamacpp", "f16", tolerance=8e-2),
    Row("llamacpp", "q8_0", tolerance=8e-1),
    Row("llamacpp", "q4_0", correlation=0.85),
    Row("cpu", "f32", tolerance=1e-3),
    Row("cpu", "f16", tolerance=2e-1),  # some multiply in BF16
    Row("cpu", "int8", tolerance=8e-1),
    Row("cpu", "int4", correlation=0.9),
    Row(f"gpu@{SOME_GPU}", "f32", tolerance=1e-3),
    Row(f"gpu@{SOME_GPU}", "f16", tolerance=8e-2),
    Row(f"gpu@{SOME_GPU}", "int8", tolerance=8e-1),
    Row(f"gpu@{SOME_GPU}", "int4", correlation=0.9),
    Row("gpu@opencl:0", "f16", tolerance=8e-2),
    Row("gpu@opencl:0", "int4", correlation=0.9),
)


if find_spec("onnxruntime"):  # which Python 3.10 cannot have
    ENGINES += (
        Row("onnx", "f32", tolerance=1e-4),
        Row("onnx", "f16", tolerance=8e-2),
        Row("onnx", "int8", tolerance=1.2),
        Row("onnx", "int4", correlation=0.65),
        Row("onnx@cpu-static", "f32", tolerance=1e-4),
        Row("onnx@cpu-static", "f16", tolerance=8e-2),
    )
if find_spec("onnxruntime_qnn"):  # whose emulator computes in float16
    ENGINES += (Row("onnx@qnn", "f16", tolerance=2e-1),)


OpenEngine = Callable[..., Engine]
"""Opens the engine under test on the golden model under test; keywords as in `load_engine`."""


@dataclass(frozen=True)
class Setting:
    row: Row
    model: str

    def __str__(self) -> str:
        return f"{self.row}-{self.model}"


WIDE = {  # llama.cpp quantizes rows of such heads only
    "llama-wide": Small(layers=2, heads=2, kv_heads=1, head=64),
    "llama-wide-one-layer": Small(layers=1, heads=2, kv_heads=1, head=64),
}


@lru_cache
def golden_of(name: str) -> Golden:
    """Of models of ours, the answers are the reference engine's, which others compare with those of transformers."""
    if name not in WIDE:
        return open_golden(name)
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = open_model(write_small(folder / f"{name}.gguf", WIDE[name]))
    tokens = np.random.default_rng(1).integers(3, model.spec.vocab, 64).astype(np.int32)
    engine, keep_rows = load_engine(model, "reference", "f32"), rows_of(0, 1, 2, 3, 9, 17, 18, 30, 38, 39)
    logits = engine.forward_all(tokens).copy()
    engine.kv.truncate(40)
    engine.kv.keep(keep_rows, close_gaps=False)
    kept = engine.forward_all(tokens[40:44]).copy()
    streamed = [
        stream(load_engine(model, "reference", "f32", capacity=CAPACITY), tokens, gaps) for gaps in (True, False)
    ]
    return Golden(model, tokens, logits, *streamed, keep_rows, kept)


def stream(engine: Engine, tokens: IntArray, close_gaps: bool) -> FloatArray:
    """Logits after every token of chunks that evict what is behind the sinks."""
    policy, logits = make_policy("streaming", SINKS), []
    for start in range(0, tokens.size, CHUNK):
        if engine.kv.length + CHUNK > CAPACITY:
            rows = policy.rows_to_keep(KVView(engine.kv.length), CAPACITY - CHUNK)
            engine.kv.keep(rows, close_gaps=close_gaps)
        logits.append(engine.forward_all(tokens[start : start + CHUNK]).copy())
    return np.concatenate(logits)


def marked(row: Row, model: str, often: bool) -> Any:
    return pytest.param(Setting(row, model), marks=[*row.wings, *[pytest.mark.exhaustive] * (not often)])


# The engines' bookkeeping is judged with their first row; what depends on rows in each, what depends on models in each
# engine with float32. A GPU shares its bookkeeping with cpu, an NPU with onnx. make test-all has all rows.
_FIRST = {row.backend: row for row in reversed(ENGINES)}


def settings_of(
    model: str = "llama-gqa-tied", *, each_row: bool = False, each_model: bool = False, device: bool = False
) -> list[Any]:
    """Of tests that depend on nothing, on rows, on models, or on what runs them."""
    found = []
    for row in ENGINES:
        often = each_row or row is _FIRST[row.backend]
        if "@" in row.backend:
            often = row.kv_dtype == "f32" and (each_row or device)
        wide = model.replace("gqa-tied", "wide").replace("llama-one", "llama-wide-one")
        found.append(marked(row, wide if row.kv_dtype.startswith("q") else model, often))
        if each_model and row.kv_dtype == "f32" and "@" not in row.backend:
            found.append(marked(row, "llama-rope-scaled", True))
    return found


def parametrized(model: str = "llama-gqa-tied", **often: bool) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("setting", settings_of(model, **often), indirect=True, ids=str)


EACH_MODEL, EACH_ROW = parametrized(each_row=True, each_model=True), parametrized(each_row=True)
# Its KV rows depend on their own token and position alone, so an evicted cache has an exact equal.
ONE_LAYER, ONE_LAYER_EACH_ROW = parametrized("llama-one-layer"), parametrized("llama-one-layer", each_row=True)


@pytest.fixture(params=settings_of(), ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    return request.param


@pytest.fixture
def row(setting: Setting) -> Row:
    return setting.row


@pytest.fixture
def golden(setting: Setting) -> Golden:
    return golden_of(setting.model)


@pytest.fixture
def open_engine(row: Row, golden: Golden, engines: Engines) -> OpenEngine:
    def open_one(**options: int) -> Engine:
        return engines(load_engine(golden.model, row.backend, row.kv_dtype, **options))

    return open_one


@pytest.fixture
def close_to(row: Row) -> Callable[[FloatArray, FloatArray], None]:
    """Asserts that logits equal the expected ones, as exactly as the engine promises."""
    if row.correlation is None:
        return partial(np.testing.assert_allclose, rtol=0, atol=row.tolerance)
    return partial(assert_correlated, row.correlation)


def assert_correlated(least: float, ours: FloatArray, expected: FloatArray) -> None:
    """Token by token: one row of the cache that is lost shows."""
    assert ours.shape == expected.shape
    for one, other in zip(np.atleast_2d(ours), np.atleast_2d(expected), strict=True):
        assert np.corrcoef(one, other)[0, 1] > least


CloseTo = Callable[[FloatArray, FloatArray], None]


def rows_of(*rows: int) -> IntArray:
    return np.array(rows, np.int32)


# Logits


@EACH_MODEL
def test_logits_after_every_token_and_in_pieces(open_engine: OpenEngine, golden: Golden, close_to: CloseTo) -> None:
    engine, tokens = open_engine(), golden.tokens
    logits = engine.forward_all(tokens)
    assert logits.dtype == np.float32
    close_to(logits, golden.logits)
    for step in (1, 7, 64):
        engine.kv.truncate(0)
        assert engine.kv.length == 0
        for start in range(0, tokens.size, step):
            part = tokens[start : start + step]
            last = engine.forward(part)
            assert last.shape == (engine.spec.vocab,)
            close_to(last, golden.logits[start + part.size - 1])


@pytest.mark.parametrize(("chunk", "logits_rows"), [(1, 1), (7, 1), (64, 8)])
def test_logits_depend_on_neither_chunk_nor_logits_rows(
    open_engine: OpenEngine, golden: Golden, close_to: CloseTo, chunk: int, logits_rows: int
) -> None:
    engine, tokens = open_engine(chunk=chunk, logits_rows=logits_rows), golden.tokens
    close_to(engine.forward_all(tokens), golden.logits)
    engine.kv.truncate(0)
    close_to(engine.forward(tokens[:10]), golden.logits[9])
    close_to(engine.forward_all(tokens[10:30]), golden.logits[10:30])
    close_to(engine.forward(tokens[30:]), golden.logits[-1])


@parametrized(device=True)
def test_given_rows_equal_tokens_with_these_embeddings(open_engine: OpenEngine, golden: Golden) -> None:
    engine = open_engine()
    running, network = cast(GivenEngine, engine), find_network(engine.spec)
    info = golden.model.file.tensors["token_embd.weight"]
    table = dequantize(golden.model.file.tensor_bytes(info).reshape(info.shape[1], -1), info.type)
    expected, tokens = engine.forward_all(golden.tokens).copy(), golden.tokens.copy()
    given = GivenRows(engine.spec.vocab, engine.spec.hidden)
    instead = [0, 1, 2, 3, 4, 5, 6, 7, 8, 20, 31, 63]
    tokens[instead] = given.add(table[tokens[instead]] * np.float32(network.embedding_scale))
    engine.kv.truncate(0)
    near = 1e-4 if engine.capabilities.any_tokenizer else 0  # llama.cpp's batches, whose sizes differ, are of one kind
    np.testing.assert_allclose(running.forward_all(tokens[:40], given), expected[:40], rtol=0, atol=near)
    for token in tokens[40:63]:
        running.forward(token[None], given)
    np.testing.assert_allclose(running.forward(tokens[63:], given), expected[63], atol=1e-3)
    engine.kv.truncate(0)
    for unknown in (None, GivenRows(engine.spec.vocab, engine.spec.hidden)):
        with pytest.raises(InputError, match="token ids must be"):
            running.forward(tokens, unknown)
    assert engine.kv.length == 0


def test_appended_rows_equal_those_of_tokens(open_engine: OpenEngine, golden: Golden, close_to: CloseTo) -> None:
    engine = open_engine()
    if not engine.capabilities.appends:
        pytest.skip("it takes tokens only")
    oracle, count = cast(ReferenceEngine, load_engine(golden.model, "reference", "f32", capacity=64)), 24
    oracle.forward(golden.tokens[:count])
    rows = np.stack([np.stack([each[:, :count] for each in kind]) for kind in (oracle.kv.keys, oracle.kv.values)])
    cast(GivenEngine, engine).append_rows(rows)
    close_to(engine.forward_all(golden.tokens[count:]), golden.logits[count:])


# Keeping rows


def test_truncated_cache_forgets_later_tokens(open_engine: OpenEngine, golden: Golden, close_to: CloseTo) -> None:
    engine, tokens = open_engine(), golden.tokens
    engine.forward(np.concatenate([tokens[:20], tokens[40:50]]))
    for length in (-1, 31):
        with pytest.raises(InputError, match="truncate"):
            engine.kv.truncate(length)
    engine.kv.truncate(20)
    assert engine.kv.length == 20
    close_to(engine.forward_all(tokens[20:]), golden.logits[20:])


@EACH_MODEL
def test_kept_rows_stay_at_their_positions(open_engine: OpenEngine, golden: Golden, close_to: CloseTo) -> None:
    engine, after = open_engine(), len(golden.keep_logits)
    engine.forward(golden.tokens[:40])
    engine.kv.keep(golden.keep_rows, close_gaps=False)
    np.testing.assert_array_equal(engine.kv.positions, golden.keep_rows)
    close_to(engine.forward_all(golden.tokens[40 : 40 + after]), golden.keep_logits)


@ONE_LAYER
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 7], []], ids=["some", "none"])
def test_evicting_the_newest_row_keeps_positions_or_is_refused(
    open_engine: OpenEngine, golden: Golden, close_to: CloseTo, rows: list[int]
) -> None:
    """Not every engine can leave a gap before the next token; one that cannot must say so at once."""
    engine, other, tokens = open_engine(), open_engine(), golden.tokens
    engine.forward(tokens[:12])
    try:
        engine.kv.keep(rows_of(*rows), close_gaps=False)
    except (InputError, UnsupportedError):
        close_to(engine.forward_all(tokens[12:]), golden.logits[12:])
        return
    if rows:
        engine.kv.truncate(len(rows))  # nothing, which leaves the next position
    state = engine.kv.save()
    for restored in (False, True):
        if restored:
            bring_back(engine.kv, state)
        logits = engine.forward(tokens[12:14])
        np.testing.assert_array_equal(engine.kv.positions, [*rows, 12, 13])

    other.forward(tokens[:13])
    other.kv.keep(rows_of(*rows, 12), close_gaps=False)
    close_to(logits, other.forward(tokens[13:14]))


@EACH_MODEL
@pytest.mark.parametrize(("close_gaps", "answer"), [(True, "stream_logits"), (False, "gaps_logits")])
def test_streaming_through_a_small_cache(
    open_engine: OpenEngine, golden: Golden, close_to: CloseTo, close_gaps: bool, answer: str
) -> None:
    close_to(stream(open_engine(capacity=CAPACITY), golden.tokens, close_gaps), getattr(golden, answer))


@ONE_LAYER_EACH_ROW
def test_closed_gaps_equal_a_fresh_run_over_kept_tokens(
    open_engine: OpenEngine, golden: Golden, close_to: CloseTo
) -> None:
    """Sinks and a window, a window, irregular rows, the oldest, only the last, none."""
    engine, old, new = open_engine(), golden.tokens[:24], golden.tokens[24:40]
    for rows in (
        [*range(4), *range(12, 24)], [*range(12, 24)], [1, 2, 5, 6, 7, 11, 18, 23], [0, 3, 4, 9, 10], [23], [],
    ):  # fmt: skip
        engine.kv.truncate(0)
        engine.forward(old)
        engine.kv.keep(rows_of(*rows), close_gaps=True)
        engine.kv.keep(np.arange(len(rows), dtype=np.int32), close_gaps=True)  # all, which changes nothing
        np.testing.assert_array_equal(engine.kv.positions, np.arange(len(rows)))
        ours = engine.forward_all(new)
        np.testing.assert_array_equal(engine.kv.positions, np.arange(len(rows) + new.size))

        engine.kv.truncate(0)
        close_to(ours, engine.forward_all(np.concatenate([old[rows], new]))[len(rows) :])


# Saving and restoring

SAVED = (  # what is kept before a state is saved, whether gaps are closed, and what is truncated
    (None, False, None), (rows_of(0, 1, 2, 3, 9, 10, 17, 19), False, None),
    # llama.cpp rotates keys only when the next token runs: a state saved at once must not miss that.
    (np.r_[0:4, 10:20], True, None), (np.r_[0:4, 6:20], True, np.r_[0:4, 9:18]), (np.r_[0:4, 10:20], True, 11),
)  # fmt: skip


@EACH_ROW
def test_saved_states_come_back_and_saving_changes_nothing(
    open_engine: OpenEngine, golden: Golden, close_to: CloseTo
) -> None:
    """In the same engine, and in a fresh one."""
    engine, other, tokens = open_engine(), open_engine(), golden.tokens

    def prepare(kept: IntArray | None, close_gaps: bool, then: IntArray | int | None) -> None:
        engine.kv.truncate(0)
        engine.forward(tokens[:20])
        if kept is not None:
            engine.kv.keep(kept, close_gaps=close_gaps)
        if isinstance(then, int):
            engine.kv.truncate(then)
        elif then is not None:
            engine.kv.keep(then, close_gaps=close_gaps)

    for case in SAVED:
        prepare(*case)
        unsaved = engine.forward_all(tokens[20:40]).copy()
        prepare(*case)
        states, positions = [engine.kv.save() for _ in range(2)], engine.kv.positions.copy()
        expected = engine.forward_all(tokens[20:40]).copy()
        close_to(expected, unsaved)
        engine.kv.truncate(0)
        engine.forward(tokens[::-1])
        engine.kv.keep(np.r_[0:4, 30:64], close_gaps=True)  # leaves a shift that must not touch the restored keys
        for each in (engine, other):
            bring_back(each.kv, states[1])
            np.testing.assert_array_equal(each.kv.positions, positions)
            close_to(each.forward_all(tokens[20:40]), expected)


@pytest.mark.parametrize(("cuts", "capacity"), [([1, 19], 20), ([4, 8, 13], 300), exhaustive([16], 300)], ids=str)
@EACH_ROW
def test_rows_saved_in_parts_are_appended(
    open_engine: OpenEngine, golden: Golden, close_to: CloseTo, row: Row, cuts: list[int], capacity: int
) -> None:
    """Into a cache of another capacity, too, and the next logits are the very same, unless graphs differ with it."""
    engine, other, tokens = open_engine(), open_engine(capacity=capacity), golden.tokens
    engine.forward(tokens[:19])
    for first, last in pairwise([0, *cuts, 19]):
        state = engine.kv.save(first, last)
        assert (state.positions.size, state.next_position) == (last - first, last)
        other.kv.append(state)
        np.testing.assert_array_equal(other.kv.positions, np.arange(last))
    same = close_to if "@cpu-static" in row.backend or "@qnn" in row.backend else np.testing.assert_array_equal
    same(other.forward(tokens[19:20]), engine.forward(tokens[19:20]))


@ONE_LAYER
def test_rows_that_do_not_belong_there_are_refused(open_engine: OpenEngine, golden: Golden, close_to: CloseTo) -> None:
    engine, small, tokens = open_engine(), open_engine(capacity=24), golden.tokens
    empty = engine.kv.save()
    engine.forward(tokens[:20])
    state = engine.kv.save(12)
    damaged = [bytes(state.data)[:-1], bytes(state.data) + b"x", bytes(state.data)[:5], b""]
    small.forward(tokens[:9])
    bring_back(small.kv, empty)
    assert small.kv.length == 0
    small.forward(tokens[:14])
    with pytest.raises(InputError, match="do not come after"):
        small.kv.append(state)
    small.forward(tokens[14:20])
    with pytest.raises(CapacityError, match="8 saved rows, but only 4"):
        small.kv.append(replace(state, positions=state.positions + 8, next_position=28))
    small.kv.truncate(12)
    for data in damaged:
        with pytest.raises(InputError, match="damaged"):
            small.kv.append(replace(state, data=data))
    for positions in (state.positions[::-1], np.zeros(8, np.int32), state.positions + 1):
        with pytest.raises(InputError, match=r"not in order|do not come after"):  # rows of a picture share positions
            small.kv.append(replace(state, positions=positions))
    for first, last in ((-1, 4), (5, 3), (0, 13)):
        with pytest.raises(InputError, match="not among the 12"):
            small.kv.save(first, last)
    close_to(small.forward_all(tokens[12:24]), golden.logits[12:24])


@ONE_LAYER
def test_full_cache_is_saved_after_closing_gaps(open_engine: OpenEngine, golden: Golden, close_to: CloseTo) -> None:
    """256 rows are exactly what llama.cpp allocates: nothing is left for a token that settles its shift."""
    engine, other = (open_engine(capacity=256, chunk=64) for _ in range(2))
    tokens = np.tile(golden.tokens, 4)
    engine.forward(tokens)
    engine.kv.keep(np.arange(1, 256, 2, dtype=np.int32), close_gaps=False)
    engine.forward(tokens[:128])
    engine.kv.keep(np.arange(256, dtype=np.int32), close_gaps=True)
    bring_back(other.kv, engine.kv.save())
    for each in (engine, other):
        each.kv.truncate(255)
    close_to(other.forward(tokens[:1]), engine.forward(tokens[:1]))


@ONE_LAYER
def test_foreign_state_is_refused(
    open_engine: OpenEngine, golden: Golden, row: Row, close_to: CloseTo, engines: Engines, tmp_path: Path
) -> None:
    """Of another architecture, of other weights, of another engine or KV dtype."""
    engine, tokens = open_engine(), golden.tokens
    engine.forward(tokens[:20])
    architecture = golden_of("llama-wide" if row.kv_dtype.startswith("q") else "llama-gqa-tied").model
    different = next(each for each in ENGINES if each != row)
    for model, other in (
        (architecture, row),
        (with_other_weights(golden.model, tmp_path), row),
        (golden.model, different),
    ):
        foreign = engines(load_engine(model, other.backend, other.kv_dtype))
        foreign.forward(tokens[:5])
        with pytest.raises(InputError, match="belong to another"):
            engine.kv.append(foreign.kv.save())
    close_to(engine.forward_all(tokens[20:]), golden.logits[20:])


def with_other_weights(model: Model, folder: Path) -> Model:
    """As a fine-tuned model differs from its base: the same names and shapes, other numbers."""
    copy = folder / model.file.path.name
    data = bytearray(model.file.path.read_bytes())
    data[-4000:] = bytes(4000)
    copy.write_bytes(data)
    return open_model(copy)


# Limits and bad input


def test_tokens_beyond_the_capacity_are_refused_before_any_runs(
    open_engine: OpenEngine, golden: Golden, close_to: CloseTo
) -> None:
    engine, tokens = open_engine(capacity=CAPACITY), golden.tokens
    engine.forward(tokens[:20])
    for run in (engine.forward, engine.forward_all):
        with pytest.raises(CapacityError, match="12 free rows"):
            run(tokens[20:33])
    assert engine.kv.length == 20
    close_to(engine.forward_all(tokens[20:32]), golden.logits[20:32])
    assert engine.kv.length == engine.kv.capacity == CAPACITY
    with pytest.raises(CapacityError, match="0 free rows"):
        engine.forward(tokens[:1])


BAD_TOKENS = (  # negative, beyond the vocabulary, none, in two dimensions, wrapping in 32 bits, fractions
    np.array([5, -1]), np.array([5, 272]), np.zeros(0, np.int32), np.ones((2, 3), np.int32),
    np.array([5, (1 << 32) + 5]), np.array([5.0, 6.5]),
)  # fmt: skip
BAD_ROWS = (  # out of range, negative, repeated, falling, in two dimensions, wrapping in 32 bits, a mask
    np.array([0, 8]), np.array([-1, 3]), np.array([2, 2]), np.array([3, 2]), np.array([[0, 1]]),
    np.array([1, (1 << 32) + 5]), np.array([False, True]),
)  # fmt: skip


@ONE_LAYER
def test_bad_tokens_and_rows_are_refused(open_engine: OpenEngine, golden: Golden, close_to: CloseTo) -> None:
    engine = open_engine()
    engine.forward(golden.tokens[:8])
    for tokens in BAD_TOKENS:
        for run in (engine.forward, engine.forward_all):
            with pytest.raises(InputError, match="token"):
                run(tokens)
    for rows in BAD_ROWS:
        for close_gaps in (True, False):
            with pytest.raises(InputError, match="rows to keep"):
                engine.kv.keep(rows, close_gaps=close_gaps)
    close_to(engine.forward_all(golden.tokens[8:]), golden.logits[8:])


@ONE_LAYER
def test_closed_engine_raises_an_error(open_engine: OpenEngine, golden: Golden) -> None:
    """llama.cpp's cache, too, whose memory is freed."""
    engine = open_engine()
    engine.forward(golden.tokens[:8])
    kv, state = engine.kv, engine.kv.save()
    engine.close()
    engine.close()
    uses: list[Callable[[], object]] = [
        lambda: engine.forward(golden.tokens[8:9]), lambda: engine.forward_all(golden.tokens[8:9]),
    ]  # fmt: skip
    if engine.capabilities.any_tokenizer:
        uses += [
            lambda: kv.truncate(4), lambda: kv.truncate(0), lambda: kv.keep(rows_of(0, 1, 2), close_gaps=True), kv.save,
            lambda: bring_back(kv, state),
        ]  # fmt: skip
    for use in uses:
        with pytest.raises(EngineError, match="closed"):
            use()


# Random use


LENGTHS = st.integers(1, 14)
OTHERS = (
    st.tuples(st.just("append"), LENGTHS),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("save")),
    st.tuples(st.just("restore"), st.integers(0, 9)),
)
SEEDS = st.integers(0, 2**32 - 1)
# Of llama.cpp's rows every policy keeps the newest where gaps stay; to evict it is tested above.
OPERATION = st.one_of(
    *OTHERS,
    st.tuples(st.just("keep"), SEEDS, st.just(0.6), st.just(True), st.just(False)),
    st.tuples(st.just("keep"), SEEDS, st.just(0.6), st.just(False), st.just(True)),
)


def run_operations(both: tuple[Engine, Engine], tokens: IntArray, operations: Iterable[tuple[Any, ...]]) -> None:
    """Run operations of OPERATION, here or in test_tvm.py, in an engine and in the oracle, emptied first, and compare
    logits, lengths and positions."""
    at, states = 0, list[tuple[KVState, KVState]]()
    for engine in both:
        engine.kv.truncate(0)
    for operation, *arguments in operations:
        length, free = both[0].kv.length, both[0].kv.free
        if operation == "append" and free:
            count = min(arguments[0], free)
            part = np.take(tokens, range(at, at + count), mode="wrap")
            at += count
            ours, theirs = (engine.forward_all(part) for engine in both)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-3)
        elif operation == "keep":
            seed, share, close_gaps, newest = arguments
            chosen = np.random.default_rng(seed).random(length) < share
            chosen[-1:] |= newest
            for engine in both:
                engine.kv.keep(np.flatnonzero(chosen).astype(np.int32), close_gaps=close_gaps)
        elif operation == "stream" and length > 4 + arguments[0]:
            for engine in both:
                engine.kv.keep(np.r_[0:4, 4 + arguments[0] : length], close_gaps=True)
        elif operation == "truncate":
            kept = round(arguments[0] * length)
            kept = max(kept, both[0].kv.earliest) if kept else 0  # as far as a ring reaches
            for engine in both:
                engine.kv.truncate(kept)
        elif operation == "save":
            states.append((both[0].kv.save(), both[1].kv.save()))
        elif operation == "restore" and states:
            for engine, state in zip(both, states[arguments[0] % len(states)], strict=True):
                bring_back(engine.kv, state)
        assert both[0].kv.length == both[1].kv.length <= both[0].kv.capacity
        np.testing.assert_array_equal(both[0].kv.positions, both[1].kv.positions)


@lru_cache
def pair(name: str) -> tuple[Engine, Engine]:
    """The engine under test and the oracle, loaded once: every example empties them."""
    model = open_golden(name).model
    return load_engine(model, "llamacpp", "f32", capacity=48), load_engine(model, "reference", "f32", capacity=48)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "llama-rope-scaled"])
@settings(max_examples=examples(20))
@given(operations=st.lists(OPERATION, min_size=3, max_size=14))
def test_any_sequence_of_operations_equals_the_reference(name: str, operations: list[tuple[Any, ...]]) -> None:
    run_operations(pair(name), open_golden(name).tokens, [*operations, ("append", 3)])

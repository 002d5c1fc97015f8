"""Rows of layers with sliding windows: a ring's bookkeeping beside a list of tokens, then engines that have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHUNK, GOLDEN, bring_back, examples, exhaustive, load_engine, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_architectures import EXACT, open_family, require_native

from edge.backends import find_backend, ring
from edge.backends.base import Engine
from edge.backends.head_kv import HeadKV
from edge.backends.kv_cache import RewindError, end_of
from edge.backends.ring import LayerKinds, Ring
from edge.backends.row_lists import RowLists
from edge.model.cores import RowShape
from edge.model.model import open_model
from edge.prompt_cache.cache import PromptCache
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import AnyArray, FloatArray, IntArray

MODELS = ("gemma2", "gemma3")
WINDOW = 20  # of these models
ENGINES = ["cpu", *(["onnx"] if find_spec("onnxruntime") else [])]
on_engines = pytest.mark.parametrize("backend", ENGINES)


# Bookkeeping


class Shift:
    """A rotation that adds: a key is the position that it was rotated to."""

    def of(self, layers: Sequence[int]) -> Shift:
        return self

    def rotate_cached(self, keys: FloatArray, by: AnyArray, layer: int | None = None) -> FloatArray:
        return keys + by[:, None].astype(np.float32)


class OneRope:
    suffix = ""
    rotation = Shift()

    def clear(self) -> None: ...
    def is_outgrown_by(self, positions: int) -> bool:
        return False

    def adopt(self, key: str, own: str) -> None: ...


class TokenStore:
    """RowStore protocol of one head, whose rows are a token and its key."""

    row_bytes, row, observes, level, nbytes = 16, RowShape(1, 1, 1), False, False, 0

    def __init__(self, capacity: int) -> None:
        self.capacity = self.longest = capacity
        self.rows = np.full((capacity, 2), -1, np.int64)  # token, key
        self.placed = np.zeros(capacity, np.int64)
        self.lengths: IntArray = np.zeros(1, np.int32)

    @property
    def limits(self) -> IntArray:
        return np.array([self.capacity], np.int32)

    def prepare(self, count: int, position: int) -> None:
        assert self.lengths[0] + count <= self.capacity
        self.placed[self.lengths[0] : self.lengths[0] + count] = position + np.arange(count)

    def move(self, moves: Sequence[AnyArray]) -> None:
        for source, target in moves[0]:
            self.rows[target] = self.rows[source]

    def share_out(self) -> None: ...
    def clear(self) -> None: ...

    def place(self, lists: RowLists) -> None:
        length = int(self.lengths[0])
        self.placed[lists.physical[0, :length]] = lists.positions(length)[0]

    def shrink(self, capacity: int) -> None:
        self.capacity = capacity

    def keys(self, rows: AnyArray, head: int | None = None) -> FloatArray:
        return self.rows[rows, 1][None, :, None].astype(np.float32)

    def set_keys(self, rows: AnyArray, keys: FloatArray, head: int | None = None) -> None:
        self.rows[rows, 1] = keys[0, :, 0]

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        return [self.rows[rows].tobytes()]

    def restore(self, first: int, count: int, saved: memoryview) -> None:
        self.rows[first : first + count] = np.frombuffer(saved, np.int64).reshape(-1, 2)

    def attention(self, rows: AnyArray) -> FloatArray:
        raise NotImplementedError

    def scale_attention(self, head: int, rows: AnyArray, by: FloatArray) -> None: ...
    def clear_attention(self) -> None: ...


def token_cache(window: int, chunk: int, capacity: int) -> HeadKV[TokenStore]:
    """Of two layers, the second of which has a window."""
    rows = LayerKinds.of((0, window)).ring_rows(capacity, chunk)
    rope: Any = OneRope()
    return HeadKV(TokenStore(capacity), (0,), rope, "key", 0, Ring(TokenStore(rows), (1,), window))


def run(kv: HeadKV[TokenStore], tokens: Sequence[int]) -> None:
    """Write rows as an engine does: where `prepare` leaves room."""
    kv.prepare(len(tokens))
    first = kv.next_rope_position
    for store in kv.stores:
        at = int(store.lengths[0])
        store.rows[at : at + len(tokens)] = np.stack([tokens, first + np.arange(len(tokens))], axis=1)
    kv.appended(len(tokens))


def check_ring(kv: HeadKV[TokenStore], text: list[int]) -> None:
    """The newest tokens of the text are there, each once, with keys and places at their distance to the next token."""
    assert kv.ring is not None
    store, length = kv.ring.store, kv.ring.length
    tokens, keys = store.rows[:length].T
    assert tokens.tolist() == [text[len(text) - (kv.next_rope_position - key)] for key in keys]
    assert len(set(keys.tolist())) == length
    np.testing.assert_array_equal(kv.next_position - store.placed[:length], kv.next_rope_position - keys)
    np.testing.assert_array_equal(kv.ring.rope_positions()[0], keys)


OPERATION = st.one_of(
    st.tuples(st.just("run"), st.integers(1, 16)),
    st.tuples(st.just("run"), st.integers(1, 16)),
    st.tuples(st.just("keep"), st.integers(0, 1 << 32), st.booleans()),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("back")),
    st.tuples(st.just("renumber")),
    st.tuples(st.just("restore")),
)


@settings(max_examples=examples(200))
@given(
    window=st.integers(2, 40), chunk=st.integers(1, 16), slack=st.sampled_from([1, 3, 64]),
    operations=st.lists(OPERATION, min_size=5, max_size=60),
)  # fmt: skip
def test_ring_holds_the_rows_of_a_window(
    window: int, chunk: int, slack: int, operations: list[tuple[Any, ...]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SLACK", slack)
        kv, text, count = token_cache(window, chunk, 200), list[int](), 0
        end, end_text = end_of(kv), list[int]()
        for name, *arguments in operations:
            if name == "run":
                new = list(range(count, count + min(arguments[0], chunk, kv.free)))
                if new:
                    run(kv, new)
                    text, count = text + new, count + len(new)
                if kv.free < 20:
                    name, arguments = "keep", [len(text), True]
            if name == "keep" and kv.length:
                kept = np.random.default_rng(arguments[0]).random(kv.length) < 0.5
                kept[-1] = True
                kv.keep(np.flatnonzero(kept).astype(np.int32), close_gaps=arguments[1])
                end = None
            elif name == "renumber" and kv.length:
                kv.renumber()
                end = None
            elif name == "truncate":
                length, before = round(arguments[0] * kv.length), kv.next_rope_position
                if 0 < length < kv.earliest:
                    with pytest.raises(RewindError):
                        kv.truncate(length)
                else:
                    gone = length < kv.length
                    kv.truncate(length)
                    text = text[: len(text) - (before - kv.next_rope_position)] if length else []
                    end = None if gone else end
            elif name == "back":
                if end is not None and end.next_position and kv.next_position > end.next_position:
                    kv.truncate(int(np.searchsorted(kv.positions, end.next_position)), end)
                    text = list(end_text)
                end, end_text = end_of(kv), list(text)
            elif name == "restore":
                other = token_cache(window, chunk, 200)
                other.append(kv.save())
                kv, end = other, None
            check_ring(kv, text)
            assert kv.ring is not None
            assert kv.ring.length >= min(window - 1, len(text))


def test_layers_of_one_kind_have_no_ring() -> None:
    assert LayerKinds.of((0, 0)) == LayerKinds((0, 1), (), 0)
    assert LayerKinds.of((8, 8)) == LayerKinds((0, 1), (), 0)
    assert LayerKinds.of((8, 0, 8)) == LayerKinds((1,), (0, 2), 8)
    assert LayerKinds.of((8, 0, 8)).ring_rows(1000, 16) == 8 + 16 + 4
    assert LayerKinds.of((8, 0, 8)).ring_rows(10, 16) == 10


# Engines


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that 64 tokens go round."""
    require_native()
    monkeypatch.setattr(ring, "SLACK", 4)


def open_one(backend: str, name: str, dtype: str = "f32", **options: Any) -> Engine:
    return load_engine(open_model(GOLDEN / f"{name}.gguf"), backend, dtype, **{"capacity": 300, **options})


def bookkeeping(engine: Engine) -> Ring[Any]:
    found = engine.kv.ring  # type: ignore[attr-defined]
    assert isinstance(found, Ring)
    return found


@on_engines
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, CHUNK])
def test_logits_are_those_of_transformers(
    backend: str, name: str, chunk: int, engines: Callable[[Engine], Engine]
) -> None:
    family, engine = open_family(name), engines(open_one(backend, name, chunk=chunk))
    logits = engine.forward_all(family.tokens)
    np.testing.assert_allclose(logits[-len(family.expected) :], family.expected, rtol=0, atol=EXACT)
    assert bookkeeping(engine).length <= WINDOW + chunk + 4 < family.tokens.size


@on_engines
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("f32", "gemma2"),
        ("f16", "gemma3"),
        *(exhaustive(dtype, "gemma3") for dtype in ("int8", "int4")),
    ],
)
def test_ring_equals_a_cache_of_all_rows(
    backend: str, dtype: str, name: str, engines: Callable[[Engine], Engine]
) -> None:
    """Chunks of many sizes, and steps."""
    tokens = some_tokens(280)
    small, large = (engines(open_one(backend, name, dtype, chunk=chunk)) for chunk in (23, 300))
    at = 0
    for count in (23, 1, 40, 1, 1, 17, 100, 22, 23, 24, *[1] * 20):
        part, at = tokens[at : at + count], at + count
        np.testing.assert_allclose(small.forward_all(part), large.forward_all(part), rtol=0, atol=0.05)
    assert bookkeeping(small).length <= WINDOW + 23 + 4
    assert bookkeeping(large).length == at


@on_engines
def test_cache_goes_back_as_far_as_its_ring(backend: str, engines: Callable[[Engine], Engine]) -> None:
    engine, tokens = engines(open_one(backend, "gemma3")), some_tokens(200)
    expected = engine.forward_all(tokens)
    kv = engine.kv
    assert 180 < kv.earliest < 200
    with pytest.raises(RewindError, match="run the tokens again"):
        kv.truncate(kv.earliest - 1)
    assert kv.length == 200
    kv.truncate(at := kv.earliest)
    np.testing.assert_allclose(engine.forward_all(tokens[at:]), expected[at:], rtol=0, atol=EXACT)

    kv.truncate(0)
    engine.forward(tokens[:100])
    end = end_of(kv)
    engine.forward(tokens[100:180])
    kv.truncate(100, end)
    np.testing.assert_allclose(engine.forward_all(tokens[100:]), expected[100:], rtol=0, atol=EXACT)


@on_engines
def test_saved_state_fits_caches_of_other_sizes(backend: str, engines: Callable[[Engine], Engine]) -> None:
    engine, tokens = engines(open_one(backend, "gemma3")), some_tokens(200)
    engine.forward(tokens[:100])
    state = engine.kv.save()
    expected = engine.forward_all(tokens[100:130])
    for options in ({"chunk": 1}, {"chunk": 64}, {"capacity": 130}):
        other = engines(open_one(backend, "gemma3", **options))
        bring_back(other.kv, state)
        np.testing.assert_allclose(other.forward_all(tokens[100:130]), expected, rtol=0, atol=EXACT)


@on_engines
@pytest.mark.parametrize("observes", [False, True])
@pytest.mark.parametrize("capacity", [24, 300])
def test_plans_count_the_ring(backend: str, observes: bool, capacity: int, engines: Callable[[Engine], Engine]) -> None:
    model = open_model(GOLDEN / "gemma3.gguf")
    for dtype in ("f32", "f16"):
        engine = engines(load_engine(model, backend, dtype, capacity=capacity, chunk=8, observes=observes))
        counted = find_backend(backend, model.file, model.spec).footprint(model.spec, engine.config)
        assert (counted.kv, counted.fixed_kv) == (engine.kv.nbytes, engine.kv.fixed)


# Sessions


@pytest.fixture
def sessions(open_session: Callable[..., Session]) -> Callable[..., Session]:
    options = {"backend": "cpu", "kv_dtype": "f32", "max_kv_size": 400, "prefill_step_size": CHUNK}
    return partial(open_session, "gemma3", kv_policy="streaming", **options)


@pytest.mark.parametrize("memory", [None, "16MiB"])
def test_prompt_cache_resumes_where_a_tail_is(
    memory: str | None, sessions: Callable[..., Session], tmp_path: Path
) -> None:
    """The same prompt at once; from the third on, others with the same beginning: the second finds where they part."""
    cache, plain = PromptCache(None if memory else tmp_path, memory=memory), sessions()
    cached, system, reused = sessions(prompt_cache=cache), some_tokens(150, 9), []
    for seed in (1, 1, 2, 3, 3):
        prompt = np.concatenate([system, some_tokens(100, seed)])
        answers = [each.generate(prompt, max_tokens=40, ignore_eos=True) for each in (cached, plain)]
        assert answers[0] == answers[1]
        assert cached.report is not None
        reused.append(cached.report.tokens.reused)
    assert reused == [0, 192, 0, 128, 192]


def test_windows_in_all_layers_need_their_rows_only() -> None:
    """The plan has 256 rows for 480 tokens, and evictions change nothing."""
    model, tokens = open_model(GOLDEN / "llama-window.gguf"), some_tokens(480)
    expected = load_engine(model, "reference", "f32", capacity=480).forward_all(tokens)
    options: dict[str, Any] = {"backend": "cpu", "kv_dtype": "f32", "threads": 1, "logits_rows": CHUNK}
    with load(model, kv_policy="streaming", expected_tokens=480, prefill_step_size=CHUNK, **options) as session:
        assert session.plan.config.capacity == 256
        parts = []
        for at in range(0, 480, CHUNK):
            assert session.make_room(CHUNK)
            parts.append(session.forward(tokens[at : at + CHUNK], upcoming=CHUNK, every=True).copy())
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("slack", [200, 4])
def test_turn_is_undone_past_a_ring(
    slack: int, sessions: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its rows, or by a snapshot."""
    monkeypatch.setattr(ring, "SLACK", slack)
    talk, answers = Conversation(sessions()), []
    "".join(talk.say("Hello there", max_tokens=20, ignore_eos=True))
    for _ in range(3):
        answers.append("".join(talk.say("And you?", max_tokens=20, ignore_eos=True)))
        talk.undo()
        assert not talk.replays
    assert len(set(answers)) == 1

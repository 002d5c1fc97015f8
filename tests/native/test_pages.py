"""Steps that read some pages of the cache (policy `quest`), beside NumPy, which chooses among all rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from conftest import GOLDEN
from test_architectures import require_native

from edge.apps.planning import check_options
from edge.backends.base import EngineConfig
from edge.backends.tvm import ENGINE as CPU
from edge.backends.tvm.cpu import table
from edge.backends.tvm.cpu.arguments import Table
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.kv.pages import NEWEST
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.kv.row_formats import unpack_keys
from edge.errors import InputError, UnsupportedError
from edge.kv.quest import PAGE
from edge.model.model import Model, open_model
from edge.options import Options
from edge.run.starting.loading import load
from edge.sampling import SamplingParams
from edge.types import AnyArray, FloatArray, IntArray

NAME, READS, ROWS, CHUNK = "llama-gqa-tied", 128, 336, 64
GREEDY = SamplingParams(temperature=0)
exhaustive = pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def native_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers choose: the models have two, which would be those that never do."""
    require_native()
    monkeypatch.setattr(table, "DENSE_LAYERS", 0)


def model_of(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


@contextmanager
def engine_of(model: Model, reads: int, dtype: str = "f16") -> Iterator[NativeEngine]:
    config = EngineConfig(ROWS, CHUNK, dtype, 2, reads=reads)
    with closing(CPU.load(model.file, model.spec, config)) as engine:
        yield engine


def some_tokens(model: Model, count: int = ROWS) -> IntArray:
    return np.random.default_rng(5).integers(0, model.spec.vocab, count).astype(np.int32)


def steps(engine: NativeEngine, tokens: IntArray) -> list[FloatArray]:
    return [np.array(engine.forward(token[None])) for token in tokens]


class Last:
    """What the last step left of the last layer, of a KV head: its scratch, and its rows without transformations."""

    def __init__(self, engine: NativeEngine, kv_head: int) -> None:
        self.engine, self.kv_head, self.core = engine, kv_head, engine.passes.layout.shape.attention
        self._slots, store = Table.of(engine.passes.layout.shape), engine.kv.store
        head = (len(engine.kv.layers) - 1) * self.core.kv_heads + kv_head
        self.rows = store.regions.starts[head] + np.arange(store.lengths[head])

    def slot(self, name: str) -> int:
        return int(self.engine.passes.table[self._slots.slot(name)])

    @property
    def queries(self) -> FloatArray:
        """[group, head]"""
        head = self.engine.passes.layout.shape.padded_head
        at = self.slot("queries") + self.kv_head * self.slot("query_rows") * head
        return np.asarray(self.engine.passes.floats[at : at + self.core.group * head].reshape(-1, head))

    @property
    def pages(self) -> IntArray:
        """Those that thread 0 listed, of the last KV head."""
        at = self.slot("page_list")
        return np.asarray(self.engine.passes.integers[at : at + READS // TILE])

    def stored(self, name: str) -> FloatArray:
        """Keys or values as they are stored, [rows, head]."""
        rows = self.engine.kv.store.rows
        codes = unpack_keys(rows.dtype, rows.gather(name, self.rows)).astype(np.float32)
        scales = rows.gather(f"{name[:-1]}_scales", self.rows).astype(np.float32)
        codes = codes * scales[:, :1] if scales.shape[1] else codes
        return codes + scales[:, 1:] if scales.shape[1] > 1 else codes

    @property
    def bounds(self) -> AnyArray:
        """Those of the pages, float16 [pages, 2, head]."""
        found = (
            self.engine.arenas[0].bounds.view(np.float16).reshape(-1, 2, self.engine.passes.layout.shape.padded_head)
        )
        return np.asarray(found[self.rows[0] // TILE :])

    def out(self) -> FloatArray:
        """Attention's output, [group, head]."""
        at = self.slot("mixed") + self.kv_head * self.core.group * self.core.head_dim
        return np.asarray(
            self.engine.passes.floats[at : at + self.core.group * self.core.head_dim].reshape(self.core.group, -1)
        )


def bounds_of(keys: FloatArray) -> AnyArray:
    """The greatest and the least value of whole pages, [pages, 2, head]."""
    pages = keys[: len(keys) // TILE * TILE].reshape(-1, TILE, keys.shape[1])
    return np.stack([pages.max(axis=1), pages.min(axis=1)], axis=1)


def best_pages(queries: FloatArray, bounds: AnyArray, length: int) -> list[int]:
    older = -(-length // TILE) - NEWEST
    greatest, least = np.swapaxes(bounds[:older].astype(np.float32), 0, 1)
    scores = np.maximum(queries[:, None] * greatest, queries[:, None] * least).sum(axis=-1).max(axis=0)
    scores[0] = np.inf
    chosen = np.argsort(-scores, kind="stable")[: READS // TILE - NEWEST]
    return [*np.sort(chosen).tolist(), *range(older, older + NEWEST)]


def check_bounds(bounds: AnyArray, keys: FloatArray) -> None:
    """No key is beyond them, and they are as near as float16 and another step of it allow."""
    signs = np.array([1, -1])[:, None]
    found, wanted = (each[: len(bounds)].astype(np.float64) * signs for each in (bounds, bounds_of(keys)))
    assert (found >= wanted).all()
    assert (found <= wanted + abs(wanted) * 2**-9 + 2**-23).all()


@pytest.mark.parametrize("dtype", ["f16", *(pytest.param(each, marks=exhaustive) for each in ("int8", "int4", "f32"))])
def test_step_reads_the_pages_of_the_highest_bounds(dtype: str) -> None:
    """With all rows, and behind truncations, evictions and rows of another text; up to as many rows as are read, it is
    what `full` does."""
    model = model_of(NAME)
    tokens = some_tokens(model)
    with engine_of(model, READS, dtype) as engine, engine_of(model, 0, dtype) as full:
        engine.forward(tokens[-200:])
        other = engine.kv.save()
        engine.kv.truncate(0)
        for each in (engine, full):
            each.forward(tokens[: READS - 20])
        short = slice(READS - 20, READS)
        np.testing.assert_array_equal(steps(engine, tokens[short]), steps(full, tokens[short]))
        for change, length in (
            ("", READS), ("", 200), ("", 300), ("", 170), ("turn", 290), ("keep", 250), ("append", 200),
        ):  # fmt: skip
            if change == "turn":  # other rows in the place of those that were there
                tokens = tokens[::-1].copy()
            if change == "keep":
                kept = np.delete(np.arange(engine.kv.length, dtype=np.int32), np.arange(4, 40))
                engine.kv.keep(kept, close_gaps=False)
            if change == "append":
                engine.kv.truncate(0)
                engine.kv.append(other)
            engine.kv.truncate(min(length, engine.kv.length))
            if length > engine.kv.length:
                engine.forward(tokens[engine.kv.length : length])
            for token in tokens[length : length + 18]:
                engine.forward(token[None])
                last = Last(engine, engine.passes.layout.shape.attention.kv_heads - 1)
                keys, bounds = last.stored("keys"), last.bounds
                wanted = best_pages(last.queries, bounds, len(keys))
                assert last.pages.tolist() == wanted
                check_bounds(bounds[: len(keys) // TILE - NEWEST], keys)
                if dtype == "int4":
                    continue
                rows = [row for page in wanted for row in range(page * TILE, (page + 1) * TILE)]
                rows = [row for row in rows if row < engine.kv.length]
                powers = np.exp((last.queries @ last.stored("keys")[rows].T).astype(np.float64))
                attention = powers / powers.sum(axis=1, keepdims=True)
                found = attention @ last.stored("values")[rows]
                np.testing.assert_allclose(last.out(), found[:, : last.core.head_dim], atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["gemma3", *(pytest.param(each, marks=exhaustive) for each in ("gpt-oss", "gemma4", "qwen35", "llama-window"))],
)
def test_enough_rows_are_all_rows(name: str) -> None:
    """Bit for bit, where layers have rings, sinks, rows of others or a state, too; fewer change only what is paged."""
    model = model_of(name)
    tokens, found = some_tokens(model, min(ROWS, model.spec.context)), []
    for reads in (0, ROWS + TILE, READS):
        with engine_of(model, reads) as engine:
            assert CPU.footprint(model.spec, engine.config).kv == engine.kv.nbytes
            engine.forward(tokens[:100])
            found.append(np.stack(steps(engine, tokens[100:])))
    np.testing.assert_array_equal(found[0], found[1])
    assert np.isfinite(found[2]).all()
    np.testing.assert_array_equal(found[0][: READS - 100], found[2][: READS - 100])
    assert (found[0] == found[2]).all() == (name == "llama-window")


def test_session_reads_pages_for_the_answer_alone() -> None:
    """The cut of a prompt into chunks does not matter, though one leaves a single token; nor do drafts."""
    model, answers = model_of(NAME), []
    prompt = some_tokens(model, 3 * CHUNK + 1)
    for policy, chunk, speculate in (("full", CHUNK, "off"), ("quest:rows=128", CHUNK, "auto"), ("quest", 100, "off")):
        options = Options(
            backend="cpu", kv_policy=policy, max_kv_size=ROWS, prefill_step_size=chunk, speculate=speculate, threads=1
        )
        with load(model, options) as session:
            assert session.plan.bytes.kv == session.engine.kv.nbytes
            assert policy == "full" or not session.plan.config.drafts
            pieces = list(session.stream(prompt, max_tokens=40, ignore_eos=True, sampling=GREEDY))
            answers.append("".join(map(str, pieces)))
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]


def test_scores_and_saved_rows_are_independent_of_earlier_runs() -> None:
    model = model_of(NAME)
    text, first = some_tokens(model, 3 * CHUNK + 20), 2 * CHUNK + 2  # a chunk of the context is one token
    found, keys = [], set()
    for policy, before in (("quest:rows=128", []), ("quest:rows=128", [text[: first + 4]]), ("full", [])):
        options = Options(backend="cpu", kv_policy=policy, max_kv_size=ROWS, prefill_step_size=CHUNK, threads=1)
        with load(model, options) as session:
            for other in before:
                session.score(other, first=first - 3, keep_rows=True)
            found.append([each.logprob for each in session.score(text, first=first, keep_rows=True)])
            keys.add(session.engine.kv.settings)
    assert found[0] == found[1] != found[2]
    assert len(keys) == 2


def test_quest_is_refused_where_it_cannot_be() -> None:
    model = model_of(NAME)
    with pytest.raises(UnsupportedError, match="chooses the rows it reads, and reference is none"):
        load(model, Options(backend="reference", kv_policy="quest"))
    with pytest.raises(UnsupportedError, match="runs one sequence at a time: leave --sequences out"):
        load(model, Options(backend="cpu", kv_policy="quest", sequences=2))
    assert PAGE == TILE
    with pytest.raises(InputError, match="quest reads no more than the first 16 rows for every token: --sinks 17 is"):
        load(model, Options(backend="cpu", kv_policy="quest", sinks=17))
    with pytest.raises(UnsupportedError, match="an exported model has no KV policy quest"):
        check_options(Options(kv_policy="quest"))

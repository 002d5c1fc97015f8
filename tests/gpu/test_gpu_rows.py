"""Attention and the KV cache on GPUs: kernels beside NumPy, evictions beside the reference engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    GOLDEN,
    GPU_HOST,
    SHARED_FIXTURES,
    SOME_GPU,
    bring_back,
    exhaustive,
    first_adapter,
    load_engine,
    on_gpu,
    some_tokens,
)  # fmt: skip
from heads_oracle import EXACT, HeadOracle, all_keys, follow_evictions
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from small_models import Small, write_small
from test_kv_heads import model_of

from edge.backends.tvm.gpu.design import RowForm, State, Tables, Tuning, normal_values
from edge.backends.tvm.gpu.engine import GPUEngine
from edge.backends.tvm.gpu.hosts import Buffer, Device, open_device
from edge.backends.tvm.gpu.kv import DeviceRows, to_memory
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.backends.tvm.gpu.weights import Vector
from edge.backends.tvm.kv.householder import reflect
from edge.backends.tvm.kv.regions import Move
from edge.backends.tvm.kv.row_formats import decode, encode
from edge.backends.tvm.packing.shape import Shape
from edge.model.cores import Attention, Temperature
from edge.model.model import open_model
from edge.run.starting.loading import load
from edge.sampling import SamplingParams
from edge.types import AnyArray, FloatArray

pytest.importorskip("tvm")

CHUNK, ROWS, LAYER = 8, 1024, 1
USUAL, NVIDIA = Tuning(), Tuning(heads=1, stage=48 << 10)
SPLIT = {"row_splits": 3, "split_from": 33}
OFTEN = SPLIT | {"split_from": 16}
ATOL = {"f32": 2e-5, "f16": 2e-3, "int8": 3e-2, "int4": 5e-2}


@pytest.fixture(scope="module", params=[GPU_HOST, exhaustive("opencl")])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with closing(open_device(first_adapter(request.param))) as opened:
        yield opened


# Kernels beside NumPy


@dataclass(frozen=True)
class Case:
    """The sizes that kernels are built for. pairs: how many RoPE rotates."""

    kv_heads: int
    group: int
    head: int
    dtype: str
    pairs: int
    halves: bool = True
    normed: bool = False
    tempered: bool = False
    window: int = 0
    cap: float = 0.0
    gated: bool = False
    sinks: bool = False
    unit: bool = False
    tuning: Tuning = USUAL
    alone: bool = False  # the kernel of a step, which stores the row of its only token itself

    @property
    def shape(self) -> Shape:
        of_model = Shape.of(open_model(GOLDEN / "llama-gqa-tied.gguf").spec)
        core = Attention(
            self.kv_heads * self.group, self.kv_heads, self.head, self.head**-0.5, window=int(bool(self.window)),
            score_cap=self.cap, temperature=Temperature(0.0, 1) if self.tempered else None,
            gated=self.gated, unit_values=self.unit,
        )  # fmt: skip
        mixing, feeding = of_model.blocks
        return replace(of_model, layers=2, blocks=(replace(mixing, core=core), feeding))

    @property
    def tables(self) -> Tables:
        return Tables.of(2, self.kv_heads, 1, CHUNK, self.pairs, normal_values(self.shape, self.dtype))

    @property
    def norms(self) -> tuple[Vector | None, Vector | None]:
        return (Vector(0, self.head), Vector(256, self.head)) if self.normed else (None, None)

    @property
    def sink_vector(self) -> Vector | None:
        return Vector(512, self.kv_heads * self.group) if self.sinks else None


GREEDY = SamplingParams(temperature=0)
CASES = [
    Case(1, 8, 80, "f32", 10, halves=False, normed=True, window=9),
    Case(3, 1, 64, "int8", 0, cap=20.0, tempered=True),
    Case(2, 2, 32, "f16", 8, sinks=True, unit=True, window=7),
    Case(2, 2, 80, "int4", 40, normed=True, gated=True),
    # As by default on NVIDIA's GPUs.
    Case(2, 2, 32, "int8", 8, sinks=True, tuning=NVIDIA, alone=True),
    exhaustive(Case(1, 4, 256, "f16", 128, normed=True, window=5)),
    exhaustive(Case(2, 3, 16, "int4", 8, window=5)),
    exhaustive(Case(2, 2, 80, "int4", 40, tuning=NVIDIA, alone=True)),
]


@cache
def kernels(case: Case, language: str) -> dict[str, Kernel]:
    from edge.backends.tvm.gpu.kernels.attention.attention import attend
    from edge.backends.tvm.gpu.kernels.attention.observe import observe
    from edge.backends.tvm.gpu.kernels.attention.rows import Heads, move, store_rows
    from edge.backends.tvm.gpu.lowering import lower

    shape, core, tables = case.shape, case.shape.attention, case.tables
    heads = Heads(core, tables, RowForm.of(core, case.dtype), case.halves, case.norms, shape.norm_eps)
    form = core, tables, case.tuning, case.dtype
    built = [move("edge_move", RowForm(case.dtype, shape.padded_head))]
    if case.alone:
        built.append(attend("edge_attend", *form, tokens=1, heads=heads, sinks=case.sink_vector))
    else:
        built += [
            store_rows("edge_store", heads, tokens=CHUNK, observes=True),
            attend("edge_attend", *form, tokens=CHUNK, observes=True, sinks=case.sink_vector),
            observe("edge_observe", *form),
        ]
    return {each.name: lower(each, language) for each in built}


def dispatches(case: Case, language: str) -> list[Dispatch]:
    shape = case.shape
    groups = {"edge_store": shape.heads + 2 * shape.kv_heads, "edge_attend": shape.heads, "edge_observe": case.kv_heads}
    found = []
    for name, count in groups.items():
        if name not in kernels(case, language):
            continue
        kernel = kernels(case, language)[name]
        scalars = {"layer": LAYER, "angles": case.tables.angles, "window": case.window}
        slices = tuple(Slice({"keys4": "keys"}.get(each, each)) for each in kernel.buffers)
        if name == "edge_attend":
            from edge.backends.tvm.gpu.kernels.attention.attention import HeadSplit

            most = case.tuning.heads if case.alone else 0
            count = case.kv_heads * HeadSplit.of(shape.attention, case.tuning.attend, most).turns
        per = 0 if name == "edge_observe" else 1
        values = tuple(scalars[each] for each in kernel.scalars)
        found.append(Dispatch(name, slices, values, (count, 16), "attend", LAYER, per))
    return found


def rotated(x: FloatArray, angles: FloatArray, case: Case) -> FloatArray:
    """x [n, heads, head] by angles [n, 1, pairs]."""
    n = case.pairs
    first, second = (slice(0, n), slice(n, 2 * n)) if case.halves else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    z, out = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles), x.copy()
    out[..., first], out[..., second] = z.real, z.imag
    return out


def normed(x: FloatArray, weights: FloatArray, eps: float) -> FloatArray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weights


def name_of(case: Case) -> str:
    return f"{case.kv_heads}x{case.group}x{case.head}-{case.dtype}" + "-step" * case.alone


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request: pytest.FixtureRequest, device: Device) -> Case:
    case: Case = request.param
    device.prepare(kernels(case, device.adapter.language))
    return case


@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=SHARED_FIXTURES)
@given(
    count=st.integers(1, CHUNK), lengths=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    observed=st.integers(1, CHUNK), votes=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_attention_is_numpys(
    device: Device, case: Case, count: int, lengths: list[int], observed: int, votes: bool, seed: int
) -> None:
    random, shape, tables = np.random.default_rng(seed), case.shape, case.tables
    count = 1 if case.alone else count
    normals = random_normals(random, case)
    form = RowForm(case.dtype, shape.padded_head)
    rows = DeviceRows(device, ROWS, form, observes=True, normals=normals)
    rows.record()
    normals = np.stack([normals[case.kv_heads * LAYER :], np.zeros_like(normals[case.kv_heads * LAYER :])])
    observed, lengths, starts = min(observed, count), lengths[: case.kv_heads], 320 * np.arange(case.kv_heads) + 16
    position, angles = 400, random.uniform(-3, 3, (CHUNK, case.pairs))
    qkv = random.standard_normal((count, shape.attention_inputs // case.head, case.head))
    sinks = random.uniform(-2, 2, shape.heads)
    norms = random.uniform(0.5, 2, (2, case.head))
    heats = random.uniform(0.5, 2, CHUNK)
    old = random.standard_normal((2, case.kv_heads, 300, shape.padded_head)).astype(np.float32)
    old[..., case.head :] = 0
    positions = random.permuted(np.tile(np.arange(100, 400), (case.kv_heads, 1)), axis=1)

    words = np.zeros(tables.positions + ROWS, np.uint32)
    words[State.COUNT], words[State.POSITION] = count, position
    words[State.OBSERVED], words[State.VOTES] = observed, votes
    words[tables.starts + case.kv_heads :][: case.kv_heads] = starts
    words[tables.lengths + case.kv_heads :][: case.kv_heads] = lengths
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    words[tables.angles :][: turns.size] = turns.view(np.uint32).reshape(-1)
    words[tables.temperatures :][:CHUNK] = heats.astype(np.float32).view(np.uint32)
    if tables.normal:
        words[tables.normals :][: rows.normals.size] = rows.normals.view(np.uint32).reshape(-1)
    weights = np.zeros(1024, np.float32)
    weights[512:][: shape.heads] = sinks
    weights[: case.head], weights[256:][: case.head] = norms
    for head, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        words[tables.positions + start :][:length] = positions[head, :length]
        words[tables.positions + start + length :][:count] = position + np.arange(count)
        reflected = map(reflect, old[:, head, :length], normals[:, head])
        coded = [encode(case.dtype, each) for each in reflected]
        parts = [part for codes, scales in coded for part in (to_memory(form, codes), scales)]
        rows.restore(start + np.arange(length)[None], memoryview(b"".join(part.tobytes() for part in parts)))
    buffers = rows.buffers | {"tables": made(device, words), "w1": made(device, weights)}
    buffers |= {"qkv": made(device, np.resize(qkv.astype(np.float32), (CHUNK, *qkv.shape[1:])))}
    buffers |= {"mixed": device.create(4 * CHUNK * shape.widths(Attention)), "softmax": device.create(8 * CHUNK * 64)}
    recording = device.record(dispatches(case, device.adapter.language), buffers)
    device.run(recording, count)

    q, k, v, gates = np.split(qkv, np.cumsum([shape.heads, case.kv_heads, case.kv_heads]), axis=1)
    if case.unit:
        v = normed(v, np.ones(case.head), shape.norm_eps)
    if case.normed:
        q, k = normed(q, norms[0], shape.norm_eps), normed(k, norms[1], shape.norm_eps)
    q = rotated(q, angles[:count, None], case) * shape.attention.scale
    k = rotated(k, angles[:count, None], case)
    if case.tempered:
        q = q * heats[:count, None, None]
    mixed = device.read(buffers["mixed"], 0, 4 * CHUNK * shape.widths(Attention)).view(np.float32).reshape(CHUNK, -1)
    paid = np.full(ROWS, 1.0, np.float32)
    rows.observed = True
    rows.collect(paid)
    for head, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        new = [np.pad(each[:, head], ((0, 0), (0, shape.padded_head - case.head))) for each in (k, v)]
        coded = [rounded(case, *each) for each in zip(new, normals[:, head], strict=True)]
        stored = rows.keys(start + length + np.arange(count), case.kv_heads * LAYER + head)
        # Codes next to those that are expected.
        step = np.abs(coded[0]).max() * {"int8": 1 / 120, "int4": 1 / 15}.get(case.dtype, 0) + 2e-5
        np.testing.assert_allclose(stored, coded[0], rtol=2e-3, atol=step)
        keys, values = (
            np.concatenate([rounded(case, which[head, :length], normal), own])[:, : case.head]
            for which, own, normal in zip(old, coded, normals[:, head], strict=True)
        )
        placed = np.append(positions[head, :length], position + np.arange(count))
        queries = q[:, head * case.group : (head + 1) * case.group]
        scores = np.einsum("tgd,rd->tgr", queries, keys)
        if case.cap:
            scores = case.cap * np.tanh(scores / case.cap)
        at = np.arange(count)[:, None]
        seen = np.arange(length + count) <= length + at
        if case.window:
            seen &= placed > position + at - case.window
        powers = np.where(seen[:, None], np.exp(scores), 0)
        own = slice(head * case.group, (head + 1) * case.group)
        shares = powers / (powers.sum(axis=-1, keepdims=True) + case.sinks * np.exp(sinks[own, None]))
        ours = mixed[:count, : shape.heads * case.head].reshape(count, -1, case.head)
        expected = np.einsum("tgr,rd->tgd", shares, values)
        if case.gated:
            expected = expected / (1 + np.exp(-gates[:, own]))
        ours = ours[:, head * case.group :][:, : case.group]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=ATOL[case.dtype])
        if votes:
            shares = (shares > 1 / (length + at[..., None] + 1)).astype(float)
        received = shares[count - observed :].mean(axis=1).sum(axis=0)
        if not case.alone and (not votes or case.dtype == "f32"):  # a vote may hang on the rounding of a key
            np.testing.assert_allclose(paid[start:][: length + count] - 1, received, rtol=0, atol=ATOL[case.dtype])
        paid[start:][: length + count] = 1
    assert (paid == 1).all()
    rows.collect(paid)
    assert (paid == 1).all()
    for buffer in buffers.values():
        device.free(buffer)


def random_normals(random: np.random.Generator, case: Case) -> FloatArray:
    """Of all heads, float32 [2 layers · heads, head]; zeros where keys are not reflected."""
    normals = np.zeros((2 * case.kv_heads, case.shape.padded_head), np.float32)
    if case.tables.normal:
        normals[:, : case.head] = random.standard_normal((len(normals), case.head))
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    return normals


def rounded(case: Case, x: FloatArray, normal: FloatArray) -> FloatArray:
    """Rows [n, head] as the cache gives them back."""
    return reflect(decode(case.dtype, *encode(case.dtype, reflect(x.astype(np.float32), normal))), normal)


def made(device: Device, content: AnyArray) -> Buffer:
    buffer = device.create(content.nbytes)
    device.write(buffer, 0, content)
    return buffer


# Rows


@pytest.fixture(params=["f16", "int8", "int4", "f32"])
def rows(request: pytest.FixtureRequest, device: Device) -> Iterator[DeviceRows]:
    """4,096 rows whose keys are random."""
    from edge.backends.tvm.gpu.kernels.attention.rows import move
    from edge.backends.tvm.gpu.lowering import lower

    device.prepare({"edge_move": lower(move("edge_move", RowForm(request.param, 32)), device.adapter.language)})
    rows = DeviceRows(device, 4096, RowForm(request.param, 32))
    rows.record()
    rows.set_keys(np.arange(4096), np.random.default_rng(1).standard_normal((4096, 32)).astype(np.float32), 0)
    yield rows
    for buffer in rows.buffers.values():
        device.free(buffer)


def test_encoded_keys_round_trip(rows: DeviceRows) -> None:
    random = np.random.default_rng(2)
    chosen = random.permutation(4096)[:1500].reshape(2, -1)  # more than are staged at once
    keys, before = random.standard_normal((2, 750, 32)).astype(np.float32), rows.keys(np.arange(4096), 0)
    rows.set_keys(chosen, keys, np.arange(2))
    before[chosen] = decode(rows.dtype, *encode(rows.dtype, keys))
    np.testing.assert_array_equal(rows.keys(np.arange(4096), 0), before)
    np.testing.assert_array_equal(rows.keys(chosen, np.arange(2)), before[chosen])
    assert rows.keys(np.arange(0), 0).shape == (0, 32)


@pytest.mark.parametrize(("source", "target", "count"), [(1600, 16, 2400), (16, 48, 2500)])
def test_neighbouring_rows_move_over_themselves(rows: DeviceRows, source: int, target: int, count: int) -> None:
    everything = np.arange(4096)
    before, other = rows.keys(everything, 0), b"".join(rows.save(everything[None]))
    rows.shift(Move(source, target, count))
    before[target : target + count] = before[source : source + count].copy()
    np.testing.assert_array_equal(rows.keys(everything, 0), before)
    rows.restore(everything[None], memoryview(other))
    assert b"".join(rows.save(everything[None])) == other


def test_released_rows_free_device_memory(rows: DeviceRows, device: Device) -> None:
    before, allocated = rows.keys(np.arange(512), 0), device.allocated
    rows.release(512, rows.count)
    assert rows.changed
    each = {"f16": 2, "int8": 1, "int4": 0.5, "f32": 4}[rows.dtype]
    assert allocated - device.allocated >= (4096 - 512) * 2 * 32 * each
    np.testing.assert_array_equal(rows.keys(np.arange(512), 0), before)


# The engine


@contextmanager
def engine_of(name: str, place: str, dtype: str = "f32") -> Iterator[GPUEngine]:
    with closing(load_engine(model_of(name), f"gpu@{place}", dtype, observes=True, tuning=OFTEN)) as engine:
        assert isinstance(engine, GPUEngine)
        yield engine


@pytest.mark.parametrize(
    ("name", "place", "votes"),
    [
        ("llama-gqa-tied", SOME_GPU, False), ("llama-window", SOME_GPU, False),
        exhaustive("gemma3", SOME_GPU, True), exhaustive("llama-window", "opencl:0", False),
    ],
)  # fmt: skip
def test_rows_of_different_heads_are_kept_and_renumbered(name: str, place: str, votes: bool) -> None:
    with engine_of(name, place) as engine:
        oracle = HeadOracle(model_of(name), capacity=128, chunk=CHUNK)
        oracle.votes = votes
        follow_evictions(engine, oracle)


@pytest.mark.parametrize(
    ("name", "window", "place", "dtype", "tolerance"),
    [
        ("llama", 40, SOME_GPU, "int8", 0.8), exhaustive("llama-gqa-tied", 0, "opencl:0", "f16", 8e-2),
        # Soft caps, gates, sinks, and rows whose values are a part of keys, which int4 reflects.
        *(exhaustive(name, 0, SOME_GPU, "f32", EXACT) for name in ("gemma2", "qwen35", "gpt-oss", "deepseek2")),
        exhaustive("deepseek2", 0, SOME_GPU, "int4", 5),
    ],
)  # fmt: skip
def test_steps_behind_many_rows_split_them(
    name: str, window: int, place: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """From 33 rows on, three workgroups share those of a head, by 16: the last one has one row, then more, and behind
    48, by 32, none. A burst changes kernels where single steps do."""
    small = Small(2, 128, heads=2, kv_heads=1, head=64, window=window, architecture=name)
    model = open_model(write_small(tmp_path / "m.gguf", small) if window else GOLDEN / f"{name}.gguf")
    tokens, none = some_tokens(52), np.zeros(0, np.int32)
    expected = load_engine(model, "reference", "f32").forward_all(tokens)
    with closing(load_engine(model, f"gpu@{place}", dtype, chunk=CHUNK, tuning=SPLIT)) as engine:
        assert isinstance(engine, GPUEngine)
        engine.forward(tokens[:31])
        for at in range(31, tokens.size):
            kernels = {each.kernel for each, _ in engine.time_pass(tokens[at : at + 1])}
            assert ("edge_join" in kernels) == (at >= 33)
            np.testing.assert_allclose(engine.passes.logits(1)[0], expected[at], rtol=0, atol=tolerance)
        answers = []
        for at_once in (1, 8):
            engine.kv.truncate(0)
            engine.forward(tokens[:30])
            runs, answer = list[int](), [int(tokens[30])]
            while (left := 9 - len(answer)) > 0:
                answer += (found := engine.run_greedy(answer[-1], min(at_once, left), none).tolist())
                runs.append(len(found))
            answers.append(answer)
        assert runs == ([1] * 8 if model.spec.state_bytes else [3, 5])
        assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [exhaustive("f16"), "int8", exhaustive("int4")])
def test_attention_is_of_rows_that_are_there(dtype: str) -> None:
    """Not of those that were truncated, restored, or ran unobserved; kept rows stay as they are."""
    with engine_of("llama-gqa-tied", SOME_GPU, dtype) as engine:
        kv, tokens = engine.kv, some_tokens(60)
        engine.forward_all(tokens[:30])
        assert not kv.attention.any()
        state, keys = kv.save(), all_keys(engine)
        engine.observe(CHUNK)
        engine.forward_all(tokens[30:])
        kv.truncate(30)
        engine.observe(0)
        engine.forward_all(tokens[30:40])
        assert (kv.attention[..., :30] > 0).any()
        assert not kv.attention[..., 30:].any()
        bring_back(kv, state)
        assert not kv.attention.any()
        np.testing.assert_array_equal(all_keys(engine), keys)
        engine.observe(1)
        engine.forward(tokens[30:31])
        np.testing.assert_allclose(kv.attention.sum(axis=-1), 1, atol=1e-5)
        logits = engine.forward(tokens[31:32]).copy()
        kv.truncate(31)
        kv.shrink(64)
        np.testing.assert_array_equal(engine.forward(tokens[31:32]), logits)
        np.testing.assert_array_equal(all_keys(engine)[..., :30, :], keys)


def ran(backend: str, policy: str, name: str, tokens: int) -> tuple[str, int, list[Any], AnyArray]:
    """Through a prompt longer than the cache and an answer: its text, the rows that were evicted, those of each head,
    and their positions."""
    with (
        on_gpu(SOME_GPU) if backend == "gpu" else nullcontext(),
        load(
            GOLDEN / f"{name}.gguf", backend=backend, kv_dtype="f32", kv_policy=policy, max_kv_size=48, threads=1
        ) as session,
    ):
        text = session.generate(some_tokens(90), max_tokens=tokens, ignore_eos=True, sampling=GREEDY)
        assert session.report is not None
        assert session.report.kv.evicted > 0
        kv: Any = session.engine.kv
        return text, session.report.kv.evicted, kv.head_lengths.tolist(), kv.positions.copy()


def test_learned_importance_is_that_of_the_cpu() -> None:
    """Of rows that are almost as important, either may stay: the CPU's engine rounds activations to 8 bits."""
    places = [ran(backend, "kvzap", "llama-gqa-tied", 1)[-1] for backend in ("cpu", "gpu")]
    one, other = ({(*at[:2], int(each[at])) for at in map(tuple, np.argwhere(each >= 0))} for each in places)
    assert len(one & other) > 0.9 * len(one | other)


@pytest.mark.parametrize(("policy", "name"), [
    ("streaming", "llama-gqa-tied"), ("tova", "llama-gqa-tied"), ("adakv", "llama-gqa-tied"),
    exhaustive("h2o", "qwen35"), exhaustive("adakv", "gemma4"),
])  # fmt: skip
def test_policies_keep_the_cpus_rows(policy: str, name: str) -> None:
    """By place, by attention, and head by head."""
    ours, theirs = (ran(backend, policy, name, 60) for backend in ("gpu", "cpu"))
    assert ours[:-1] == theirs[:-1]
    np.testing.assert_array_equal(ours[-1], theirs[-1])

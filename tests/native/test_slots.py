"""Experts in less memory than they take: the same answers to the last bit, and as few reads as the policy says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Engines, exhaustive
from fallbacks import open_fallback
from hypothesis import given
from hypothesis import strategies as st
from small_models import Small, write_small

from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig
from edge.backends.tvm.cpu import slots as slots_module
from edge.backends.tvm.cpu.expert_trace import read_trace, save_trace
from edge.backends.tvm.cpu.slots import HALF_LIFE, Slots, count_hits, slot_bytes, slots_within
from edge.backends.tvm.cpu.streaming import STEPS, packed_bytes, streaming_need
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.packing.layout import make_layout
from edge.errors import EngineError
from edge.model.model import Model, open_model
from edge.storage.cache import entries
from edge.types import AnyArray, FloatArray, IntArray

CONFIG = EngineConfig(128, 16, "f16", threads=2, logits_rows=16)
KIB, MIB = 1 << 10, 1 << 20

# A mixture whose router has favourites and whose choices persist, as those of trained models: uniform choices cannot
# test a cache, which finds as many whatever it evicts.
TOPICS = 4
SHAPE = {
    "layers": 3, "hidden": 256, "heads": 4, "kv_heads": 2, "head": 64, "ffn": 64, "experts": 24, "used": 3,
    "architecture": "qwen3moe",
}  # fmt: skip
_LIKED, _OF_TOPIC = 1.0, 1.0


def skewed_model(path: Path, *, types: dict[str, str] | None = None, **others: object) -> Model:
    """Tokens have a direction in common, in which some experts are liked better by Zipf's law, and one for each topic
    (token mod TOPICS), in which others are."""
    small = Small(**{**SHAPE, "types": types or {"": "Q4_0"}, **others})  # type: ignore[arg-type]
    random = np.random.default_rng(3)

    def edit(weights: dict[str, AnyArray]) -> None:
        table = weights["token_embd"]
        large = 0.5 * float(np.sqrt(np.mean(table**2)) * np.sqrt(small.hidden))
        table[:, : TOPICS + 1] = 0
        table[:, 0] = large
        table[np.arange(len(table)), 1 + np.arange(len(table)) % TOPICS] = large
        for layer in range(small.layers):
            router = weights[f"blk.{layer}.ffn_gate_inp"]
            router[:, 0] = -_LIKED * np.log(1 + random.permutation(small.experts)) / 10
            router[:, 1 : 1 + TOPICS] = _OF_TOPIC * random.standard_normal((small.experts, TOPICS)) / 10
            weights[f"blk.{layer}.ffn_norm"][: TOPICS + 1] = 1
            weights[f"blk.{layer}.attn_output"] *= 0.2  # an average of tokens, and so the same for all

    return open_model(write_small(path, small, edit))


def of_topics(vocab: int, count: int, seed: int = 1) -> IntArray:
    """Tokens of a text that changes its topic every 40 tokens or so."""
    random = np.random.default_rng(seed)
    topic, tokens = 0, np.empty(count, np.int32)
    for at in range(count):
        topic = random.integers(TOPICS) if random.random() < 1 / 40 else topic
        tokens[at] = random.integers(3 // TOPICS + 1, vocab // TOPICS) * TOPICS + topic
    return tokens


def native(model: Model, config: EngineConfig, *, slots: int = 0) -> NativeEngine:
    """slots: at least as many; 0: all experts in memory."""
    if slots:
        layout = make_layout(model.file, model.spec)
        size = slot_bytes(max(each.stride for each in layout.experts.values()))
        resident = streaming_need(model.spec, config).least
        while streaming_need(model.spec, replace(config, resident=resident)).slots < slots * size:
            resident += 64 * KIB
        config = replace(config, resident=resident)
    engine = find_backend("cpu", model.file, model.spec).load(model.file, model.spec, config)
    assert isinstance(engine, NativeEngine)
    return engine


def answers(engine: Engine, vocab: int) -> FloatArray:
    """Logits of chunks, of steps, after an eviction, and of a longer chunk."""
    tokens = of_topics(vocab, 90)
    found = [engine.forward_all(tokens[:21]).copy()]
    found += [engine.forward_all(tokens[at : at + 1]).copy() for at in range(21, 40)]
    engine.kv.keep(np.r_[0:4, 12:40].astype(np.int32), close_gaps=True)
    found.append(engine.forward_all(tokens[40:75]).copy())
    return np.concatenate(found + [engine.forward_all(tokens[at : at + 1]).copy() for at in range(75, 90)])


@pytest.mark.parametrize(
    "mixture", ["qwen35moe", "gemma4moe", "gpt-oss", *(exhaustive(each) for each in ("qwen3moe", "lfm2moe"))]
)
def test_experts_in_slots_change_no_bit(mixture: str, engines: Engines) -> None:
    """With a shared expert, leading dense layers, biases, norms of sums; with a token's slots, and some more."""
    model = open_fallback(mixture)[0]
    expected = answers(engines(native(model, replace(CONFIG, kv_dtype="f32"))), model.spec.vocab)
    for slots in (model.spec.experts_used, model.spec.experts + 1):
        engine = engines(native(model, replace(CONFIG, kv_dtype="f32"), slots=slots))
        assert engine.experts  # type: ignore[attr-defined]
        np.testing.assert_array_equal(answers(engine, model.spec.vocab), expected)


@pytest.mark.parametrize("direct", [False, True])
def test_waves_of_a_chunk_change_no_bit(
    direct: bool, tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations of 8 bits, which every wave needs again; experts of two sizes; read past the page cache or not."""
    opened: list[bool] = []
    way = slots_module._open
    monkeypatch.setattr(slots_module, "_open", lambda path, **_: opened.append(direct) or way(path, direct=direct))
    model = skewed_model(tmp_path / "model.gguf", types={"": "Q4_0", "blk.1.ffn_down_exps": "Q8_0"})
    config = replace(CONFIG, threads=3)
    expected = answers(engines(native(model, config)), model.spec.vocab)
    for slots in (3, 10):
        engine = engines(native(model, config, slots=slots))
        np.testing.assert_array_equal(answers(engine, model.spec.vocab), expected)
    assert opened == [direct] * 2


def test_hits_are_those_of_the_policy(tmp_path: Path, engines: Engines) -> None:
    """The engine counts as its recorded choices do."""
    model = skewed_model(tmp_path / "model.gguf")
    engine = engines(native(model, replace(CONFIG, capacity=384, threads=1), slots=24))
    assert isinstance(engine, NativeEngine)
    assert engine.experts is not None
    assert engine.passes.experts is not None
    assert engine.experts.experts == 72
    for token in of_topics(model.spec.vocab, 300):
        engine.forward(np.array([token]))
    counts, trace = engine.experts, engine.passes.experts.trace
    slots, hits = counts.slots, counts.choices - counts.misses
    assert 24 <= slots <= 26
    assert trace.shape == (300, 3, 3)
    assert (counts.steps, counts.choices) == (300, 2700)
    assert counts.read == counts.misses * make_layout(model.file, model.spec).experts[0].stride
    assert hits == oracle_hits(trace, slots)
    assert abs(count_hits(trace, 24, slots) - hits / counts.choices) < 0.1


def oracle_hits(trace: object, count: int) -> int:
    """The policy as its sentence says it: of equally rare experts, any."""
    rates: dict[tuple[int, int], float] = {}
    held: list[tuple[int, int]] = []
    hits = 0
    for number, chosen in enumerate(np.asarray(trace).reshape(-1, 3)):
        wanted = [(number % 3, int(each)) for each in chosen]
        if number % 3 == 0:
            rates = {key: value / 2 ** (1 / HALF_LIFE) for key, value in rates.items()}
        for key in wanted:
            rates[key] = rates.get(key, 0.0) + 1
        hits += sum(key in held for key in wanted)
        for key in wanted:
            if key not in held:
                if len(held) == count:
                    held.remove(min((each for each in held if each not in wanted), key=lambda each: rates[each]))
                held.append(key)
    return hits


def test_wanted_experts_stay_those_that_come_next_too_and_old_choices_fade() -> None:
    slots = Slots(1, 4, 2)
    for wanted in ([0], [1], [1], [1], [0, 2]):  # for 2, the one that is wanted with it stays, though chosen less often
        slots.take(0, np.array(wanted))
    assert not slots.take(0, np.array([0, 2])).size
    slots = Slots(1, 4, 3)
    for wanted in ([0, 1], [2], [2]):
        slots.take(0, np.array(wanted))
    slots.take(0, np.array([3]), later=np.array([0, 1]))  # in the place of 2, though that was chosen most often
    assert not slots.take(0, np.array([0, 1])).size
    for expert in (0, 0, 1):  # so many tokens apart that their weights leave the range of floats
        slots.age(16_000)
        slots.take(0, np.array([expert]))
    slots.take(0, np.array([2]))
    slots.take(0, np.array([3]))
    assert not slots.take(0, np.array([1])).size


@given(resident=st.integers(0, 40 * MIB), threads=st.integers(1, 8))
def test_slots_stay_within_the_plan(resident: int, threads: int) -> None:
    """They have room for the experts of a token, and more memory never reads more."""
    model = open_fallback("lfm2moe")[0]
    spec, config = model.spec, EngineConfig(128, 16, "f16", threads)
    least = streaming_need(spec, config).least
    need, more = (streaming_need(spec, replace(config, resident=least + size)) for size in (resident, resident + MIB))
    assert slots_within(make_layout(model.file, spec), need.slots) >= spec.experts_used
    kept = (spec.weight_bytes - spec.expert_bytes) * need.kept // STEPS  # of all other weights
    assert need.slots + kept <= least + resident
    assert 0 <= more.streamed <= need.streamed <= packed_bytes(spec)


def test_interrupt_waits_for_the_end_of_the_pass(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = skewed_model(tmp_path / "model.gguf")
    tokens, take = of_topics(model.spec.vocab, 12), Slots.take
    plain, engine = engines(native(model, CONFIG)), engines(native(model, CONFIG, slots=5))
    times = iter(range(100))

    def interrupted(*arguments: object) -> object:
        found = take(*arguments)  # type: ignore[arg-type]
        if next(times) == 1:
            raise KeyboardInterrupt
        return found

    for each in (plain, engine):
        each.forward(tokens[:10])
    monkeypatch.setattr(Slots, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.forward(tokens[10:11])
    plain.forward(tokens[10:11])
    np.testing.assert_array_equal(engine.forward(tokens[11:]), plain.forward(tokens[11:]))


def test_unreadable_file_raises_one_line(tmp_path: Path, engines: Engines) -> None:
    model = skewed_model(tmp_path / f"cut-{os.getpid()}.gguf", seed=int.from_bytes(os.urandom(2)))  # packed for itself
    plain, engine = engines(native(model, CONFIG)), engines(native(model, CONFIG, slots=5))
    tokens = of_topics(model.spec.vocab, 12)
    assert isinstance(engine, NativeEngine)
    reads = engine.passes.experts
    assert reads is not None
    reads._reads[1] = -1  # no such file
    for count in (8, 1):
        with pytest.raises(EngineError, match="experts could not be read"):
            engine.forward(tokens[:count])
    reads._reads[1] = reads._file.fileno()
    np.testing.assert_array_equal(engine.forward(tokens), plain.forward(tokens))
    path = next(each.path for each in entries("weights") if each.about == model.file.path.name)
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(EngineError, match="cut short while it was in use"):
        engine.forward(tokens[:1])
    path.unlink()


@pytest.mark.parametrize("damage", [b"", b"no array", np.zeros(5, np.int16).tobytes()])
def test_recorded_choices_are_those_of_the_model(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few are not recorded; what cannot be this model's is as if there was nothing."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    model = skewed_model(tmp_path / "model.gguf")
    layout = make_layout(model.file, model.spec)
    trace = np.random.default_rng(1).integers(0, 24, (100, 3, 3)).astype(np.int16)
    for saved, found in ((trace[:10], None), (trace, trace), (trace[:, :2], None), (trace + np.int16(1), None)):
        save_trace(model.file, saved)
        again = read_trace(model.file, layout)
        assert (again is None) if found is None else np.array_equal(again, found)  # type: ignore[arg-type]
    [entry] = entries("traces")
    entry.path.write_bytes(damage)
    assert read_trace(model.file, layout) is None

"""LoRA adapters: every engine computes what merged weights compute, and nothing of one adapter stays with another."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, Engines, exhaustive, load_engine, require
from lora_files import write_adapter
from small_models import Small, write_small
from test_architectures import require_native
from test_cli import edge as run_edge

import edge
from edge.backends import find_backend, reference
from edge.backends.base import AdaptedEngine, Engine, EngineConfig
from edge.converters.convert import Conversion, convert, preview
from edge.converters.gguf.quantize import Settings
from edge.errors import BudgetError, BusyError, EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.model.adapters.lora import Lora, open_lora, read_adapter
from edge.model.adapters.lora_file import LoraFile, parse_lora
from edge.model.model import Model, open_model
from edge.model.tensors import find_tensors
from edge.plan.plan import make_plan
from edge.prompt_cache.cache import PromptCache
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.types import AnyArray, FloatArray

GELU = 2e-2  # llama.cpp looks it up in a table of float16
CHUNK, CAPACITY, THREADS = 8, 64, 2
TOKENS = np.random.default_rng(5).integers(3, 250, 40).astype(np.int32)

# With ranks: fused matrices, norms behind products, biases, scaled residuals.
MODELS = [("llama-gqa-tied", 3), ("phi3", 16), ("gemma3", 8), ("gpt2", 20), ("granite", 16)]
HYBRIDS = [("qwen35moe", 3), ("gemma4", 3), ("falcon-h1", 3), ("lfm2", 20)]  # llama.cpp evicts no rows
ON_GPU = [*MODELS[:4], *HYBRIDS, ("gpt-oss", 5)]


def cases() -> list[Any]:
    """Engines × models; of compiled ones, one model in `make test`."""
    compiled = [("cpu", *each) for each in (*MODELS, *HYBRIDS)] + [(f"gpu@{SOME_GPU}", *each) for each in ON_GPU]
    often = [(backend, *each) for backend in ("reference", "llamacpp") for each in MODELS]
    often += [pytest.param(*each, marks=pytest.mark.slow) for each in compiled if each[1:] == MODELS[0]]
    others = [each for each in compiled if each[1:] != MODELS[0]] + [("gpu@opencl:0", *MODELS[0])]
    return [*often, *(exhaustive(*each) for each in others)]


def golden(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


def lora_of(model: Model, *files: Path | str) -> Lora:
    found = open_lora(parse_lora(",".join(map(str, files))), model.file, model.spec)
    assert found is not None
    return found


def load(model: Model, backend: str, kv_dtype: str = "f32", lora: Lora | None = None, threads: int = 1) -> Engine:
    return load_engine(model, backend, kv_dtype, capacity=CAPACITY, lora=lora, threads=threads)


def merged(model: Model, *files: tuple[Path, float]) -> Engine:
    """The reference engine with W + scale · alpha / rank · B A, all computed here, in float64."""
    sources = find_tensors(model.file, model.spec)
    weights = reference.read_weights(model.file, sources)
    for path, scale in files:
        adapter = read_adapter(path)
        tensors = {name: adapter.read(info).astype(np.float64) for name, info in adapter.file.tensors.items()}
        for name, source in sources.items():
            if f"{source.tensor}.lora_a" in tensors:
                a, b = tensors[f"{source.tensor}.lora_a"], tensors[f"{source.tensor}.lora_b"]
                change = (b @ a)[source.index] * (adapter.alpha / len(a)) * scale
                weights[name] = (weights[name] + change).astype(np.float32)
    config = EngineConfig(CAPACITY, CHUNK, "f32", 1, logits_rows=CHUNK)
    return reference.ReferenceEngine(model.file, model.spec, config, weights)


def answers(engine: Engine) -> FloatArray:
    """A prompt in chunks, steps, and both again behind an eviction."""
    engine.kv.truncate(0)
    found = [engine.forward_all(TOKENS[:21]).copy()]
    found += [engine.forward(TOKENS[at : at + 1])[None].copy() for at in range(21, 26)]
    # Rings evict none of the 20 positions that windowed layers see, so no engine does.
    engine.kv.keep(np.r_[0:4, 6:26].astype(np.int32), close_gaps=False)
    found += [engine.forward_all(TOKENS[26:31]).copy(), engine.forward(TOKENS[31:32])[None].copy()]
    return np.concatenate(found)


def assert_merged(ours: FloatArray, expected: FloatArray, backend: str, name: str) -> None:
    gelu = backend == "llamacpp" and name.startswith(("gemma", "gpt2"))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=GELU if gelu else 5e-4)


@pytest.mark.parametrize(("backend", "name", "rank"), cases())
def test_logits_match_merged_weights(backend: str, name: str, rank: int, tmp_path: Path, engines: Engines) -> None:
    """Of two adapters, one of which changes attention alone."""
    model, one, two = golden(name), tmp_path / "one.gguf", tmp_path / "two.gguf"
    write_adapter(one, model, rank)
    write_adapter(two, model, 4, only=("attn",), seed=2)
    expected = answers(merged(model, (one, 0.7), (two, -0.25)))
    assert np.abs(expected - answers(merged(model))).max() > 1  # the adapters matter
    for threads in (1, THREADS) if backend == "cpu" else (1,):
        engine = engines(load(model, backend, lora=lora_of(model, f"{one}:0.7", f"{two}:-0.25"), threads=threads))
        assert_merged(answers(engine), expected, backend, name)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["cpu", f"gpu@{SOME_GPU}"])
def test_convolution_adapters_are_refused(backend: str, tmp_path: Path, engines: Engines) -> None:
    """And the engine goes on without one."""
    model, convolution = golden("lfm2"), "shortconv.conv."
    good, bad = (write_adapter(tmp_path / each, model, 3, only=(each,)) for each in ("ffn_up", convolution))
    engine = cast(AdaptedEngine, engines(load(model, backend, lora=lora_of(model, good))))
    with pytest.raises(UnsupportedError, match=f"changes blk.0.{convolution}.*runs no adapters of convolutions"):
        engine.set_lora(lora_of(model, bad))
    np.testing.assert_array_equal(answers(engine), answers(engines(load(model, backend))))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", pytest.param(f"gpu@{SOME_GPU}", marks=pytest.mark.exhaustive)])
def test_adapters_are_exchanged_in_place(backend: str, tmp_path: Path, engines: Engines) -> None:
    """Without one, logits are the model's own to the bit; larger ones are refused; ranks and matrices may differ."""
    model, name = golden("llama-gqa-tied"), "llama-gqa-tied"
    large = write_adapter(tmp_path / "large.gguf", model, 16)
    small = write_adapter(tmp_path / "small.gguf", model, 3, only=("attn_v", "1.ffn_down"), seed=2)
    mixed = write_adapter(tmp_path / "mixed.gguf", model, 5, seed=3, edit=halve_some_ranks)
    engine = cast(AdaptedEngine, engines(load(model, backend, lora=lora_of(model, large), threads=THREADS)))
    plain = answers(engines(load(model, backend, threads=THREADS)))
    for path in (large, small, mixed, large):
        engine.set_lora(lora_of(model, path))
        assert engine.kv.length == 0
        assert_merged(answers(engine), answers(merged(model, (path, 1.0))), backend, name)
    engine.set_lora(None)
    np.testing.assert_array_equal(answers(engine), plain)
    with pytest.raises(InputError, match="rank 20"):
        engine.set_lora(lora_of(model, write_adapter(tmp_path / "larger.gguf", model, 20)))


def halve_some_ranks(tensors: dict[str, AnyArray]) -> None:
    for name in [name for name in tensors if "attn_q" in name]:
        part = slice(2)
        tensors[name] = np.ascontiguousarray(tensors[name][part] if name.endswith("_a") else tensors[name][:, part])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_quantized_activations_serve_adapters(tmp_path: Path, engines: Engines) -> None:
    """With weights of integers, A is read in 8 bits; what is lost is that of activations in 8 bits."""
    model = open_model(write_small(tmp_path / "small.gguf", Small(layers=2, types="Q4_0")))
    lora = lora_of(model, write_adapter(tmp_path / "a.gguf", model, 8))
    expected, plain = answers(merged(model, (tmp_path / "a.gguf", 1.0))), answers(merged(model))
    ours = answers(engines(load(model, "cpu", "f16", lora, THREADS)))
    alone = answers(engines(load(model, "cpu", "f16", threads=THREADS)))
    assert np.sqrt(np.mean((ours - expected) ** 2)) < 2 * np.sqrt(np.mean((alone - plain) ** 2)) + 0.01
    assert np.corrcoef(ours.ravel(), expected.ravel())[0, 1] > 0.99


def test_every_type_of_adapters_is_read(tmp_path: Path, engines: Engines) -> None:
    model = golden("llama-gqa-tied")
    for kind in ("F16", "BF16", "Q8_0"):
        path = write_adapter(tmp_path / f"{kind}.gguf", model, 32, kind=kind)
        assert {info.type for info in read_adapter(path).file.tensors.values()} == {kind}
        expected = answers(merged(model, (path, 1.0)))
        ours, theirs = (
            answers(engines(load(model, each, lora=lora_of(model, path)))) for each in ("reference", "llamacpp")
        )
        np.testing.assert_allclose(ours, expected, rtol=0, atol=5e-4)
        assert np.corrcoef(theirs.ravel(), expected.ravel())[0, 1] > 0.999  # it rounds x to A's type


# Files


def test_arguments_name_files_and_scales() -> None:
    assert parse_lora("a.gguf") == (LoraFile(Path("a.gguf")),)
    assert parse_lora("a.gguf:0.5,b:c.gguf") == (LoraFile(Path("a.gguf"), 0.5), LoraFile(Path("b:c.gguf")))
    assert parse_lora("a.gguf:-2") == (LoraFile(Path("a.gguf"), -2.0),)
    assert parse_lora(Path("a,b:2")) == (LoraFile(Path("a,b:2")),)
    for text in ("", ",", "a.gguf,", "a.gguf:nan", "a.gguf:inf", "a.gguf:1e9", 3, ("a",)):
        with pytest.raises(InputError):
            parse_lora(text)


QUERIES = "blk.0.attn_q.weight.lora_"


def change(suffix: str, edit: Callable[[AnyArray], AnyArray]) -> Callable[[dict[str, AnyArray]], None]:
    return lambda tensors: tensors.update({QUERIES + suffix: edit(tensors[QUERIES + suffix])})


def put(name: str) -> Callable[[dict[str, AnyArray]], None]:
    return lambda tensors: tensors.update({name: np.ones((3, 8), np.float32)})


def value(number: float) -> Callable[[dict[str, AnyArray]], None]:
    def set_one(tensors: dict[str, AnyArray]) -> None:
        tensors["blk.1.ffn_up.weight.lora_b"][3, 1] = number

    return set_one


BAD: list[tuple[dict[str, Any], type[EdgeError], str]] = [
    ({"edit": lambda tensors: tensors.pop(f"{QUERIES}b")}, ModelFormatError, "only one of"),
    ({"edit": change("a", lambda a: a[:2])}, ModelFormatError, "ranks 2 and 3"),
    ({"edit": change("a", lambda a: a[:, :32].copy())}, InputError, "another model"),
    ({"edit": dict.clear}, ModelFormatError, "without tensors"),
    ({"edit": put("blk.7.attn_q.weight.lora_c")}, UnsupportedError, "no part of a LoRA pair"),
    ({"edit": put("blk.0.attn_norm.weight")}, UnsupportedError, "no part of a LoRA pair"),
    ({"only": ("blk.1",), "edit": lambda t: t.update({k.replace("1", "9", 1): t.pop(k) for k in list(t)})},
     InputError, "does not have"),
    ({"edit": value(np.nan)}, ModelFormatError, "not finite"),
    ({"edit": value(3e38), "alpha": 100.0}, ModelFormatError, "too large for its scale"),
    ({"architecture": "qwen2"}, InputError, "'qwen2'"),
    ({"type": "model"}, ModelFormatError, "not an adapter"),
    ({"adapter": "control_vector"}, UnsupportedError, "'control_vector'"),
    ({"alora": True}, UnsupportedError, "aLoRA"),
    ({"rank": 1025}, UnsupportedError, "rank 1025"),
]  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("how", "error", "said"), BAD)
def test_bad_adapters_raise_one_line(how: dict[str, Any], error: type[EdgeError], said: str, tmp_path: Path) -> None:
    model = golden("llama-gqa-tied")
    path = write_adapter(tmp_path / "a.gguf", model, **{"rank": 3, **how})
    with pytest.raises(error, match=said) as raised:
        read_all(model, lora_of(model, path))
    assert "\n" not in str(raised.value)


def read_all(model: Model, lora: Lora) -> None:
    for source in find_tensors(model.file, model.spec).values():
        if lora.changes(source):
            lora.matrices(source)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", [0, *map(exhaustive, range(1, 20))])
def test_damaged_files_raise_our_errors_alone(seed: int, tmp_path: Path) -> None:
    """Bytes of the header changed, and files cut short; what is accepted, llama.cpp loads, too."""
    model, rnd = golden("llama-gqa-tied"), random.Random(seed)
    whole = write_adapter(tmp_path / "a.gguf", model, 3, only=("blk.0.attn",)).read_bytes()
    header = read_adapter(tmp_path / "a.gguf").file.data_offset
    path, accepted = tmp_path / "b.gguf", 0
    engine = cast(AdaptedEngine, load(model, "llamacpp", lora=lora_of(model, tmp_path / "a.gguf")))
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rnd.choice((1, 1, 2, 4))):
            data[rnd.randrange(header)] = rnd.choice((0, 1, 2, 8, 127, 128, 255, rnd.randrange(256)))
        path.write_bytes(data[: rnd.randrange(len(data))] if rnd.random() < 0.1 else data)
        try:
            lora = lora_of(model, path)
            read_all(model, lora)
        except EdgeError:
            continue
        accepted += 1
        if lora.size.rank <= 3:
            engine.set_lora(lora)
            engine.forward(TOKENS[:2])
    engine.close()
    assert accepted


# Sessions


Open = Callable[..., Session]
SHORT: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    model = golden("llama-gqa-tied")
    return [write_adapter(tmp_path / f"{rank}.gguf", model, rank, seed=rank) for rank in (3, 8)]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("llamacpp", {}), exhaustive("cpu", {"kv_dtype": "f32"}), exhaustive("gpu", {"kv_dtype": "f32"}),
    ],
)  # fmt: skip
def test_session_changes_its_adapter(
    backend: str, options: dict[str, Any], open_session: Open, adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also to one of a larger rank than it was loaded with, and of none."""
    if backend in ("cpu", "gpu"):
        require_native()
        monkeypatch.setenv("EDGE_GPU", SOME_GPU)
    options = {"backend": backend, **options}
    small, large = adapters
    fresh = {lora: open_session(lora=lora, **options).generate("Hello", **SHORT) for lora in (None, small, large)}
    assert len(set(fresh.values())) == 3
    session = open_session(**options)
    for lora in (None, small, large, small, None, large):
        session.set_lora(lora)
        assert session.generate("Hello", **SHORT) == fresh[lora]
        report = session.report
        assert [(each.name, each.rank, each.scale) for each in report.lora] == (
            [] if lora is None else [(lora.stem, int(lora.stem), 1.0)]
        )
        assert (report.memory.lora > 0) == (session.plan.config.lora_rank > 0)
    session.set_lora(large, scale=0.5)
    assert session.generate("Hello", **SHORT) == open_session(lora=f"{large}:0.5", **options).generate("Hello", **SHORT)


@pytest.mark.parametrize("backend", ["reference", "llamacpp", exhaustive("cpu")])
def test_refused_adapter_keeps_the_current_one(
    backend: str, open_session: Open, adapters: list[Path], tmp_path: Path
) -> None:
    session = open_session(backend=backend, lora=adapters[0])
    answer, lora = session.generate("Hello", **SHORT), session.lora
    broken = write_adapter(tmp_path / "nan.gguf", golden("llama-gqa-tied"), 3, edit=value(np.nan))
    larger = write_adapter(tmp_path / "nan9.gguf", golden("llama-gqa-tied"), 9, edit=value(np.nan))
    for path in (tmp_path / "none.gguf", broken, larger):
        with pytest.raises(ModelFormatError):
            session.set_lora(path)
        assert session.lora is lora
        assert session.generate("Hello", **SHORT) == answer
    with pytest.raises(InputError):
        session.set_lora(adapters[1], scale=float("nan"))
    stream = session.stream("Hello", **SHORT)
    next(stream)
    with pytest.raises(BusyError):
        session.set_lora(None)
    stream.close()


def test_conversation_is_run_again_under_another_adapter(
    open_session: Open, adapters: list[Path], tmp_path: Path
) -> None:
    session = open_session(lora=adapters[0])
    talk, other = Conversation(session), Conversation(open_session(lora=adapters[1]))
    assert "".join(talk.say("Hello", **SHORT))
    talk.save(tmp_path / "said.json")
    other.load(tmp_path / "said.json")
    session.set_lora(adapters[1])
    with pytest.raises(InputError, match="begin a new one"):
        session.generate("And then?", follow_up=True, **SHORT)
    assert talk.replays
    assert [*talk.say("And then?", **SHORT)] == [*other.say("And then?", **SHORT)]
    assert not talk.replays
    assert [*talk.say("And then?", **SHORT)] == [*other.say("And then?", **SHORT)]


def test_prompt_cache_keeps_adapters_apart(open_session: Open, adapters: list[Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_dtype": "f32", "prompt_cache": PromptCache(tmp_path / "cache")}
    prompt = np.resize(TOKENS, 200)
    session = open_session(lora=adapters[1], **options)
    seen: list[tuple[int, str]] = []
    for lora in (None, adapters[0], adapters[1], f"{adapters[1]}:0.5", adapters[0], None, f"{adapters[1]}:0.5"):
        session.set_lora(lora)
        text = session.generate(prompt, **SHORT)
        seen.append((session.report.tokens.reused, text))
    first, again = seen[:4], seen[4:]
    assert [reused for reused, _ in first] == [0] * 4
    assert len({text for _, text in first}) == 4
    assert all(reused > 0 for reused, _ in again)
    assert [text for _, text in again] == [first[1][1], first[0][1], first[3][1]]
    elsewhere = open_session(lora=adapters[0], **options)
    assert elsewhere.generate(prompt, **SHORT) == first[1][1]
    assert elsewhere.report.tokens.reused > 0


@pytest.mark.parametrize("backend", ["reference", "llamacpp", "cpu"])
def test_plan_counts_adapters(backend: str, adapters: list[Path]) -> None:
    require(backend)
    model, options = golden("llama-gqa-tied"), edge.Options(max_kv_size=300)
    engine = find_backend(backend, model.file, model.spec)
    without = make_plan(model.spec, engine, options).bytes
    small, large = (make_plan(model.spec, engine, replace(options, lora=parse_lora(each))) for each in adapters)
    assert (small.config.lora_rank, large.config.lora_rank) == (3, 8)
    assert without.lora == 0 < small.bytes.lora <= large.bytes.lora
    for plan, path in ((small, adapters[0]), (large, adapters[1])):
        held = 1 if backend == "llamacpp" else 0.5  # the native engine holds them in 2 bytes a value, the files in 4
        assert plan.bytes.lora >= held * read_adapter(path).nbytes


def test_budget_holds_for_another_adapter(open_session: Open, tmp_path: Path) -> None:
    session = open_session()
    session._loaded.plan = replace(session.plan, limit=session.plan.bytes.total + session.plan.bytes.reserve)
    with pytest.raises(BudgetError, match="load it with the model"):
        session.set_lora(write_adapter(tmp_path / "large.gguf", golden("llama-gqa-tied"), 64))
    assert session.lora is None
    assert session.generate("Hello", **SHORT)


def test_engines_without_adapters_say_so(adapters: list[Path]) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(UnsupportedError, match="runs no LoRA adapters: use --backend cpu"):
        edge.load(golden("llama-gqa-tied"), backend="onnx", lora=adapters[0])


def test_lora_on_command_line(adapters: list[Path]) -> None:
    model, common = str(GOLDEN / "llama-gqa-tied.gguf"), ("--backend", "reference", "--max-kv-size", "300")
    answer = ("-p", "Hello", "-n", "4", "--ignore-eos", "--json", *common)
    report = json.loads(run_edge("run", model, "--lora", f"{adapters[1]}:0.5", *answer).stdout)
    assert (report["lora"][0]["rank"], report["lora"][0]["scale"]) == (8, 0.5)
    refused = run_edge("run", str(adapters[0]), "-p", "Hello")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "an adapter, not a model: run its model with --lora" in refused.stderr
    shown = json.loads(run_edge("inspect", str(adapters[0]), "--json").stdout)["adapter"]
    assert (shown["ranks"], shown["changes"]["attn_q"]) == ([3], 2)
    assert "rank 3, alpha 6" in run_edge("inspect", str(adapters[0])).stdout


# Merged for good


def test_merged_file_matches_merged_weights(tmp_path: Path, engines: Engines) -> None:
    """By the scale of the adapter; what is rounded is the sum."""
    model, made = golden("phi3"), tmp_path / "merged.gguf"
    path = write_adapter(tmp_path / "a.gguf", model, 4)
    wanted = Conversion("gguf", settings=Settings("Q8_0", "rtn"), lora=parse_lora(f"{path}:0.7"))
    planned = preview(model.path, made, wanted)
    convert(model.path, made, wanted)
    assert planned[0] == {made.name: made.stat().st_size}
    ours, expected = answers(engines(load(open_model(made), "reference"))), answers(merged(model, (path, 0.7)))
    assert np.corrcoef(ours.ravel(), expected.ravel())[0, 1] > 0.999

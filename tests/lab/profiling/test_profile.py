"""`edge profile`: what is measured, how it is kept, and what is concluded from it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from profiles import MIB, make_bare_profile, make_engine, make_profile, spread
from test_cli import edge_here as edge
from test_devices import write

from edge.devices.load import Load, read_load, share_of_others
from edge.lab.profiling.child import Job, run_in_child
from edge.lab.profiling.memory import Sampler, split
from edge.lab.profiling.profile import GPUCeiling, MemoryBase, MemorySample, Profile, Roofs, Settings, read_profile
from edge.lab.profiling.sustained import Sustained, Window
from edge.lab.profiling.verdict import Evidence, evidence_of, judge
from edge.lab.report.document import NONE
from edge.lab.report.profile import roofline_table
from edge.lab.report.profile_charts import roofline_chart
from edge.values import parse

MODEL = str(GOLDEN / "llama-gqa-tied.gguf")
PLAIN = Evidence(
    model="m.gguf", engine="cpu", threads=2, tok_s=100.0, bytes_per_token=9e7, bytes_per_s=9e9, bandwidth=0.3,
    compute=0.1, rows=512, wanted_rows=512, bits=4.5,
)  # fmt: skip
HOT = {"sustained": 0.7, "celsius": 79.0, "trip": 80.0, "allowed": 0.6, "cooled": 0.7, "watts": 5.0}


def commands(**found: Any) -> list[str]:
    return [command for _, command in judge(replace(PLAIN, **found)).advice]


# What limits a device


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        ({"bandwidth": 0.85}, "memory bandwidth"),
        ({"compute": 0.8}, "compute"),
        ({"compute": 0.8, "bandwidth": 0.9}, "memory bandwidth"),
        (HOT, "heat"),
        ({"sustained": 0.7, "others": 0.5, "sustained_others": 0.5}, "other programs"),
        ({"sustained": 0.7, "sustained_others": 0.5}, "overhead"),
        ({"sustained": 0.7, "others": 0.5}, "heat"),  # while other figures were taken
        ({"rows": 256}, "memory budget"),
        ({"streamed": True, **HOT}, "streaming"),
        ({"waited": 0.5}, "overhead"),
        ({"unsteady": 3.0}, "other programs"),
        ({"bandwidth": 0.61, "others": 0.89}, "other programs"),
        ({"bandwidth": None, "compute": None, "bytes_per_s": None}, "unknown"),
        ({}, "overhead"),
        # odd ones
        ({"engine": "reference", "bandwidth": 0.9}, "overhead"),
        ({"engine": "llamacpp", "bandwidth": 0.9}, "memory bandwidth"),
        ({"sustained": 0.7, "celsius": 45.0, "trip": 95.0}, "overhead"),  # a cool device is slow for other reasons
        ({"bandwidth": 2.1, "waited": 0.5}, "overhead"),  # a tiny model, in caches
        ({"bandwidth": None, "compute": None, "waited": 0.5}, "overhead"),  # no ceilings, but another sign
    ],
)
def test_limit_follows_from_measurements(found: dict[str, Any], limit: str) -> None:
    assert judge(replace(PLAIN, **found)).limit == limit


def test_advice_follows_from_the_limit() -> None:
    assert any("--power 4W" in each for each in commands(**HOT))
    assert any("--max-temp 75C" in each for each in commands(**HOT))
    assert any("--memory 300MiB" in each for each in commands(rows=256, needed=300 * MIB))
    assert any("edge quantize m.gguf" in each for each in commands(bandwidth=0.9, bits=8.5))
    assert not any("quantize" in each for each in commands(bandwidth=0.9, bits=4.5))
    assert any("--kv-dtype int8" in each for each in commands(bandwidth=0.9, kv_share=0.5, kv_dtypes=("f16", "int8")))
    assert not any("int8" in each for each in commands(bandwidth=0.9, kv_share=0.5, kv_dtypes=("f16",)))
    assert any("--backend onnx" in each for each in commands(faster=("onnx", 1.5)))
    assert not any("--backend onnx" in each for each in commands(faster=("onnx", 1.02)))
    assert any("edge tune" in each for each in commands(tuned=False))
    assert any("quantize" in each for each in commands(streamed=True, bits=8.5))
    assert commands(engine="reference")[0] == "edge profile m.gguf"
    assert "edge devices probe" in commands(bandwidth=None, compute=None, bytes_per_s=None)


def test_evidence_is_of_first_engine() -> None:
    windows = [Window(0, 4, spread(0.002), 0.1, 50, 2e9, None), Window(12, 8, spread(0.002), 0.1, 79, 1e9, 0.4)]
    quick = make_engine("onnx", decode=replace(make_engine().decode, per_token=spread(0.001)))
    profile = make_profile(
        engines=[make_engine(sustained=Sustained(12, windows)), quick], roofs=Roofs(2e10, 1e11, None, 2)
    )
    found = evidence_of(profile)
    assert (found.bandwidth, found.compute) == (pytest.approx(0.8), pytest.approx(0.45))
    assert (found.sustained, found.cooled) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (found.celsius, found.trip, found.allowed) == (54, 80, 1.0)
    assert found.faster == ("onnx", pytest.approx(2.5))
    assert (found.others, found.sustained_others) == (0.02, 0.4)
    assert found.waited == pytest.approx(0.1)
    assert found.watts == 17.6
    assert found.kv_share == pytest.approx(20 * MIB / 1024 * 536 / (1.6e10 * 0.0025))
    row, rest = 20 * MIB / 1024, 1.6e10 * 0.0025 - 20 * MIB / 1024 * 536
    assert (found.longest, found.longest_kv_share) == (512, pytest.approx(row * 536 / (rest + row * 536)))
    assert judge(found).limit == "heat"
    assert judge(evidence_of(make_bare_profile())).limit == "unknown"


def test_engine_on_gpu_is_measured_against_gpu() -> None:
    engines, gpu = [make_engine("gpu", on_gpu=True), make_engine()], GPUCeiling("Adreno 750", "opencl", 3.2e10)
    profile = make_profile(engines=engines, roofs=Roofs(2e10, 1e11, None, 2, gpu))
    table = roofline_table(profile)
    assert [row[3] for row in table.rows if row[1] == "answer"] == ["50%", "80%"]
    assert table.rows[0][5] == NONE  # its arithmetic is unknown
    assert "Adreno 750 reads 32 GB/s (measured)" in table.notes[-1]
    assert evidence_of(profile).bandwidth == pytest.approx(0.5)
    assert parse(Profile, asdict(profile)) == profile
    chart = roofline_chart(profile)
    assert "Adreno 750" in chart.figure()
    unknown = make_profile(engines=engines, roofs=Roofs(2e10, 1e11, None, 2))
    assert evidence_of(unknown).bandwidth is None
    assert [row[3] for row in roofline_table(unknown).rows if row[1] == "answer"] == [NONE, "80%"]


def test_int8_against_float32_says_so() -> None:
    table = roofline_table(make_profile(engines=[make_engine(integers=0.9)], roofs=Roofs(2e10, 1e11, None, 2)))
    assert all(row[5].endswith("% of float32") for row in table.rows)
    assert table.remarks[0].startswith("cpu may exceed the ceiling of float32")


# What the memory was for


@given(
    anonymous=st.integers(0, 1 << 30), file=st.integers(0, 1 << 30), shared=st.integers(0, 1 << 20),
    rows=st.integers(0, 2000),
    base=st.tuples(*[st.integers(0, 1 << 28)] * 4), flags=st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_memory_parts_sum_to_resident(
    anonymous: int, file: int, shared: int, rows: int, base: tuple[int, ...], flags: tuple[bool, bool]
) -> None:
    made = MemoryBase(base[0], base[1], *flags, base[2], base[3], capacity=1000)
    sample = MemorySample(1.0, anonymous + file + shared, anonymous, file, rows)
    parts = asdict(split(sample, made))
    assert sum(parts.values()) == sample.rss
    assert min(parts.values()) >= 0
    assert parts["kv"] <= base[3]


def test_memory_is_sampled_between_marks() -> None:
    with Sampler() as sampler:
        before, held = sampler.sample_memory().rss, b"1" * (64 * MIB)
        end = time.monotonic() + 30
        while sampler.samples[-1].rss < before + len(held) // 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert sampler.samples[-1].rss >= before + len(held) // 2


# Clock and load


def test_cpu_time_of_other_processes(tmp_path: Path) -> None:
    assert read_load(tmp_path) is None
    write(tmp_path, "proc/stat", "cpu  100 0 100 700 50 0 0 50 0 0\ncpu0 1 2 3\n")
    load = read_load(tmp_path)
    assert load.busy == pytest.approx(0.25 * load.total)
    assert share_of_others(Load(10, 100), Load(16, 110), 2.0) == pytest.approx(0.4)
    assert share_of_others(Load(10, 100), Load(11, 110), 5.0) == 0
    assert share_of_others(None, Load(11, 110), 5.0) is None
    assert share_of_others(Load(10, 100), Load(10, 100), 0.0) is None
    write(tmp_path, "proc/stat", "cpu  x\n")
    assert read_load(tmp_path) is None


# A real run


def settings(**changes: Any) -> Settings:
    small = Settings(16, 4, [8, 32], 1, 3.0, 5.0, 0.0, 1.0, threads=1, kv_dtype=None)
    return replace(small, **changes)


def quick(*more: str) -> tuple[str, ...]:
    return ("profile", MODEL, "--quick", "-p", "16", "-n", "4", "-d", "8,32", "--threads", "1", *more)


def test_golden_model_is_profiled(tmp_path: Path) -> None:
    html, markdown, kept = (tmp_path / f"a.{each}" for each in ("html", "md", "json"))
    flags = ("--backend", "cpu,reference", "-o", str(html), "-o", str(markdown), "-o", str(kept), "--json")
    done = edge(*quick(*flags), EDGE_SENSORS=str(tmp_path))  # which has none
    assert done.returncode == 0, done.stderr
    profile = read_profile(kept)
    assert profile == parse(Profile, json.loads(done.stdout))
    assert [each.engine for each in profile.engines] == ["cpu", "reference"]
    for engine in profile.engines:
        assert [each.context for each in engine.curve] == [8, 32]
        assert engine.timeline.peak >= max(each.rss for each in engine.timeline.samples) * 0.99
        assert engine.decode.per_token.count == 8
        assert engine.energy.kind == "estimate"
        assert engine.decode.watts is not None
    native = profile.engines[0]
    assert {each.name for each in native.operators} == {"prefill", "decode"}
    assert sum(each.share for each in native.operators[1].operators) == pytest.approx(1)
    assert profile.roofs is not None
    assert profile.verdict.sentence in html.read_text().replace("&#x27;", "'")
    for text in (html.read_text(), markdown.read_text()):
        assert "estimated" in text
    assert list(tmp_path.glob(".*")) == []
    done = edge("profile", "compare", str(kept), str(kept), "--json")
    assert all(each["ratio"] in (None, 1) for each in json.loads(done.stdout)["rows"])


def test_memory_budget_leaves_contexts_out() -> None:
    job = Job("measure", MODEL, "reference", settings(max_kv_size=24, prompt=30, contexts=[8, 16, 64]))
    profile = run_in_child(job, lambda what, share: None)
    assert [each["context"] for each in profile["curve"]] == [8, 16]
    assert profile["curve_end"] == "the cache has 24 rows"
    assert profile["prefill"]["tokens"] == 20
    assert profile["notes"] == ["prompts of 20 instead of 30 tokens, the cache has 24 rows"]

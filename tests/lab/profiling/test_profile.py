"""`edge profile`: what is measured, how it is kept, and what is concluded from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from profiles import MIB, make_bare_profile, make_engine, make_plan, make_profile, spread
from test_cli import edge_here as edge
from test_devices import write

from edge.devices.load import Load, read_load, share_of_others
from edge.devices.memory.mappings import Mapped, mapped_files
from edge.devices.thermal import read_hertz
from edge.lab.profiling.child import Job, run_in_child
from edge.lab.profiling.measure import part_of
from edge.lab.profiling.memory import Sampler, memory_base, split
from edge.lab.profiling.profile import GPUCeiling, MemoryBase, MemorySample, Profile, Roofs, Settings, read_profile
from edge.lab.profiling.sustained import Sustained, Window
from edge.lab.profiling.verdict import Evidence, evidence_of, judge
from edge.lab.report.document import NONE
from edge.lab.report.profile import roofline_table
from edge.lab.report.profile_charts import roofline_chart
from edge.plan.plan import PlanBytes
from edge.values import parse

MODEL = str(GOLDEN / "llama-gqa-tied.gguf")
PATIENCE = 120  # seconds, of a loaded machine
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
        ({"bandwidth": 2.1}, "memory bandwidth"),
        ({"compute": 0.8}, "compute"),
        ({"compute": 0.8, "bandwidth": 0.9}, "memory bandwidth"),
        (HOT, "heat"),
        ({"sustained": 0.7}, "heat"),
        ({"sustained": 0.7, "others": 0.5, "sustained_others": 0.5}, "other programs"),
        ({"sustained": 0.7, "sustained_others": 0.5}, "overhead"),
        ({"sustained": 0.7, "others": 0.5}, "heat"),  # while other figures were taken
        ({"sustained": 0.7, "cooled": 0.7, "others": 0.5, "sustained_others": 0.5}, "heat"),
        ({"sustained": 0.97, "bandwidth": 0.85}, "memory bandwidth"),
        ({"celsius": 79.0, "trip": 80.0}, "overhead"),
        ({"rows": 256}, "memory budget"),
        ({"streamed": True, **HOT}, "streaming"),
        ({"waited": 0.5}, "overhead"),
        ({"others": 0.5, "waited": 0.5}, "other programs"),
        ({"unsteady": 3.0}, "other programs"),
        ({"bandwidth": 0.85, "others": 0.5}, "memory bandwidth"),
        ({"bandwidth": None, "compute": None, "bytes_per_s": None}, "unknown"),
        ({}, "overhead"),
        # odd ones
        ({"engine": "reference", "bandwidth": 0.9}, "overhead"),
        ({"engine": "llamacpp", "bandwidth": 0.9}, "memory bandwidth"),
        ({"sustained": 0.7, "celsius": 45.0, "trip": 95.0}, "overhead"),  # a cool device is slow for other reasons
        ({"sustained": 0.7, "celsius": 45.0, "trip": 95.0, "cooled": 0.6}, "heat"),
        ({"bandwidth": 2.1, "waited": 0.5}, "overhead"),  # a tiny model, in caches
        ({"bandwidth": 0.001, "compute": 0.001, "bytes_per_token": 1e4}, "overhead"),
        ({"bandwidth": None, "compute": None, "waited": 0.5}, "overhead"),  # no ceilings, but another sign
        ({"bandwidth": None, "compute": None, "streamed": True}, "streaming"),
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


PAGES = {  # MiB of anonymous memory before and after the first passes, as on real devices
    "huge pages": (34.5, 137.1, True, (92.1, 95.6, 10.1), 560, True),
    "copied weights": (34.4, 367.2, False, (126.0, 191.2, 48.3), 560, True),
    "row by row": (34.5, 34.5 + 12.3 + 10.0, True, (92.1, 95.6, 10.1), 560, False),
    "row by row, copied": (34.5, 34.5 + 126 + 25, False, (126.0, 191.2, 20.0), 560, False),
}


@pytest.mark.parametrize("name", PAGES)
def test_cache_counts_whole_where_memory_grew(name: str) -> None:
    before, after, mapped, (weights, kv, scratch), rows, whole = PAGES[name]
    config = replace(make_plan().config, capacity=4352)
    counted = PlanBytes(60 * MIB, int(weights * MIB), int(kv * MIB), int(scratch * MIB))
    plan = make_plan(config=config, bytes=counted)
    size = int(weights * MIB) if mapped else MIB
    files = {"/bin/python": Mapped(30 * MIB, 20 * MIB, True), "/tmp/weights": Mapped(size, size, False)}
    first, warm = (
        MemorySample(1.0, int(each * MIB) + 20 * MIB + size, int(each * MIB), 20 * MIB + size, used)
        for each, used in ((before, 0), (after, rows))
    )
    base = memory_base(plan, first, warm, {}, files)
    assert base.kv_at_once == whole
    parts = split(warm, base)
    assert parts.kv == pytest.approx((kv if whole else kv * rows / 4352) * MIB, rel=0.01)
    assert parts.scratch <= 1.6 * scratch * MIB


def test_memory_is_sampled_between_marks() -> None:
    with Sampler() as sampler:
        before, held = sampler.sample_memory().rss, b"1" * (64 * MIB)
        end = time.monotonic() + 30
        while sampler.samples[-1].rss < before + len(held) // 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert sampler.samples[-1].rss >= before + len(held) // 2


def test_mapped_files_are_read_from_kernel(tmp_path: Path) -> None:
    text = """\
55d0c0000000-55d0c0001000 r-xp 00000000 fe:00 123  /usr/bin/python
Size:                  4 kB
Rss:                   4 kB
55d0c0001000-55d0c0003000 r--p 00001000 fe:00 123  /usr/bin/python
Size:                  8 kB
Rss:                   4 kB
7f0000000000-7f0000100000 r--s 00000000 fe:00 9  /tmp/a name with spaces.gguf
Size:               1024 kB
Rss:                 512 kB
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
Size:               1024 kB
Rss:                1024 kB
7f0000300000-7f0000400000 rw-p 00000000 00:00 0  [heap]
Rss:                1024 kB
"""
    write(tmp_path, "proc/self/smaps", text)
    found = mapped_files(tmp_path)
    assert set(found) == {"/usr/bin/python", "/tmp/a name with spaces.gguf"}
    python, weights = found["/usr/bin/python"], found["/tmp/a name with spaces.gguf"]
    assert (python.size, python.resident, python.code) == (12 << 10, 8 << 10, True)
    assert (weights.size, weights.resident, weights.code) == (1 << 20, 512 << 10, False)
    assert mapped_files(tmp_path / "none") == {}


# Clock and load


def test_clock_matches_fastest_core(tmp_path: Path) -> None:
    assert read_hertz(tmp_path) is None
    write(tmp_path, "proc/cpuinfo", "processor: 0\ncpu MHz\t\t: 2596.122\n")
    assert read_hertz(tmp_path) == pytest.approx(2.596122e9)
    for core, clock in enumerate((1_800_000, 2_400_000)):
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", f"{clock}\n")
    write(tmp_path, "sys/devices/system/cpu/cpu2/cpufreq/scaling_cur_freq", "broken\n")
    assert read_hertz(tmp_path) == pytest.approx(2.4e9)


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
    done = edge(*quick("--backend", "cpu,reference", "-o", str(html), "-o", str(markdown), "-o", str(kept), "--json"))
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


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=5), st.data())
def test_progress_never_falls_between_parts(seconds: list[float], data: st.DataObject) -> None:
    seen: list[float] = []
    for number in range(len(seconds)):
        shares = sorted(data.draw(st.lists(st.floats(0, 1), max_size=4)))
        for share in (0, *shares, 1):
            part_of(lambda what, share: seen.append(share), seconds, number)("", share)
    assert seen == pytest.approx(sorted(seen))
    assert (seen[0], seen[-1]) == (0, pytest.approx(1))


def measuring(parent: int) -> list[psutil.Process]:
    """The processes that measure for another one, and theirs."""
    found = []
    for child in psutil.Process(parent).children():
        with suppress(psutil.NoSuchProcess):  # zombies of earlier tests, and what ends just now
            if "edge.lab.profiling.child" in " ".join(child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def test_interrupted_profile_leaves_no_files(tmp_path: Path) -> None:
    kept = tmp_path / "a.json"
    parent = subprocess.Popen(
        [sys.executable, "-m", "edge", *quick("--backend", "reference", "-r", "1000", "-o", str(kept))],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "EDGE_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    try:
        children = wait_for(lambda: measuring(parent.pid))  # by then it hears signals
        time.sleep(0.5)
        children += measuring(parent.pid)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(PATIENCE) == 143
        with parent.stderr as said:
            assert b"nothing was written" in said.read()
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: all(map(is_gone, children)))
    assert not kept.exists()
    assert not [each for each in tmp_path.iterdir() if each.is_file()]


def is_gone(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == "zombie"
    return True


def wait_for(happened: Any) -> Any:
    """Wait until `happened()` is true, and return its value."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := happened():
            return found
        time.sleep(0.05)
    raise AssertionError("it never happened")


def test_bad_input_raises_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.html").mkdir()
    for arguments, said in (
        ((MODEL, "-o", "a.pdf"), "what kind of report"), ((MODEL, "-d", "1,x"), "-d takes numbers"),
        ((MODEL, "-o", "/nowhere/a.md"), "/nowhere is not there: make that folder first"),
        ((MODEL, "-o", "b" * 251 + ".json"), "cannot be written"), ((MODEL, "-p", "100000"), "positions"),
        ((MODEL, "-o", str(tmp_path / "a.html")), "is a folder: name a file"),
        ((MODEL, "-p", "64", "--max-kv-size", "32"), "this needs 80 KV rows"),
        ((MODEL, "--sustained", "0s"), "greater than zero"), ((MODEL, "--sustained", "1s"), "too short"),
        ((MODEL, "--backend", "cpu", "--kv-dtype", "q8_0"), "cpu has no KV dtype 'q8_0'"),
        (("compare", "/dev/zero", "/dev/zero"), "it is no regular file"), (("compare", MODEL, MODEL), "no JSON"),
        ((MODEL, "--backend", "cpu,none"), "unknown backend 'none'"), ((), "no MODEL: give one"),
    ):  # fmt: skip
        done = edge("profile", *arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1

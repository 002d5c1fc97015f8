"""Predictions: against devices whose answers are known, and by histories whose law is known."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, open_golden
from hypothesis import given
from hypothesis import strategies as st
from test_cli import edge_json
from typer.testing import CliRunner

from edge.backends import backend_names, engine_named
from edge.backends.base import EngineConfig
from edge.backends.counts import Footprint
from edge.cli.commands import app
from edge.devices.memory import beyond
from edge.devices.profiles.profile import Cluster, DeviceProfile, Figure
from edge.formats.blocks import nbytes
from edge.lab.prediction.crowd import Crowd, left_by
from edge.lab.prediction.efficiency import efficiency_of, weight_shares
from edge.lab.prediction.predict import Wanted, predict
from edge.lab.prediction.work import work_of
from edge.model.cores import Attention
from edge.model.model import open_model
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec
from edge.plan.device import RUNTIME_BYTES
from edge.plan.plan import Plan, PlanBytes
from edge.run.history import Phase, Run, Setting

GOLDEN_SPEC = open_golden("llama-gqa-tied").model.spec
SPEC = replace(GOLDEN_SPEC, network=None, window=0, layer_values=GOLDEN_SPEC.kv_values)
CONFIG = EngineConfig(capacity=4096, chunk=128, kv_dtype="f16", threads=4)
BYTES = PlanBytes(interpreter=0, weights=100_000_000, kv=4096 * 20_000, scratch=0)
PLAN = Plan("cpu", "streaming", 4, CONFIG, 256, BYTES, 0, 1 << 30, "budget")
SETTING = Setting("cpu", "m", "cpu", "f16", 4)


def device(name: str = "x", **values: float) -> DeviceProfile:
    figures = {each: Figure(value, "measured", "test") for each, value in values.items()}
    return DeviceProfile(name, "x", "x86_64", clusters=(Cluster("core", 4, "test"),), figures=figures)


KNOWN = device(read_bandwidth=10e9, f32_flops=50e9, core_watts=2.0, idle_watts=1.0, dram_pj_per_byte=100.0)


def test_decoding_follows_roofline() -> None:
    reach = efficiency_of("cpu")
    reading = reach.rows_of("f16").reading
    weights = reach.together(weight_shares(SPEC, "cpu", CONFIG), lambda each: each.reading)
    found = predict(SPEC, PLAN, KNOWN, Wanted(contexts=(0, 1000)))
    empty, full = found.decode
    # Bytes of weights and of one row at an empty cache, and of 1,000 more rows.
    expected = 100e6 / (10e9 * weights) + 20_000 / (10e9 * reading) + reach.step_s
    assert 1 / empty.tok_s.value == pytest.approx(expected)
    assert 1 / full.tok_s.value == pytest.approx(expected + 1000 * 20_000 / (10e9 * reading))
    assert empty.tok_s.source == "estimated from the profile of x"


@pytest.mark.parametrize("int8_ops", [None, 3e6])
def test_prompts_follow_arithmetic_where_it_takes_longer(int8_ops: float | None) -> None:
    reach = efficiency_of("cpu")
    slow = device(read_bandwidth=1e15, f32_flops=1e6, **({"int8_ops": int8_ops} if int8_ops else {}))
    found = predict(SPEC, PLAN, slow, Wanted(prompt=128))
    footprint = Footprint(BYTES.weights, BYTES.kv, 0, 0)
    work = work_of(SPEC, CONFIG, footprint, 128, 0)
    integers, floats = (reach.weights[each].rate(1e6, int8_ops) for each in ("integers", "floats"))
    shares = weight_shares(SPEC, "cpu", CONFIG)
    inverse = shares.get("integers", 0) / integers + shares.get("floats", 0) / floats
    linear = (work.flops - work.attention_flops) * inverse
    attention = work.attention_flops / (1e6 * reach.rows_of("f16").float32)
    assert found.ttft_s.value == pytest.approx(linear + attention, rel=1e-3)
    kind = reach.weights["integers"]
    assert integers == pytest.approx(3e6 * (kind.int8 or 0) if int8_ops else 1e6 * kind.float32)


def test_joules_are_counted_as_estimate_counts_them() -> None:
    found = predict(SPEC, PLAN, KNOWN, Wanted(contexts=(0,), power=4.5))
    [point] = found.decode
    read = SPEC.weight_bytes + 20_000
    assert point.joules.value == pytest.approx((4 * 2.0 + 1.0) / point.tok_s.value + read * 100e-12)
    assert point.joules.source == "estimated from the profile of x"
    assert found.watts.value == pytest.approx(point.joules.value * point.tok_s.value)
    share = (4.5 - 1.0) / (found.watts.value - 1.0)
    assert found.limited_tok_s.value == pytest.approx(point.tok_s.value * share)


@given(energy=st.floats(0.01, 5000), prompt=st.integers(1, 6000), time=st.floats(0.01, 500))
def test_predicted_tokens_spend_the_budget(energy: float, prompt: int, time: float) -> None:
    found = predict(SPEC, PLAN, KNOWN, Wanted(prompt, (0, 4096), energy=energy, time=time))
    first, last = found.decode

    def between(one: float, other: float, context: float) -> float:
        return one + (other - one) * min(context, 4096) / 4096

    for bought, budget, ends in (
        (found.energy_tokens, energy - found.prompt_joules.value, (first.joules.value, last.joules.value)),
        (found.time_tokens, time - found.ttft_s.value, (1 / first.tok_s.value, 1 / last.tok_s.value)),
    ):
        costs = [between(*ends, prompt + each) for each in range(int(bought.value))]
        assert sum(costs) <= max(0.0, budget) * 1.001
        assert sum(costs) + 3 * between(*ends, prompt + bought.value) > budget * 0.999


def test_unknown_figures_are_left_out() -> None:
    nothing = predict(SPEC, PLAN, device(), Wanted(energy=30, power=3, time=20))
    predicted = {name: value for name, value in asdict(nothing).items() if value not in (None, ())}
    assert set(predicted) == {"device", "prompt", "unknown"}
    assert "how fast x reads memory is unknown" in nothing.unknown[0]
    only_memory = predict(SPEC, PLAN, device(read_bandwidth=1e10), Wanted(energy=30))
    assert only_memory.decode
    assert only_memory.prefill_tok_s is None
    assert only_memory.energy_tokens is None
    assert "multiplies is unknown" in only_memory.unknown[0]
    assert "core_watts of x is unknown" in only_memory.unknown[1]
    assert "edge devices probe" in predict(SPEC, PLAN, device("host"), Wanted()).unknown[0]
    streams = predict(SPEC, PLAN, KNOWN, Wanted(energy=30, time=20), streaming_s=None)
    assert not streams.decode
    assert streams.ttft_s is streams.energy_tokens is streams.time_tokens is None
    assert "weights are read anew" in streams.unknown[0]


# What a pass asks of a device, counted in another way

FEW_ROWS = EngineConfig(capacity=64, chunk=64, kv_dtype="f16", threads=1)
NEED = Footprint(weights=10_000, kv=6_400, scratch=0, runtime=0)


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
    work = work_of(spec, FEW_ROWS, NEED, tokens, context)
    attention = 4 * spec.heads * spec.head_dim * pairs(windows, tokens, context)
    assert work.flops == pytest.approx(2 * (spec.parameters - head) * tokens + 2 * head + attention)
    rows = sum(min(context + tokens, window or 1 << 40) for window in windows) / len(windows)
    assert work.kv_bytes == pytest.approx(100 * rows)
    assert work.weight_bytes == NEED.weights


def test_layers_with_windows_read_their_windows() -> None:
    """Two of three layers have a ring, of 30 rows of 10 bytes each; the rows of the other are 6,400 bytes."""
    spec = with_windows((16, 0, 16))
    need = replace(NEED, kv=6_400 + 600, fixed_kv=600)
    assert work_of(spec, FEW_ROWS, need, 1, 39).kv_bytes == pytest.approx(100 * (40 + 16 + 16))
    assert work_of(spec, FEW_ROWS, need, 1, 9).kv_bytes == pytest.approx(100 * 3 * 10)


def test_embeddings_of_layers_are_looked_up_too(tmp_path: Path) -> None:
    """Gemma 4 E2B: 4.63B parameters, of which 2.3B are "effective"."""
    spec = read_spec(outline_model(known_models()["gemma4:e2b"], "Q4_0", tmp_path / "outline.gguf"))
    assert spec.parameters - spec.table_parameters == pytest.approx(2.3e9, rel=0.02)
    need = Footprint(weights=spec.weight_bytes, kv=6_400, scratch=0, runtime=0)
    read = work_of(spec, FEW_ROWS, need, 1, 0)
    assert read.weight_bytes == spec.weight_bytes - nbytes("Q6_K", 262_144 * 35 * 256)
    assert read.flops == pytest.approx(2 * 2.3e9, rel=0.02)


def test_neighbours_leave_cores_or_a_share_of_time() -> None:
    def left(neighbours: float, cores: int = 2, **kind: bool) -> tuple[float, ...]:
        kind = {"steps": True, "gives_way": True} | kind
        return tuple(left_by(Crowd(neighbours, cores), 2, lambda team: {1: 4.0, 2: 5.0}[team], **kind))

    assert left(0) == left(1, 4) == (1, 1)
    assert left(1) == left(1, steps=False) == (0.8, 0.5)
    assert left(0.5) == pytest.approx((0.9, 0.75))  # one, half of the time
    assert left(2) == pytest.approx((0.8 * 2 / 3, 1 / 3))  # one thread among three
    assert left(2, steps=False) == (0.5, 0.5)  # two among four
    assert left(1, gives_way=False) == pytest.approx((2 / 3, 2 / 3))


def test_tables_cost_a_token_nothing_wherever_they_lie() -> None:
    """Gemma 4's, of which a token reads a row: in the file, not among the plan's weights, or in memory."""
    spec = open_model(GOLDEN / "gemma4.gguf").spec
    places = {"weights": 10**8, "on_disk": spec.table_bytes}, {"weights": 10**8 + spec.table_bytes}
    plans = [replace(PLAN, bytes=replace(BYTES, **each)) for each in places]
    in_file, in_memory = (predict(spec, each, KNOWN, Wanted(contexts=(0,))).decode[0].tok_s.value for each in plans)
    assert in_file == pytest.approx(in_memory, rel=1e-9)


# By earlier runs


def earlier(points: list[tuple[float, float]], joules: float | None = None) -> list[Run]:
    """Runs of 100 tokens: context and seconds per token of each."""
    return [
        Run(0, SETTING, "m", "full", 4096, None, Phase(100, 100 * token_s, context, joules and 100 * joules * token_s),
            "counter", "rapl")
        for context, token_s in points
    ]  # fmt: skip


@pytest.mark.parametrize("known", [True, False])
def test_load_now_scales_quiet_runs(known: bool) -> None:
    host = device("host", read_bandwidth=10e9, f32_flops=50e9) if known else device("host")
    runs, crowd = earlier([(100, 0.03)], 5.0), Crowd(8, 4)
    busy = [replace(run, busy=True, decode=Phase(9, 9.0, 100)) for run in runs]
    wanted = Wanted(contexts=(100,), time=60.0)
    quiet, loaded = (predict(SPEC, PLAN, host, wanted, runs + busy, meter="rapl", crowd=each) for each in (None, crowd))
    before, now = quiet.decode[0], loaded.decode[0]
    assert before.tok_s.value == pytest.approx(1 / 0.03)
    assert now.tok_s.value < before.tok_s.value * 4 / 9 + 1e-9  # of one thread, at most
    assert now.tok_s.source == "estimated for the load measured now, from speeds measured earlier (1 run)"
    assert now.joules.value < before.joules.value * 4  # one thread draws less
    assert "other programs want the 4 cores with 8.0 threads now (measured)" in loaded.basis
    alone = predict(SPEC, PLAN, host, wanted, busy, meter="rapl", crowd=crowd).decode[0].tok_s
    assert alone.value == pytest.approx(1)
    assert alone.source == "measured beside other programs earlier (1 run)"


@given(seed=st.integers(0, 1000))
def test_history_fit_survives_noise(seed: int) -> None:
    chance = random.Random(seed)
    contexts = [64, 500, 1000, 1500, 2000, 2500, 3000, 64, 2000, 3000, 1000]
    points = [(c, (0.005 + 2e-6 * c) * chance.uniform(0.97, 1.03)) for c in contexts]
    points[2] = (points[2][0], points[2][1] * 5)  # a neighbour
    found = predict(SPEC, PLAN, device("host", read_bandwidth=10e9), Wanted(contexts=(0, 3000)), earlier(points))
    assert [1 / each.tok_s.value for each in found.decode] == pytest.approx([0.005, 0.011], rel=0.15)
    assert found.decode[0].tok_s.source == "measured earlier (11 runs)"


def test_every_engine_has_its_efficiency() -> None:
    for name in backend_names():
        reached, slower = efficiency_of(name), efficiency_of(name, "generic")
        for kind, weights in reached.weights.items():
            assert 0 < weights.reading <= 1
            assert 0 < (weights.int8 or 1) <= 1
            assert (slower.weights[kind].rate(1e9, None) < weights.rate(1e9, None)) == (kind == "integers")
            assert slower.weights[kind].int8 == weights.int8
        assert all(0 < rows.reading <= 1 for rows in reached.rows.values())


# The command

run = CliRunner()
MODEL = str(GOLDEN / "llama-gqa-tied.gguf")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_DEVICES", str(tmp_path / "devices"))
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "no-sensors").mkdir()
    monkeypatch.setenv("EDGE_SENSORS", str(tmp_path / "no-sensors"))


def plan(*flags: str) -> Any:
    done = run.invoke(app, ["plan", MODEL, "--json", *flags])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_planning_for_another_device() -> None:
    found = plan("--device", "raspberry-pi-5", "--energy", "30J", "--power", "5W", "--time", "20s")
    assert (found["limit"], found["limit_source"]) == (2 << 30, "raspberry-pi-5")
    assert (found["backend"], found["config"]["threads"], found["tuned"]) == ("cpu", 4, "default")
    predicted = found["prediction"]
    assert predicted["device"] == "raspberry-pi-5"
    assert all(predicted[name] for name in ("prefill_tok_s", "ttft_s", "watts", "energy_tokens", "time_tokens"))
    assert predicted["unknown"] == []
    shown = run.invoke(app, ["plan", MODEL, "--device", "raspberry-pi-5", "--energy", "30J", "--power", "1W"]).output
    for said in (
        "planned for raspberry-pi-5 with 2.0 GiB, by its profile", "30 J buy", "cannot be: it draws more",
        "estimated from the profile of raspberry-pi-5", "GB/s (measured", "a token at ",
    ):  # fmt: skip
        assert said in shown


def test_stated_memory_replaces_profiles() -> None:
    """In a process of its own: a plan counts the process that makes it, and this one holds other tests' engines."""
    found = edge_json("plan", MODEL, "--device", "raspberry-pi-zero-2w", "--memory", "300MiB", "--json")
    assert (found["limit"], found["limit_source"]) == (300 << 20, "budget")


@pytest.mark.parametrize(("device", "flags"), [
    ("pixel-9", []), ("pixel-9", ["--backend", "llamacpp"]), ("galaxy-s24", ["--provider", "qnn"]),
])  # fmt: skip
def test_phone_has_no_interpreter(monkeypatch: pytest.MonkeyPatch, device: str, flags: list[str]) -> None:
    """Beside an engine's own libraries, an app takes what the C runtime was measured to take, and its tables. What this
    process holds beyond a run is no part of it."""
    monkeypatch.setattr(beyond, "_taken", [1 << 20])
    engine = engine_named(plan("--device", device, *flags)["backend"])
    found = plan("--device", device, *flags)["bytes"]["interpreter"]
    exported = engine.NAME == "cpu" and not flags
    config = EngineConfig(**plan("--device", device, *flags)["config"])
    libraries = 0 if exported else engine.footprint(open_model(MODEL).spec, config).runtime
    assert RUNTIME_BYTES <= found - libraries < RUNTIME_BYTES + (1 << 20)
    shown = run.invoke(app, ["plan", MODEL, "--device", device, *flags]).output
    assert "interpreter" not in shown
    assert "| library " in shown


@pytest.mark.usefixtures("never_held")
def test_host_is_predicted_once_it_is_known(tmp_path: Path) -> None:
    flags = ["--backend", "reference", "--max-kv-size", "64", "--threads", "1"]
    assert "edge devices probe" in plan(*flags)["prediction"]["unknown"][0]
    probed = run.invoke(app, ["devices", "probe", "--seconds", "0.1"])
    assert probed.exit_code == 0
    estimated = plan(*flags)["prediction"]["decode"][0]
    assert estimated["tok_s"]["source"] == "estimated from measured ceilings"
    assert estimated["joules"]["source"].startswith("estimated from the profile of generic-")
    done = run.invoke(app, ["run", MODEL, "-p", "x y z", "-n", "20", "--raw", "--ignore-eos", *flags])
    assert done.exit_code == 0, done.output
    assert plan(*flags)["prediction"]["decode"][0]["tok_s"]["source"] == "measured earlier (1 run)"

"""Where a device throttles, the end of a kit's long run ranks settings: in its profile, plans and comparisons."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits import GOLDEN_MODEL, result_text
from profiles import make_engine, make_profile, make_sustained
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.devices.profiles import add_profile
from edge.devices.profiles.file import read_profile
from edge.devices.profiles.profile import DeviceProfile, Speed
from edge.lab.prediction.forecast import forecast
from edge.lab.prediction.predict import Prediction
from edge.lab.prediction.sustained import kept_by
from edge.lab.profiling.kit.device import device_of, with_earlier
from edge.lab.profiling.kit.result import parse_result
from edge.lab.profiling.verdict import evidence_of
from edge.lab.report.document import terminal
from edge.lab.report.profile import profile_report

FULL = 100  # tokens in a second, at first
WATTS = 5.0


def result_with(speeds: list[float], *, length: float = 60.0) -> bytes:
    """A kit's result whose long run had these shares of the speed at first, and of its watts half of what is lost."""
    data = json.loads(result_text())
    spread = {"p10": 0.009, "p50": 0.01, "p90": 0.02, "count": 0}
    windows = [
        {
            "start": length * at, "seconds": length, "joules": WATTS * (1 + share) / 2 * length, "cpu_s": length,
            "others": 0.01, "celsius": 70.0, "hertz": 2e9 * share,
            "per_token": spread | {"count": round(FULL * share * length)},
        }
        for at, share in enumerate(speeds)
    ]  # fmt: skip
    data |= {"energy": "ina226", "sustained": {"length": length, "windows": windows}}
    return json.dumps(data).encode()


def device_with(text: bytes, name: str = "my-board") -> DeviceProfile:
    return device_of(parse_result(text, "it"), name)


THROTTLES = [1.0, 0.9, 0.7, *[0.6] * 7]
PLAN = ("plan", str(GOLDEN_MODEL), "--device", "my-board", "--max-kv-size", "128", "--at", "16,48")


def add(text: bytes, folder: Path) -> tuple[Any, dict[str, str]]:
    (folder / "result.json").write_bytes(text)
    own = {"EDGE_DEVICES": str(folder / "devices")}
    done = edge("devices", "add", "my-board", str(folder / "result.json"), **own)
    assert done.returncode == 0, done.stderr
    return done, own


def test_throttling_plans_tell_end_of_long_run(tmp_path: Path) -> None:
    done, own = add(result_with(THROTTLES), tmp_path)
    assert "It throttles, so plans and searches rank by the end of long runs (measured):" in done.stdout
    assert "after 10 min 60% of the speed at first, 1.33 × the joules per token" in done.stdout
    (speed,) = read_profile(tmp_path / "devices" / "my-board.toml").speeds
    assert (speed.sustained_s, speed.sustained_speed) == (600, pytest.approx(0.6))
    assert speed.sustained_joules == pytest.approx(0.8 / 0.6)
    assert speed.sustained_source.startswith("a kit of edge ")
    assert "after 10 min 60% of the speed at first" in edge("devices", "show", "my-board", **own).stdout

    found = edge_json(*PLAN, "--json", **own)["prediction"]
    assert found["decode"]
    for each in found["decode"]:
        then = each["sustained"]
        assert then["seconds"] == 600
        assert then["tok_s"]["value"] == pytest.approx(0.6 * each["tok_s"]["value"])
        assert then["tok_s"]["source"] == "measured after 10 min without a pause"
        assert each["tok_s"]["source"] == "speeds measured on this device"
        assert then["joules"]["value"] == pytest.approx(0.8 / 0.6 * each["joules"]["value"])
        assert then["joules"]["source"].startswith("estimated")
    said = edge(*PLAN, **own).stdout
    assert "after 10 min without a pause" in said
    assert "my-board throttles: settings rank by speed and joules after 10 min without a pause" in said


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_DEVICES", str(tmp_path / "devices"))


def predicted(text: bytes) -> Prediction:
    add_profile(device_with(text))
    return forecast(GOLDEN_MODEL, device="my-board", max_kv_size=128, contexts=[16, 48]).prediction


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("speeds", [[], [1.0, 1.01, *[0.95] * 8]])
def test_ranking_is_unchanged_without_throttling(speeds: list[float]) -> None:
    text = result_with(speeds) if speeds else json.dumps(json.loads(result_text()) | {"sustained": None}).encode()
    assert [each.sustained for each in predicted(text).decode] == [None, None]


def test_fewer_threads_keep_more_of_their_speed() -> None:
    """By the power that heat allows: n threads at the clock f draw n · f³."""
    made = device_with(result_with(THROTTLES))
    ran = replace(made.speeds[0], threads=4)

    def kept(threads: int, *runs: Speed) -> float:
        found = kept_by(replace(made, speeds=runs), "other", "f16", threads)
        assert found
        return found.speed

    for threads in (1, 2, 4, 8):
        assert kept(threads, ran) == pytest.approx(min(1.0, (4 * 0.6**3 / threads) ** (1 / 3)))
    cool = replace(ran, threads=2, sustained_speed=0.97)
    assert [kept(threads, ran, cool) for threads in (1, 4)] == [1.0, pytest.approx(0.6)]


def test_profiles_keep_long_runs_that_are_not_repeated() -> None:
    made, again = device_with(result_with(THROTTLES)), device_with(result_with(THROTTLES, length=2.0))
    (kept,) = with_earlier(replace(again, measured_by="a later kit"), made).speeds
    assert kept == made.speeds[0]
    (newer,) = with_earlier(device_with(result_with([1.0] * 10)), made).speeds
    assert newer.sustained_speed == 1.0


def test_engines_rank_by_end_of_their_long_runs() -> None:
    """The first one is faster at first, the second one in the end."""
    hot = make_engine(sustained=make_sustained(0.005))
    steady = make_engine("llamacpp", sustained=make_sustained(0.0025))
    slower = replace(steady, decode=replace(steady.decode, per_token=replace(steady.decode.per_token, p50=0.00275)))
    found = evidence_of(make_profile(engines=[hot, slower]))
    assert found.faster[0] == "llamacpp"
    cool = replace(hot, sustained=make_sustained(0.0025))
    assert evidence_of(make_profile(engines=[cool, slower])).faster is None
    report = profile_report(make_profile(engines=[hot, slower]))
    assert "The device throttles with cpu: the last window ranks, not the speed at first." in terminal(report, 200)
    assert report.figures[-2] == ("answers after 48.2 s", "200 tok/s", "measured; the device throttles: this ranks")
    quiet = profile_report(make_profile(engines=[cool, slower]))
    assert "throttles" not in terminal(quiet, 200)
    assert len(quiet.figures) == len(report.figures) - 2

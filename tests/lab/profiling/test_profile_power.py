"""`edge profile --power`: long runs that pauses hold to a power, at home and in kits."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from kits import kit_for, result, run_program
from profiles import make_engine, make_profile, make_sustained

from edge.devices.profiles import host_power
from edge.lab.profiling.kit.device import device_of
from edge.lab.profiling.kit.result import parse_result, profile_of
from edge.lab.profiling.profile import Profile, read_profile
from edge.lab.profiling.sustained import Sustained
from edge.lab.profiling.verdict import evidence_of
from edge.lab.report.page import render
from edge.lab.report.profile import profile_report

POWER = host_power()
LOW = POWER.idle_watts + 0.1 * POWER.core_watts  # less than a tenth of the work of one core


def check_held(run: Sustained | None, watts: float) -> None:
    """By joules of the whole run; what may be spent at once, or in a token of a loaded machine, is a part of it."""
    seconds, paused = (sum(getattr(each, name) for each in run.windows) for name in ("seconds", "paused"))
    joules = sum(each.joules_per_token * each.per_token.count for each in run.windows if each.joules_per_token)
    assert 0 < paused < seconds
    assert joules < watts * (seconds + 1.5)


@pytest.mark.exhaustive
def test_kit_holds_its_long_run_to_power() -> None:
    """By the estimate, where nothing measures joules; the estimates of C and of Python agree."""
    done = run_program(kit_for(sustained=2.0, watts=LOW), EDGE_SENSORS="/nowhere")
    assert done.returncode == 0, done.stderr
    found = profile_of(parse_result(done.stdout, "it"))
    assert found.settings.watts == LOW
    check_held(found.engines[0].sustained, LOW)
    assert device_of(parse_result(done.stdout, "it"), "mine").speeds[0].sustained_speed is None
    page = render(".html", profile_report(found), found.to_dict())
    assert f"held to {LOW:g} W by pauses" in page
    assert "watts (estimated)" in page
    assert all(each.paused == 0 for each in result().sustained.windows)


def held_profile() -> Profile:
    """Of a run with pauses in half of its last window."""
    windows = [replace(each, paused=each.seconds / 2 if each.start > 47 else 0.0) for each in make_sustained().windows]
    run = replace(make_sustained(), windows=[*windows[:-1], replace(windows[-1], seconds=2 * windows[-1].seconds)])
    run = replace(run, windows=[*windows[:-1], replace(run.last, paused=run.last.seconds / 2)])
    profile = make_profile(engines=[make_engine(sustained=run)])
    return replace(profile, settings=replace(profile.settings, watts=5.0))


def test_pauses_are_no_heat(tmp_path: Path) -> None:
    """The speed is that of all the time, of which the verdict knows what was no work."""
    found = held_profile()
    run = found.engines[0].sustained
    assert (run.ratio, run.unpaused_ratio) == (pytest.approx(0.5), pytest.approx(1.0))
    assert evidence_of(found, "").sustained == pytest.approx(1.0)
    assert run.last.watts == pytest.approx(0.044 * run.last.tok_s)
    text = render(".md", profile_report(found), {})
    assert "held to 5 W by pauses, which count" in text
    assert "50%, 100 ms" in text
    (tmp_path / "a.json").write_text(render(".json", profile_report(found), found.to_dict()))
    assert read_profile(tmp_path / "a.json") == found
    assert asdict(found)["settings"]["watts"] == 5.0

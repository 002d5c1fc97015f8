"""Google Play's thresholds in `edge plan`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import GOLDEN
from typer.testing import CliRunner

from edge.cli.commands import app
from edge.devices.profiles import find_profile
from edge.devices.profiles.profile import Figure
from edge.lab.prediction.forecast import forecast
from edge.plan.play import play_use, thresholds

MODEL = str(GOLDEN / "llama-gqa-tied.gguf")
GIB = 1 << 30


@pytest.mark.parametrize(("has", "tier"), [(2.0, 4), (5.5, 6), (7.4, 8), (11.2, 12), (12.0, 12), (24.0, 16)])
def test_phones_have_thresholds_of_nearest_memory(has: float, tier: int) -> None:
    """The kernel keeps a part of the memory that is advertised."""
    phone, plan = find_profile("pixel-9"), forecast(MODEL, device="pixel-9").plan
    phone = replace(phone, figures=phone.figures | {"memory": Figure(round(has * GIB), "measured", "test")})
    found = play_use(plan, phone)
    assert found.memory == tier * GIB


def test_mapped_weights_are_not_counted() -> None:
    found = forecast(MODEL, device="pixel-9")
    assert found.play.mapped == found.plan.bytes.weights > 0
    assert found.play.counted + found.play.mapped == found.plan.predicted_peak
    copied = replace(found.plan, config=replace(found.plan.config, repack=True))
    counted = play_use(copied, find_profile("pixel-9"))
    assert (counted.counted, counted.mapped) == (found.plan.predicted_peak, 0)


@pytest.mark.parametrize("device", ["host", "iphone-16", "raspberry-pi-5"])
def test_devices_without_google_play(device: str) -> None:
    assert forecast(MODEL, device=device).play is None
    assert "Google Play" not in CliRunner().invoke(app, ["plan", MODEL, "--device", device]).output


def test_plan_shows_play_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(app, ["plan", MODEL, "--device", "pixel-9"]).output
    assert "| Google Play, phones of 12 GB" in shown
    assert thresholds().source in shown
    assert "too much" not in shown
    data = json.loads(CliRunner().invoke(app, ["plan", MODEL, "--device", "pixel-9", "--json"]).output)
    assert data["play"]["counted"] + data["play"]["mapped"] == data["predicted_peak"]
    assert data["play"]["foreground"] == 3.25 * GIB
    known = thresholds()
    small = [replace(each, background=1) for each in known.tiers]
    monkeypatch.setattr("edge.plan.play.thresholds", lambda: replace(known, tiers=small))
    shown = CliRunner().invoke(app, ["plan", MODEL, "--device", "pixel-9"]).output
    assert [" too much |" in line for line in shown.splitlines() if line.startswith("| in ")] == [False, True]

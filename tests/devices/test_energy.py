"""Joules and watts as budgets of real runs, on a fake energy counter that this process drives, and on none."""

from __future__ import annotations

import random
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, open_golden
from test_cli import edge, edge_here, json_here
from test_power import Cards, rapl_tree

from edge.backends.reference import ReferenceEngine
from edge.budget import parse_joules, parse_seconds
from edge.devices.power import app_meter, find_meter, nvml
from edge.devices.power.base import Reading
from edge.devices.power.guarded import Guarded
from edge.errors import BudgetError
from edge.lab.report.run import report_line, report_lines
from edge.run.budgets import meters
from edge.run.budgets.governor import RunLimits
from edge.run.budgets.shares import EnergyLedger, whole_of
from edge.run.starting.loading import load


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took long, on a loaded machine, would delay the next ones."""
    monkeypatch.setattr(meters, "_COST", 0.0)


class Driven:
    """A meter over a fake RAPL tree, whose counter goes up by about `per_token` joules for every token that is run."""

    def __init__(self, root: Path, per_token: float, seed: int) -> None:
        self._root, self._per_token, self._random = root, per_token, random.Random(seed)
        self._microjoules = 0
        self.tokens: list[float] = []
        self.meter: Guarded = find_meter(rapl_tree(root, 0))
        self.meter._clock = lambda: 0.0  # or a slow compilation would look as if the counter were stuck

    def add_bytes(self, count: float) -> None:
        """Sessions call this at every forward pass."""
        joules = self._per_token * self._random.uniform(0.4, 1.6)
        self.tokens.append(joules)
        self._microjoules += round(joules * 1e6)
        rapl_tree(self._root, self._microjoules)

    def spend(self, joules: float) -> None:
        self._microjoules += round(joules * 1e6)
        rapl_tree(self._root, self._microjoules)

    def read(self) -> Reading:
        return self.meter.read()


def answer(driven: Driven, limits: dict[str, float | None], step: int = 1, **spent: float) -> str | None:
    """To a prompt of 60 tokens, of which step run at once."""
    golden = open_golden("llama-one-layer")
    with load(golden.model, max_kv_size=80, prefill_step_size=step, meter=driven, **limits) as session:
        session.generate(np.resize(golden.tokens, 60), max_tokens=1, ignore_eos=True, raw=True, **spent)
        return session.report.text


START = 0.4  # joules that are spent before


@pytest.mark.parametrize("share", [0.2, 0.6, 0.97])
def test_advised_energy_suffices(tmp_path: Path, share: float) -> None:
    """The prompt takes about 1.2 J."""
    with pytest.raises(BudgetError, match="of it by the start: state") as caught:
        answer(Driven(tmp_path / "first", 0.02, 0), {"energy": START + share}, energy_spent=START)
    advised = re.search(r"state ([\d.]+ m?J) or more \(estimated\)$", str(caught.value))
    assert advised
    enough = {"energy": parse_joules(advised[1].replace(" ", ""))}
    assert answer(Driven(tmp_path / "next", 0.02, 0), enough, energy_spent=START) is not None


@pytest.mark.parametrize(
    ("spare", "rough"),
    [
        (-0.2, r"state about 6\d0 mJ and what the prompt's 60 tokens take$"),
        (0.011, r"J suffice, and less may \(estimated.*most\)$"),
    ],
)
def test_advised_energy_suffices_where_little_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: float, rough: str
) -> None:
    """By an earlier run, of which the history tells, though a token alone costs as much as a chunk; without any, the
    advice is called a rough one."""

    class Idling(Driven):
        def read(self) -> Reading:
            self.spend(1e-4)
            return super().read()

    def run(joules: float | None, name: str) -> str | None:
        return answer(Idling(tmp_path / name, 0.02, 1), {"energy": joules}, step=32, energy_spent=START)

    monkeypatch.setenv("EDGE_HISTORY", str(tmp_path / "history"))
    with pytest.raises(BudgetError, match=rough):
        run(START + spare, "first")
    assert run(None, "second") is not None
    with pytest.raises(BudgetError, match=r"state [\d.]+ m?J or more \(estimated\)$") as caught:
        run(START + spare, "third")
    advised = parse_joules(re.sub(r".*state ([\d.]+) (m?J) or more.*", r"\1\2", str(caught.value)))
    assert advised < 1.2
    assert run(advised, "next") is not None


@pytest.mark.parametrize("share", [0.2, 0.97])
def test_advised_time_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The same on a clock that moves when tokens run: the start takes 2 s, the prompt about 6."""
    start, now = 2.0, [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert meters.Watch.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(meters.Watch.__init__.__kwdefaults__, "clock", time.perf_counter)

    def run(seconds: float, name: str) -> str | None:
        driven, chance = Driven(tmp_path / name, 0.02, 1), random.Random(f"1 {name}")
        monkeypatch.setattr(driven, "add_bytes", lambda _: now.__setitem__(0, now[0] + 0.1 * chance.uniform(0.4, 1.6)))
        return answer(driven, {"time": seconds}, time_spent=start)

    with pytest.raises(BudgetError, match="of it by the start: state") as caught:
        run(start + 6 * share, "first")
    advised = re.search(r"state ([\d.]+ ?m?s) or more \(estimated\)$", str(caught.value))
    assert advised, caught.value
    assert run(parse_seconds(advised[1].replace(" ", "")), "next") is not None


def test_power_matches_all_models_and_joules_match_one() -> None:
    now, joules = 100.0, 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    ledger = EnergyLedger(app_meter(lambda: joules), lambda: now)
    one, two = ledger.share(), ledger.share()
    watch = meters.Watch(RunLimits(power=5.0), one, whole=whole_of(one), clock=lambda: now, sleep=sleep)
    for share, spent in ((two, 4.0), (one, 2.0)):
        ledger.run([share])
        now, joules = now + 0.1, joules + spent
        share.read()
    ledger.run(())
    watch.pay()
    assert joules / (now - 100.0) <= 5.0 * 1.01
    assert watch.joules() == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(3))
def test_energy_stops_within_token(tmp_path: Path, seed: int) -> None:
    golden, driven = open_golden("llama-one-layer"), Driven(tmp_path, 0.02, seed)
    with load(golden.model, max_kv_size=48, prefill_step_size=1, energy="2J", meter=driven, speculate="off") as session:
        session.generate(golden.tokens[:8], max_tokens=None, ignore_eos=True, raw=True)
        report = session.report
    assert report.stop_reason == "energy"
    energy = report.energy
    assert (energy.kind, energy.scope, energy.source, energy.budget) == ("counter", "package", "RAPL", 2.0)
    assert 2.0 - 3 * max(driven.tokens) < energy.joules <= 2.0 + max(driven.tokens)
    assert energy.joules == pytest.approx(sum(driven.tokens), rel=1e-3)
    assert energy.joules == pytest.approx((energy.prefill or 0) + (energy.decode or 0))
    assert 20 < report.tokens.generated < 200


@pytest.mark.usefixtures("readings")
def test_energy_ends_prompt(tmp_path: Path) -> None:
    golden, driven = open_golden("llama-one-layer"), Driven(tmp_path, 0.5, 1)
    with load(golden.model, max_kv_size=48, prefill_step_size=1, energy="2J", meter=driven) as session:
        with pytest.raises(
            BudgetError, match=r"^stopped in the prompt \(\d+ of 40 tokens\): no answer; --energy 2 J is"
        ):
            session.generate(golden.tokens[:40], raw=True)
        report = session.report
    assert (report.stop_reason, report.tokens.generated) == ("energy", 0)
    tokens = report.tokens
    assert (tokens.prompt, tokens.ran) == (40, len(driven.tokens)) == (40, report.kv.rows)
    assert 0 < tokens.ran < 40
    assert (
        f"prompt 40 tokens, only {tokens.ran} run, at {report.timings.prefill_tok_s:.0f} tok/s"
        in report_lines(report)[0]
    )
    assert (report.energy.prefill, report.energy.decode) == (report.energy.joules, None)
    assert report.energy.joules <= 2.0 + max(driven.tokens)


@pytest.mark.usefixtures("readings")
def test_power_is_held_by_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves in pauses, and by a millisecond when a token runs: a loaded machine needs no pauses."""
    golden, driven, now = open_golden("llama-one-layer"), Driven(tmp_path, 0.2, 1), [100.0]
    run = driven.add_bytes

    def move(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(driven, "add_bytes", lambda count: (run(count), move(1e-3)))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert meters.Watch.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(meters.Watch.__init__.__kwdefaults__, "clock", time.perf_counter)
    monkeypatch.setitem(meters.Watch.__init__.__kwdefaults__, "sleep", move)
    with load(golden.model, max_kv_size=48, power="4W", meter=driven, speculate="off") as session:
        session.generate(golden.tokens[:8], max_tokens=30, ignore_eos=True, raw=True)
        report = session.report
    assert report.stop_reason == "length"
    assert report.timings.paused_s > 0.2
    assert report.timings.decode_tok_s < 30 / (sum(driven.tokens[1:]) / 4 - 1)  # a second's credit and more


def test_generations_have_their_own_accounts(tmp_path: Path) -> None:
    golden, driven = open_golden("llama-one-layer"), Driven(tmp_path, 0.02, 1)
    with load(golden.model, max_kv_size=48, energy="2J", meter=driven) as session:
        spent = []
        for _ in range(3):
            session.generate(golden.tokens[:8], max_tokens=10, ignore_eos=True, raw=True)
            spent.append(session.report.energy.joules)
        assert sum(spent) == pytest.approx(sum(driven.tokens), rel=1e-3)
        session.generate(golden.tokens[:8], max_tokens=2, ignore_eos=True, raw=True, energy_spent=0.5)
        assert " + 500 mJ for the start, of 2 J (measured)" in report_line(session.report)[0]


def test_refused_limits_raise_one_line(tmp_path: Path) -> None:
    for arguments, said in (
        (("--energy", "lots"), "energy 'lots' is not understood: write it like 30J"),
        (("--energy", "0J"), "must be greater than zero"),
        (("--power", "3J"), "power '3J' is not understood: write it like 3W"),
        (("--max-temp", "70F"), "max-temp '70F' is not understood: write it like 70C"),
        (("--max-temp", "70C"), "--max-temp cannot be kept: this device shows no temperature"),
    ):
        model, sensors = str(GOLDEN / "llama-one-layer.gguf"), str(tmp_path)
        done = edge_here("run", model, "-p", "Hello", *arguments, EDGE_SENSORS=sensors)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("tight", "reason"), [
    ({}, "length"), pytest.param({"--time": "2s", "-n": "1000000"}, "time", marks=pytest.mark.exhaustive),
    ({"--energy": "1mJ"}, "energy"),
    pytest.param({"--max-temp": "40C", "-n": "1000"}, "thermal", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_ending_budget_is_named(tmp_path: Path, tight: dict[str, str], reason: str) -> None:
    zone = tmp_path / "sys" / "class" / "thermal" / "thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("x86_pkg_temp")
    (zone / "temp").write_text("60000")
    budgets = {"--memory": "1GiB", "--time": "90s", "--energy": "1000J", "--power": "500W", "--max-temp": "90C"}
    budgets |= {"-n": "4"} | tight
    model = str(GOLDEN / "llama-gqa-tied.gguf")
    flags = [part for pair in budgets.items() for part in pair]
    done = edge("run", model, "-p", "Hi", "--raw", "--ignore-eos", "--backend", "reference", "-v", *flags,
                EDGE_SENSORS=str(tmp_path))  # fmt: skip
    # On a loaded machine the start alone may take the two seconds.
    assert done.returncode in {"--energy": (3,), "--time": (0, 3)}.get(next(iter(tight), ""), (0,)), done.stderr
    assert f"stopped: {reason}" in done.stderr
    shown = {"--time": " of 90 s", "--energy": " of 1000 J", "--max-temp": " °C of 90 °C", "--memory": " of 1.0 GiB"}
    shown |= {"--power": " W of 500 W"}
    tightened = {"--time": " of 2 s", "--energy": " of 1 mJ", "--max-temp": " °C of 40 °C"}
    for budget, said in shown.items():
        assert (tightened[budget] if budget in tight else said) in done.stderr


def test_sensors_are_listed_of_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, command in (
        (tmp_path / "file", ("devices", "sensors")),
        (tmp_path / "nowhere", ("run", "smollm2-135m", "-p", "Hello", "--energy", "3J")),
    ):
        done = edge_here(*command, EDGE_SENSORS=str(path))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "EDGE_SENSORS must name a folder" in done.stderr
    (tmp_path / "file").unlink()
    assert "| estimate | yes" in edge_here("devices", "sensors", EDGE_SENSORS=str(tmp_path)).stdout
    found = json_here("devices", "sensors", "--json", EDGE_SENSORS=str(rapl_tree(tmp_path, 1)))
    assert {each["name"] for each in found["energy"] if each["available"]} == {"rapl", "estimate"}


def test_run_on_card_reports_its_joules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Cards())
    monkeypatch.setenv("EDGE_SENSORS", str(rapl_tree(tmp_path, 0)))
    monkeypatch.setattr(ReferenceEngine, "capabilities", replace(ReferenceEngine.capabilities, gpu=True))
    for card, source in ((nvml.Card("Tesla T4"), "NVML"), (nvml.Card("Radeon"), "RAPL"), (None, "RAPL")):
        monkeypatch.setattr(ReferenceEngine, "card", card, raising=False)
        with load(GOLDEN / "llama-gqa-tied.gguf", backend="reference") as session:
            session.generate("a", max_tokens=2)
            assert session.report.energy.source == source

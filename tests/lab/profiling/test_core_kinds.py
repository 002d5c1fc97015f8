"""Ceilings of each kind of cores, at home, in kits and in the devices made of their results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from core_trees import hybrid_cores
from kits import kit_for, result, run_program
from profiles import make_profile

from edge.devices.cores import fast_cores
from edge.devices.profiles.file import read_profile, write_profile
from edge.lab.profiling.collect import measure_roofs
from edge.lab.profiling.kit.device import device_of
from edge.lab.profiling.kit.result import Kind, parse_result, profile_of
from edge.lab.report.page import render
from edge.lab.report.profile import profile_report

BIG = Kind(1, 1024, 3_300_000, "0x412fd820", "", 2e10, 5e10, 4e11)
LITTLE = Kind(4, 150, 2_000_000, "0x412fd800", "", 6e9, 1e10, 8e10)


@pytest.mark.exhaustive
def test_kit_and_edge_measure_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little = hybrid_cores(tmp_path)
    names = [("performance cores", 1), ("efficient cores", little)][: 2 if little else 0]
    kit = parse_result(run_program(kit_for(), EDGE_SENSORS=str(tmp_path)).stdout, "it")
    monkeypatch.setenv("EDGE_SENSORS", str(tmp_path))
    home = measure_roofs(1, 0.5, lambda what, share: None, on_gpu=False)
    roofs = profile_of(kit).roofs
    for kinds in (home.kinds, roofs.kinds):
        assert [(each.name, each.cores) for each in kinds] == names
        assert all(min(each.read_bytes_per_s, each.f32_flops) > 1e7 for each in kinds)


def test_kinds_are_shown_and_kept(tmp_path: Path) -> None:
    ceilings = replace(result().ceilings, kinds=[BIG, LITTLE])
    found = replace(result(), machine="aarch64", isa="i8mm", fastest_cores=1, ceilings=ceilings)
    device = device_of(found, "mine")
    write_profile(device, tmp_path / "mine.toml")
    kept = read_profile(tmp_path / "mine.toml")
    assert kept == device
    big, little = kept.clusters
    assert (big.kind, big.cores, big.ghz, big.capacity, big.read_bandwidth) == ("Cortex-X4", 1, 3.3, 1024, 2e10)
    assert (little.kind, little.cores, little.f32_flops, little.int8_ops) == ("Cortex-A520", 4, 1e10, 8e10)
    assert kept.threads == fast_cores([(1024, 3300), *[(150, 2000)] * 4]) == 1
    roofs = profile_of(found).roofs
    text = render(".md", profile_report(make_profile(roofs=roofs)), {})
    row = next(line for line in text.splitlines() if "Cortex-A520" in line)
    assert [each.strip() for each in row.strip("|").split("|")] == [
        "Cortex-A520", "4", "2.00 GHz", "6 GB/s", "10 GFLOP/s", "80 Gop/s",
    ]  # fmt: skip
    unknown = replace(ceilings, kinds=[replace(BIG, capacity=0, kilohertz=0), replace(LITTLE, capacity=0, kilohertz=0)])
    assert len(device_of(replace(found, ceilings=unknown), "mine").clusters) == 1

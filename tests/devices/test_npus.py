"""NPUs that the system shows, on fake trees, and what the commands say of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN
from test_devices import tree
from typer.testing import CliRunner

from edge.cli.commands import app
from edge.devices.profiles import describe_host, find_profile, host_npus
from edge.devices.profiles.file import read_profile, to_toml
from edge.devices.profiles.npus import board, seen_npus
from edge.lab.inspection import inspect_model

run = CliRunner()
linux = pytest.mark.skipif(sys.platform != "linux", reason="the nodes are Linux's")


ACCELERATOR = "DRIVER={}\nPCI_CLASS=118000\nPCI_ID=1022:17F0\n"


@linux
@pytest.mark.parametrize(("driver", "name"), [
    ("amdxdna", "AMD XDNA"), ("intel_vpu", "Intel NPU"), ("rocket", "Rockchip NPU"), ("new", "unknown accelerator"),
])  # fmt: skip
def test_accelerators_are_told_by_their_drivers(tmp_path: Path, driver: str, name: str) -> None:
    root = tree(tmp_path, sys__class__accel__accel0__device__uevent=ACCELERATOR.format(driver), dev__accel__accel0="")
    (seen,) = seen_npus(root)
    assert (str(seen.npu), seen.place, seen.driver, seen.allowed) == (name, "/dev/accel/accel0", driver, True)
    assert seen.npu.provider is None


@linux
@pytest.mark.parametrize(("chip", "numbers"), [
    ("qcom,sm8650", (57, "75")), ("qcom,sm8750", (69, "79")), ("qcom,x1e80100", (60, "73")),
    ("qcom,sc8280xp", (None, None)),
])  # fmt: skip
def test_board_tells_chip(tmp_path: Path, chip: str, numbers: tuple[int | None, str | None]) -> None:
    names = {"proc__device-tree__compatible": f"maker,board\0{chip}\0", "proc__device-tree__model": "A Board\0"}
    (seen,) = host_npus(tree(tmp_path, **{"dev__fastrpc-cdsp": "", "dev__fastrpc-adsp": ""}, **names))
    assert (seen.npu.vendor, seen.npu.provider, seen.place) == ("Qualcomm", "qnn", "/dev/fastrpc-cdsp")
    assert (seen.npu.soc, seen.npu.arch) == numbers
    assert board(tmp_path) == "A Board"


@linux
def test_command_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"dev__fastrpc-cdsp-secure": "", "sys__class__accel__accel0__device__uevent": "DRIVER=amdxdna\nodd\n"}
    names = {"proc__device-tree__compatible": "qcom,sm8650\0", "proc__device-tree__model": "A\x1b[31m\nBoard\0"}
    monkeypatch.setenv("EDGE_SENSORS", str(tree(tmp_path, **nodes, **names)))
    shown = " ".join(run.invoke(app, ["devices"]).output.split())
    assert "Qualcomm Hexagon v75 | fastrpc | /dev/fastrpc-cdsp-secure | --provider qnn |" in shown
    assert "AMD XDNA | amdxdna | /dev/accel/accel0 | none: edge knows no compiler for NPUs of AMD" in shown
    assert "\x1b" not in shown
    found = json.loads(run.invoke(app, ["devices", "--json"]).output)
    assert [each["npu"]["soc"] for each in found["npus"]] == [None, 57]
    assert {"cpu", "cpu-static"} <= set(found["providers"])
    of_chip = " ".join(run.invoke(app, ["devices", "show", "galaxy-s24"]).output.split())
    assert "Qualcomm Hexagon v75, chip 57: --provider qnn" in of_chip
    monkeypatch.setenv("EDGE_SENSORS", str(tree(tmp_path / "none")))
    assert "no NPU was found" in run.invoke(app, ["devices"]).output


@linux
def test_profile_of_this_device_has_its_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = host_npus(tree(tmp_path, **{"dev__fastrpc-cdsp": "", "proc__device-tree__compatible": "qcom,sm8750\0"}))
    monkeypatch.setattr("edge.devices.profiles.host_npus", lambda: seen)
    host = describe_host()
    (tmp_path / "host.toml").write_text(to_toml(host))
    assert host.npu.soc == 69
    assert host.value("npu_read_bandwidth") == find_profile("galaxy-s25").value("npu_read_bandwidth")
    assert host.value("bus_bandwidth") is None
    phone = host_npus(tree(tmp_path, **{"proc__device-tree__compatible": "qcom,sm8650\0"}))
    monkeypatch.setattr("edge.devices.profiles.host_npus", lambda: phone)
    found = describe_host()
    assert found.value("npu_f16_flops") == 12.03e12
    assert found.value("npu_watts") is None  # another device draws something else
    assert read_profile(tmp_path / "host.toml").npu == host.npu


def test_model_is_inspected_for_device() -> None:
    path = GOLDEN / "llama-gqa-tied.gguf"
    assert inspect_model(path).npu is None
    found = inspect_model(path, device="galaxy-s24").npu
    assert found.npu == find_profile("galaxy-s24").npu
    shown = json.loads(run.invoke(app, ["inspect", str(path), "--device", "galaxy-s24", "--json"]).output)
    assert shown["npu"]["reasons"] == list(found.reasons)
    assert shown["npu"]["npu"]["arch"] == "75"


@pytest.mark.parametrize(("device", "said"), [
    ("galaxy-s24", ["Qualcomm Hexagon v75", "yes: 1 context, 105 MiB (estimated)", "Exynos 2400"]),
    ("pixel-9", ["Google Tensor Processing Unit", "no: edge knows no compiler for NPUs of Google"]),
    ("raspberry-pi-5", ["no: its profile names no NPU"]),
])  # fmt: skip
def test_inspect_shows_whether_the_npu_runs_a_model(device: str, said: list[str]) -> None:
    shown = " ".join(run.invoke(app, ["inspect", "smollm2-135m", "--device", device]).output.split())
    assert f"NPU of {device}" in shown
    for each in said:
        assert each in shown

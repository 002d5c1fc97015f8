"""Profiles of devices: those that come with edge, files written elsewhere, and what was measured here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from conftest import GOLDEN
from typer.testing import CliRunner

from edge.cli.commands import app
from edge.cli.targets import isa_names
from edge.devices import integer_products, probe, profiles
from edge.devices.output import check_file, check_writable, write_whole
from edge.devices.power.estimate import Estimate
from edge.devices.probe import Ceilings, best_rate, probe_profile
from edge.devices.profiles import HOST, add_profile, find_profile, host_power, own_folder, profile_names
from edge.devices.profiles.file import read_profile, to_toml, write_profile
from edge.devices.profiles.profile import BUS_SHARE, Cluster, DeviceProfile, Figure, FigureKind, Npu
from edge.errors import InputError

SHIPPED = [name for name in profile_names() if name != HOST]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's own, empty."""
    monkeypatch.setenv("EDGE_DEVICES", str(tmp_path / "devices"))
    return tmp_path / "devices"


# Those that come with edge


CLASSES = {
    "generic-arm64": "memory, decoding, prompts", "generic-x86": "memory, decoding, prompts",
    "web": "decoding, prompts", "windows-x86": "memory, decoding, prompts",
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_every_named_device_has_what_edge_plan_needs(name: str) -> None:
    """Classes of devices lack what differs within the class, and `edge devices list` says so."""
    assert ", ".join(find_profile(name).gaps) == CLASSES.get(name, "")


BOUNDS = {
    "read_bandwidth_one_core": (1e9, 1e11), "bus_bandwidth": (1e9, 2e11), "f32_flops": (1e9, 2e12),
    "core_watts": (0.1, 20), "idle_watts": (0.1, 20), "throttle_celsius": (50, 110), "memory": (1 << 28, 1 << 36),
    "npu_int8_ops": (1e12, 1e14), "npu_int4_ops": (1e12, 1e14), "npu_context": (1 << 30, 1 << 32),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_has_source_and_is_plausible(name: str, tmp_path: Path) -> None:
    profile = find_profile(name)
    for figure, (low, high) in BOUNDS.items():
        assert figure not in profile.figures or low <= profile.figures[figure].value <= high, figure
    write_profile(profile, tmp_path / "x.toml")
    assert read_profile(tmp_path / "x.toml") == profile
    assert profile.sources
    for each in [*profile.figures.values(), *profile.clusters, *([profile.npu] if profile.npu else [])]:
        said_so = each.source == "edge" and isinstance(each, Figure) and each.kind == "assumed" and each.note
        assert each.source.startswith("https://") or said_so
    assert all(figure.kind in get_args(FigureKind) for figure in profile.figures.values())


# What follows from figures


def with_figures(**values: float) -> DeviceProfile:
    figures = {name: Figure(value, "measured", "test") for name, value in values.items()}
    return DeviceProfile("x", "x", "x86_64", figures=figures, clusters=(Cluster("core", 4, "test"),))


@pytest.mark.parametrize(("figures", "threads", "expected", "kind"), [
    ({"read_bandwidth": 40e9, "read_bandwidth_one_core": 15e9}, 1, 15e9, "measured"),
    ({"read_bandwidth": 40e9, "read_bandwidth_one_core": 15e9}, 4, 40e9, "measured"),
    ({"read_bandwidth": 40e9, "bus_bandwidth": 100e9}, 1, 40e9, "measured"),
    ({"read_bandwidth_one_core": 4e9}, 4, 4e9, "measured"),
    ({"read_bandwidth_one_core": 14e9, "bus_bandwidth": 17e9}, 4, 14e9, "measured"),
    ({"read_bandwidth_one_core": 10e9, "bus_bandwidth": 68e9}, 2, 20e9, "measured"),
    ({"read_bandwidth_one_core": 10e9, "bus_bandwidth": 68e9}, 6, 68e9 * BUS_SHARE, "assumed"),
    ({"bus_bandwidth": 100e9}, 8, 100e9 * BUS_SHARE, "assumed"),
])  # fmt: skip
def test_bandwidth_derives_from_known_figures(
    figures: dict[str, float], threads: int, expected: float, kind: str
) -> None:
    bandwidth = with_figures(**figures).bandwidth(threads)
    assert (bandwidth.bytes_per_s, bandwidth.kind) == (pytest.approx(expected), kind)


def test_arithmetic_is_shared_among_cores() -> None:
    profile = with_figures(f32_flops=40e9, int8_ops=200e9)
    assert (profile.flops(1), profile.flops(4), profile.flops(8)) == (10e9, 40e9, 40e9)
    assert (profile.int8_ops(1), profile.int8_ops(4), profile.int8_ops(8)) == (50e9, 200e9, 200e9)
    makers = with_figures(f32_flops=40e9, npu_int8_ops=4e12)
    assert makers.int8_ops(4) is None
    assert replace(makers, figures={"int8_ops": Figure(8e12, "datasheet", "test")}).int8_ops(4) is None
    unknown = DeviceProfile("x", "x", "x86_64")
    assert (unknown.bandwidth(2), unknown.flops(2), unknown.power, unknown.cores, unknown.memory) == (None,) * 5
    assert with_figures(idle_watts=3.0).power is None


# Files


GOOD = to_toml(
    DeviceProfile("my-phone", "mine", "aarch64", figures={"core_watts": Figure(2.5, "measured", "a meter")},
            clusters=(Cluster("A", 4, "a meter"),), npu=Npu("Maker", "NPU", "a book", "qnn", 57, "75"))
)  # fmt: skip


WRONG = [
    ('name = "my-phone"', "", "name is missing"), ('name = "my-phone"', 'name = "../../x"', "name must be letters"),
    ('description = "mine"', 'description = "a\\nb"', "line of text"), ("value = 2.5", "value = -1", "greater than 0"),
    ("value = 2.5", "value = inf", "greater than 0"), ("value = 2.5", "", "figures.core_watts.value is missing"),
    ('kind = "measured"', 'kind = "felt"', "kind must be one of measured, .* not 'felt'"),
    ('source = "a meter"\n\n[figures', "[figures", r"clusters\[0\].source is missing"),
    ("core_watts", "horse_power", "must be one of memory, .* not 'horse_power'"),
    ("cores = 4", "cores = 2.5", "cores must be a whole number from 1 to 4096, not 2.5"),
    ("cores = 4", "cores = 4\nfast = true", "has no 'fast'"), ("[[clusters]]", "[clusters]", "clusters must be a list"),
    ("[figures.core_watts]", "[figures]\ncore_watts = 3\n[other]", "has no 'other'"),
    ("value", "value = = ", "is no TOML"), ('vendor = "Maker"\n', "", "npu.vendor is missing"),
    ("soc = 57", 'soc = "SM8650"', "npu.soc must be a whole number from 1 to 4096, not 'SM8650'"),
]  # fmt: skip


def test_invalid_profiles_raise_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for old, new, said in WRONG:
        assert old in GOOD
        path.write_text(GOOD.replace(old, new, 1))
        with pytest.raises(InputError, match=said) as error:
            read_profile(path)
        assert "\n" not in str(error.value)
    path.write_bytes(b"#" * (1 << 19))
    for unreadable, said in ((path, "too long"), (tmp_path / "absent.toml", "cannot be read")):
        with pytest.raises(InputError, match=said):
            read_profile(unreadable)
    with pytest.raises(InputError, match="cannot be written"):
        write_profile(find_profile("generic-x86"), path / "x.toml")


# This device


def test_probing_keeps_stated_figures(own: Path) -> None:
    watts = Figure(7.0, "measured", "a wall meter")
    add_profile(replace(profiles.describe_host(), figures={"core_watts": watts}))
    parts: list[float] = []
    add_profile(probe_profile(0.1, parts.append))
    host = find_profile(HOST)
    assert host.figures["core_watts"] == watts
    assert (host.value("read_bandwidth") or 0) > 1e6
    assert (parts == sorted(parts), parts[-1]) == (True, 1.0)
    assert list(own.iterdir()) == [own / "host.toml"]


@pytest.mark.parametrize("cores", [1, 4])
def test_probing_takes_its_time_and_is_told_to_its_end(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    times, parts = list[float](), list[float]()

    def measure(threads: int, seconds: float, on_progress: Callable[[float], None]) -> Ceilings:
        times.append(seconds)
        on_progress(1.0)
        return Ceilings(1e9, 1e9, None, threads)

    monkeypatch.setattr(probe, "usable_cores", lambda: cores)
    monkeypatch.setattr(probe, "measure_ceilings", measure)
    probe_profile(3.0, parts.append)
    assert (sum(times), parts[-1]) == (3.0, 1.0)


def test_rates_are_by_the_threads_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that ends after its interval took all of its time."""
    now = [0.0]

    def once() -> float:
        now[0] += 1.0
        return 5.0

    monkeypatch.setattr("edge.devices.probe.time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert best_rate(1, 3.2, lambda: once, lambda part: None) == 5.0


def test_probing_says_why_rate_of_bytes_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.lab.profiling.ceilings.probe_profile", lambda *_: profiles.describe_host())
    monkeypatch.setattr(integer_products, "find_spec", {"onnxruntime": True}.get)
    said = run.invoke(app, ["devices", "probe", "--quiet"]).output
    assert "int8 arithmetic is unknown: onnx is not installed" in said


def test_estimate_goes_by_users_profile_of_this_processor() -> None:
    assert host_power().profile.startswith("generic-")
    mine = {"core_watts": Figure(7.0, "measured", "a meter"), "idle_watts": Figure(2.0, "measured", "a meter")}
    host = replace(profiles.describe_host(), figures=mine)
    add_profile(replace(host, description="another processor"))
    assert host_power().profile.startswith("generic-")
    assert find_profile(HOST).value("core_watts") is None
    add_profile(host)
    power = host_power()
    assert (power.core_watts, power.idle_watts, power.profile) == (7.0, 2.0, HOST)
    assert Estimate(power).source == "host profile"


# The commands

run = CliRunner()


def ask(*arguments: str) -> dict[str, object]:
    done = run.invoke(app, ["devices", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, object] = json.loads(done.output)
    return answer


def test_profile_goes_from_one_device_to_another(tmp_path: Path, own: Path) -> None:
    file = tmp_path / "far.toml"
    ask("probe", "-o", str(file), "--name", "far", "--seconds", "0.1")
    assert not own.exists()
    ask("add", str(file))
    assert "far" in profile_names()
    assert find_profile("far").isa in isa_names(find_profile("far"))  # what edge compile then makes code for
    ratios = ask("diff", "far", "raspberry-pi-5")["figures"]
    assert isinstance(ratios, dict)
    one, other, ratio = ratios["read_bandwidth_one_core"]
    assert ratio == pytest.approx(other / one)
    assert ratios["idle_watts"][0] is ratios["idle_watts"][2] is None
    shown = run.invoke(app, ["devices", "show", "far"]).output
    assert "edge devices probe" in shown
    assert "1.00" in run.invoke(app, ["devices", "diff", "far", "far"]).output


@pytest.mark.parametrize(("arguments", "said"), [
    (["probe", "--name", "x"], "give -o FILE"), (["probe", "--seconds", "1000"], "seconds"),
    (["add", "absent.toml"], "cannot be read"), (["diff", "host", "toaster"], "unknown device 'toaster'"),
    (["show", "../host"], "unknown device"), (["probe", "-o", "."], "is a folder: name a file"),
    (["add", "."], "it is no regular file"),
])  # fmt: skip
def test_bad_input_is_refused(arguments: list[str], said: str) -> None:
    done = run.invoke(app, ["devices", *arguments])
    assert done.exit_code != 0
    assert said in f"{done.exception} {done.output}"


@pytest.mark.parametrize("name", [HOST, "generic-x86"])
def test_profile_is_what_its_file_is_called(own: Path, name: str) -> None:
    own.mkdir()
    write_profile(replace(find_profile("generic-x86"), name=name), own / "mine.toml")
    with pytest.raises(InputError, match=f"says that it is {name}: name the file {name}.toml"):
        find_profile("mine")


def test_file_is_no_folder_of_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_text("x")
    monkeypatch.setenv("EDGE_DEVICES", str(path))
    for ask_it in (profile_names, host_power, lambda: find_profile(HOST)):
        with pytest.raises(InputError, match=r"EDGE_DEVICES: .* cannot be read"):
            ask_it()
    monkeypatch.delenv("EDGE_DEVICES")
    # As the default folder, which the user did not name, it is no error.
    monkeypatch.setattr("edge.devices.profiles.system_folder", lambda kind: str(path))
    assert set(profile_names()) == {HOST, *SHIPPED}
    assert find_profile(HOST).name == HOST


def test_pipes_are_not_replaced(tmp_path: Path) -> None:
    """Such as /dev/null, which root could."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = run.invoke(app, ["devices", "probe", "-o", str(pipe), "--seconds", "0.1"])
    assert "is no file that could be replaced" in str(done.exception)
    for write in (lambda: check_file(pipe, force=True), lambda: write_whole(pipe, "x"), lambda: check_writable(pipe)):
        with pytest.raises(InputError, match="is no file that could be replaced"):
            write()
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize(("changed", "said"), [
    ({"machine": "vax"}, "unknown machine 'vax': choose x86_64, AMD64, aarch64"),
    ({"isa": "zzz"}, "isa 'zzz', which aarch64 has not: choose i8mm, dotprod, neon"),
    ({"isa": "avx2"}, "isa 'avx2', which aarch64 has not"),
    ({"machine": "riscv64"}, "which riscv64 has not: leave isa out"),
    ({"cpu": "nope-cpu"}, "cpu 'nope-cpu', which LLVM does not know: choose a64fx"),
])  # fmt: skip
def test_unknown_processors_are_refused(tmp_path: Path, changed: dict[str, str], said: str) -> None:
    if "cpu" in changed:
        pytest.importorskip("tvm")
    wrong = replace(find_profile("raspberry-pi-5"), name="my-board", **changed)  # type: ignore[arg-type]
    write_profile(wrong, tmp_path / "e.toml")
    done = run.invoke(app, ["devices", "add", str(tmp_path / "e.toml")])
    assert isinstance(done.exception, InputError)
    assert said in str(done.exception)
    assert not own_folder().exists()


def test_no_code_is_made_by_guess_of_isa(tmp_path: Path) -> None:
    add_profile(replace(find_profile("raspberry-pi-5"), name="my-board", isa=None, cpu=None))
    model = str(GOLDEN / "llama-gqa-tied.gguf")
    done = run.invoke(app, ["compile", model, "--device", "my-board", "-o", str(tmp_path / "x")])
    assert "does not say its isa" in str(done.exception)
    listed = run.invoke(app, ["devices", "list"]).output
    assert "nothing: its profile says no isa" in listed
    assert "edge export only: edge compile is for Linux and Android" in listed


def test_damaged_profiles_stop_nothing(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The host's is as if it were not there, and others are left out of the list."""
    own.mkdir()
    for name in (HOST, "mine"):
        (own / f"{name}.toml").write_text(GOOD.replace("my-phone", name).replace("2.5", "-9"))
    assert host_power().profile.startswith("generic-")
    assert find_profile(HOST).cores
    assert [str(own / "host.toml") in each.message and "delete it" in each.message for each in caplog.records] == [True]
    found = ask("list")
    assert {"host", "raspberry-pi-5"} <= {each["name"] for each in found["devices"]}  # type: ignore[attr-defined]
    assert "figures.core_watts.value" in found["damaged"]["mine"]  # type: ignore[index]
    shown = run.invoke(app, ["devices", "list"])
    assert "raspberry-pi-5" in shown.stdout
    assert f"{own / 'mine.toml'}: figures.core_watts.value" in shown.stderr
    ask("probe", "--seconds", "0.1")
    assert find_profile(HOST).value("read_bandwidth")
    assert len(caplog.records) == 1  # said once, and no longer true


def test_profile_hiding_a_shipped_one_warns(tmp_path: Path, own: Path) -> None:
    """And the host's cannot be replaced from outside."""
    mine = replace(find_profile("raspberry-pi-5"), figures={"core_watts": Figure(2.0, "measured", "a meter")})
    write_profile(mine, tmp_path / "e.toml")
    said = run.invoke(app, ["devices", "add", str(tmp_path / "e.toml")]).output
    assert "1 figure," in said
    assert "goes before the raspberry-pi-5 that comes with edge: to have that back, delete this file" in said
    assert "in place of" in run.invoke(app, ["devices", "add", str(tmp_path / "e.toml")]).output
    (own / "raspberry-pi-5.toml").unlink()
    assert find_profile("raspberry-pi-5") != mine
    write_profile(replace(find_profile("generic-x86"), name=HOST), tmp_path / "x.toml")
    done = run.invoke(app, ["devices", "add", str(tmp_path / "x.toml")])
    assert "give it another name" in str(done.exception)
    assert not list(own.iterdir())

"""Kits of `edge profile --on kit:DIR`: the program for another machine, its result, and the profile made of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from conftest import GOLDEN
from kits import GOLDEN_MODEL, QUICK, kit_for, result, result_text, run_program, settings
from profiles import MIB, make_profile
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.backends.tvm.targets import choose_target
from edge.devices.cores import fast_cores
from edge.devices.host import probe_host
from edge.devices.profiles import find_profile
from edge.devices.profiles.file import read_profile as read_device
from edge.devices.profiles.file import write_profile
from edge.devices.profiles.profile import Power
from edge.errors import InputError, UnsupportedError
from edge.lab.profiling.kit.device import device_of
from edge.lab.profiling.kit.machine import profile_of
from edge.lab.profiling.kit.make import DESCRIPTION, PROGRAM, make_kit
from edge.lab.profiling.kit.result import Kind, parse_result
from edge.lab.profiling.kit.result import profile_of as profile_of_result
from edge.lab.profiling.profile import read_profile
from edge.lab.report.document import terminal
from edge.lab.report.page import render
from edge.lab.report.profile import profile_report, profile_summary
from edge.plan.play import play_use
from edge.run.starting.opening import open_model


def test_kit_measures_this_machine() -> None:
    """Against what Python reads of the same machine."""
    found, host = result(), probe_host()
    assert asdict(found.kit) == json.loads((kit_for(sustained=0.5) / DESCRIPTION).read_text())
    assert found.memory == psutil.virtual_memory().total
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.caches == host.caches
    assert found.isa == choose_target().name
    assert (found.prompts, found.tokens) == (3, 24)
    assert found.ttft.count == 3
    assert [each.context for each in found.curve] == [16, 48]
    assert [each.threads for each in found.by_threads] == [1 << i for i in range(8) if 1 << i < found.threads]
    assert found.peak_swap >= 0
    assert 0 < found.peak_anonymous < found.peak < 64 * MIB  # no Python is in it
    counted = play_use(found.kit.plan, find_profile("pixel-9"))
    assert found.peak_anonymous + found.peak_swap < counted.counted  # of which most is never touched
    assert max(each.rows for each in found.samples) >= 48
    assert found.sustained.windows
    assert found.ceilings.read_one_core > 1e8
    assert found.ceilings.f32 > 1e8
    assert found.trim.rows == 48
    assert found.trim.soft.count == found.trim.all.count >= 1
    assert 0 <= found.trim.freed < found.peak_anonymous


def test_result_is_profile_like_any_other(tmp_path: Path) -> None:
    found = profile_of_result(result())
    (tmp_path / "a.json").write_text(json.dumps(found.to_dict()))
    assert read_profile(tmp_path / "a.json") == found
    page = render(".html", profile_report(found), found.to_dict())
    assert "without Python" in page
    assert "RssAnon" in page
    assert "edge_trim took" in page
    assert GOLDEN_MODEL.name in terminal(profile_summary(found), None)
    engine, spec = found.engines[0], open_model(str(GOLDEN_MODEL)).spec
    assert engine.decode.bytes_per_s == pytest.approx(result().kit.decode.bytes / result().token.p50)
    assert engine.prefill.tok_s == pytest.approx(32 / result().ttft.p50)
    assert found.model.weight_bytes == spec.weight_bytes
    assert engine.energy.certainty == ("measured" if result().energy else "estimated")


def test_other_files_are_refused() -> None:
    hopeless = json.loads(result_text())
    hopeless["sustained"]["hopeless"] = True
    for text, said in (
        (b"", "no JSON"), (b'{"kind": "edge kit result", "sch', "cut short: the program did not end"),
        (b'{"kind": "edge profile"}', "no result of a kit"), (b"[1]", "no result of a kit"),
        (b'{"kind": "edge kit result", "schema": 2}', "of schema 2, this edge reads 1"),
        (b'{"kind": "edge kit result", "schema": 1, "kit": {"schema": 1}}', "a damaged result"),
        (json.dumps(hopeless).encode(), r"a damaged result \(a long run that ended"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^r.json: {said}"):
            parse_result(text, "r.json")


def test_failing_kit_names_the_cause(tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    shutil.copytree(kit_for(sustained=0.5), folder)
    (folder / "model.edge").write_bytes(b"")
    done = run_program(folder)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1, b"edge-profile: model.edge is empty: copy it again",
    )  # fmt: skip
    done = subprocess.run([folder / PROGRAM, "--help"], capture_output=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([kit_for(sustained=0.5) / PROGRAM], stdout=subprocess.PIPE, stderr=writer, timeout=240)
    os.close(writer)
    assert done.returncode != 0  # the connection is lost: it does not go on


def arm_cores(root: Path) -> int:
    """The first CPU a Cortex-A76, the others Cortex-A55; returns the number of these."""
    first, *others = sorted(os.sched_getaffinity(0))
    for cpu in (first, *others):
        capacity, kilohertz, midr = (1024, 2400000, "413fd0b1") if cpu == first else (385, 1800000, "412fd050")
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        for name in ("cpufreq", "topology", "regs/identification"):
            (folder / name).mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
        (folder / "cpufreq/cpuinfo_max_freq").write_text(f"{kilohertz}\n")
        (folder / "topology/thread_siblings_list").write_text(f"{cpu}\n")
        (folder / "regs/identification/midr_el1").write_text(f"0x00000000{midr}\n")
    return len(others)


@pytest.mark.exhaustive
def test_arm64_kit_runs_under_qemu(tmp_path: Path) -> None:
    """As if it had a big core and little ones."""
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("no qemu-aarch64-static")
    little = arm_cores(tmp_path)
    done = run_program(kit_for("raspberry-pi-5"), "qemu-aarch64-static", EDGE_SENSORS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = parse_result(done.stdout, "it")
    assert (found.machine, found.isa, found.kit.isas) == ("aarch64", "dotprod", ["dotprod"])
    assert found.ceilings.int8
    assert profile_of_result(found).engines[0].plan.config.threads <= 4
    assert [(each.name, each.cores, each.capacity, each.mhz) for each in found.ceilings.kinds] == [
        ("Cortex-A76", 1, 1024, 2400), ("Cortex-A55", little, 385, 1800),
    ][: 2 if little else 0]  # fmt: skip
    assert all(each.read and each.f32 and each.int8 for each in found.ceilings.kinds)


def answer_of(**changes: str) -> str:
    parts = {
        "uname": "Linux\naarch64", "memory": "MemTotal:  8000000 kB", "board": "Raspberry Pi 5 Model B Rev 1.0",
        "cores": "2400000:0:cpu0:1024\n2400000:1:cpu1:1024", "cpuinfo": "Features : fp asimd asimddp\nCPU part : 0xd0b",
        "end": "",
    } | changes  # fmt: skip
    return "".join(f"--edge-- {name}\n{text}\n" for name, text in parts.items())


def test_answers_of_a_board_become_its_profile() -> None:
    found = profile_of(answer_of(board="Some Board"), "pi.local")
    assert (found.name, found.description, found.isa) == ("pi.local", "Some Board", "dotprod")
    assert (found.cores, found.memory) == (2, 8_000_000 * 1024)
    assert profile_of(answer_of(board="", cpuinfo="Features : fp asimd"), "a_b").name == "target"
    assert profile_of(answer_of(cpuinfo="Features : fp asimd"), "pi").isa == "neon"
    for changes, said in (
        ({"uname": "Darwin\narm64"}, "pi runs Darwin on arm64: kits are for Linux"),
        ({"uname": "Linux\narmv7l"}, "pi runs Linux on armv7l"),
        ({"uname": "Linux\nx86_64", "cpuinfo": "flags : sse2"}, "without AVX2"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            profile_of(answer_of(**changes), "pi")
    with pytest.raises(InputError, match=r"^pi did not answer as a machine with a POSIX shell does$"):
        profile_of("This account is currently not available.\n", "pi")


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({}, "raspberry-pi-5"), ({"board": "Raspberry Pi 500 Rev 1.0"}, "pi"),
        ({"board": "Raspberry Pi Zero 2 W Rev 1.0"}, "raspberry-pi-zero-2w"),
        ({"board": "", "android": "samsung\nSM-S931B"}, "galaxy-s25"),
        ({"board": "", "android": "samsung\nSM-S921B"}, "sm-s921b"),  # with an Exynos
        ({"board": "", "android": "Google\nPixel 9"}, "pixel-9"),
        ({"board": "", "android": "Google\nPixel 9 Pro"}, "pixel-9-pro"),
    ],
)  # fmt: skip
def test_known_boards_have_watts_from_their_profile(parts: dict[str, str], name: str) -> None:
    """Watts above all, which estimates of joules take. What a kit measures comes from the machine."""
    found = profile_of(answer_of(**parts), "pi")
    assert found.name == name
    if not found.figures.keys() - {"memory"}:
        assert name in ("pi", "sm-s921b", "pixel-9-pro")
        return
    known = find_profile(name)
    assert found.power == known.power
    assert found.cpu == (known.cpu if known.isa == "dotprod" else None)
    assert (found.memory, found.cores) == (8_000_000 * 1024, 2)
    assert "bus_bandwidth" not in found.figures
    ran = replace(result(), board=found.description, kit=replace(result().kit, power=known.power or Power()))
    made = device_of(ran, "mine")
    assert made.description == found.description
    assert (made.power, made.value("throttle_celsius")) == (
        replace(known.power, profile="mine") if known.power else None, ran.trip or known.value("throttle_celsius"),
    )  # fmt: skip


def test_command_writes_kits_and_reads_results(tmp_path: Path) -> None:
    folder = tmp_path / "kit"
    done = edge("profile", str(GOLDEN_MODEL), "--on", f"kit:{folder}", *QUICK)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        rf"{folder}: .* MiB, llama .* for host \(\w+\)\n.*edge profile --read result.json\n", done.stdout
    )
    assert "./edge-profile > result.json" in (folder / "README.md").read_text()
    (tmp_path / "result.json").write_bytes(result_text())
    page = tmp_path / "page.html"
    done = edge("profile", "--read", str(tmp_path / "result.json"), "-o", str(page), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["name"] == GOLDEN_MODEL.name
    assert page.read_text().startswith("<!doctype html>")


def test_kit_result_becomes_a_device_for_plans(tmp_path: Path) -> None:
    """Speeds that were measured are predicted as they were; of other models, the ceilings that were measured tell."""
    found = replace(result(), others=0.89)
    (tmp_path / "result.json").write_text(json.dumps(json.loads(result_text()) | {"others": 0.89}))
    own = {"EDGE_DEVICES": str(tmp_path / "devices")}
    done = edge("devices", "add", "my-board", str(tmp_path / "result.json"), **own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("my-board: ")
    assert "Other programs took 89% of the cores' time" in done.stderr
    kept = read_device(tmp_path / "devices" / "my-board.toml")
    assert kept == device_of(found, "my-board")
    assert kept.measured_by == (
        f"a kit of edge {found.kit.versions['edge']}, {found.date[:10]}, while other programs took 89% of the cores"
    )
    assert {each.source for each in kept.figures.values() if each.kind == "measured"} == {kept.measured_by}
    assert kept.value("read_bandwidth") == round(found.ceilings.read)
    shown = edge("devices", "show", "my-board", **own).stdout
    assert kept.measured_by in shown

    where = ["--device", "my-board", "--max-kv-size", "128", "--json"]
    prediction = edge_json("plan", str(GOLDEN_MODEL), *where, "--prompt-tokens", "32", "--at", "16,48", **own)[
        "prediction"
    ]
    assert prediction["prefill_tok_s"]["source"] == "speeds measured on this device"
    assert prediction["prefill_tok_s"]["value"] == pytest.approx(32 / found.ttft.p50)
    seconds = sorted([*(each.decode.p50 for each in found.curve), found.token.p50])
    for each in prediction["decode"]:
        assert each["tok_s"]["source"] == "speeds measured on this device"
        assert 0.1 / seconds[-1] <= each["tok_s"]["value"] <= 10 / seconds[0]  # of some microseconds
    other = edge_json("plan", str(GOLDEN / "gpt2.gguf"), *where, **own)["prediction"]
    for each in (other["prefill_tok_s"], *(point["tok_s"] for point in other["decode"])):
        assert each["source"] == "estimated from speeds of other models measured on this device"
        assert each["error"] is None  # one model does not show how far others are from it
    assert other["basis"][0] == f"ceilings were measured by {kept.measured_by}"


def test_kits_replace_kits_only(tmp_path: Path) -> None:
    model, folder = open_model(str(GOLDEN_MODEL)), tmp_path / "kit"
    shutil.copytree(kit_for(sustained=0.5), folder)
    with pytest.raises(InputError, match="is there already: --force replaces it"):
        make_kit(model, "m", folder, "host", settings())
    (folder / "mine.txt").touch()
    with pytest.raises(InputError, match="holds other files"):
        make_kit(model, "m", folder, "host", settings(), force=True)


def test_kinds_are_shown_and_kept(tmp_path: Path) -> None:
    """Ceilings of each kind of cores."""
    big = Kind(1, 1024, 3_300_000, "0x412fd820", "", 2e10, 5e10, 4e11)
    little = Kind(4, 150, 2_000_000, "0x412fd800", "", 6e9, 1e10, 8e10)
    ceilings = replace(result().ceilings, kinds=[big, little])
    found = replace(result(), machine="aarch64", isa="i8mm", fastest_cores=1, ceilings=ceilings)
    device = device_of(found, "mine")
    write_profile(device, tmp_path / "mine.toml")
    kept = read_device(tmp_path / "mine.toml")
    assert kept == device
    one, other = kept.clusters
    assert (one.kind, one.cores, one.ghz, one.capacity, one.read_bandwidth) == ("Cortex-X4", 1, 3.3, 1024, 2e10)
    assert (other.kind, other.cores, other.f32_flops, other.int8_ops) == ("Cortex-A520", 4, 1e10, 8e10)
    assert kept.threads == fast_cores([(1024, 3300), *[(150, 2000)] * 4]) == 1
    roofs = profile_of_result(found).roofs
    text = render(".md", profile_report(make_profile(roofs=roofs)), {})
    row = next(line for line in text.splitlines() if "Cortex-A520" in line)
    assert [each.strip() for each in row.strip("|").split("|")] == [
        "Cortex-A520", "4", "2.00 GHz", "6 GB/s", "10 GFLOP/s", "80 Gop/s",
    ]  # fmt: skip
    unknown = replace(ceilings, kinds=[replace(each, capacity=0, kilohertz=0) for each in (big, little)])
    assert len(device_of(replace(found, ceilings=unknown), "mine").clusters) == 1

"""`edge profile --on adb` with the real adb, and a device of ours (`adb_device.py`) whose shell is this machine's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from adb_device import Phone
from kits import GOLDEN_MODEL, QUICK, kit_for, write_program
from test_cli import json_here as edge_json

from edge.devices.host import usable_cores
from edge.errors import EngineError, InputError, UnsupportedError
from edge.lab.profiling.kit.adb import Device, find_device
from edge.lab.profiling.kit.remote import ask_machine, run_kit
from edge.lab.profiling.kit.result import parse_result
from edge.lab.profiling.kit.run import check_place

ADB, QEMU, ARM = shutil.which("adb"), shutil.which("qemu-aarch64-static"), shutil.which("aarch64-linux-gnu-gcc")


@dataclass
class Bench:
    """An adb of its own, and the devices that it knows."""

    folder: Path
    phones: list[Phone] = field(default_factory=list)

    def connect(self) -> Phone:
        home = self.folder / f"home{len(self.phones)}"
        home.mkdir()
        self.phones.append(Phone(home))
        subprocess.run(["adb", "connect", self.phones[-1].address], check=True, capture_output=True)
        return self.phones[-1]


def left(phone: Phone) -> list[str]:
    return sorted(os.listdir(phone.home))


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    if ADB is None:
        pytest.skip("no adb: apt-get install adb")
    folder = tmp_path_factory.mktemp("adb")
    own = f"HOME={folder} TMPDIR={folder} ADB_SERVER_SOCKET=localfilesystem:{folder / 'server'}"
    write_program(folder / "bin" / "adb", f'{own} exec {ADB} "$@"')
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    made = Bench(folder)
    yield made
    for phone in made.phones:
        phone.unplug()
    subprocess.run(["adb", "kill-server"], check=True, capture_output=True)


@pytest.mark.exhaustive
@pytest.mark.skipif(QEMU is None or ARM is None, reason="no qemu-aarch64-static and aarch64-linux-gnu-gcc")
def test_phone_measures_itself(bench: Bench) -> None:
    """With the programs of a phone that say what it is, and QEMU for its processor."""
    phone, programs = bench.connect(), bench.folder / "phone"
    phone.before = f"PATH={programs}:$PATH"
    write_program(programs / "uname", 'if [ "$1" = -m ]; then echo aarch64; else echo Linux; fi')
    write_program(
        programs / "getprop",
        'case $1 in *release) echo 16;; *manufacturer) echo Google;; *model) echo "Pixel 9";; esac',
    )
    write_program(
        programs / "cat",
        'case $1 in /proc/cpuinfo) echo "Features : fp asimd asimddp fphp asimdhp";; *) exec /bin/cat "$@";; esac',
    )
    start = f'#!/bin/sh\\nexec {QEMU} ./program "$PWD/model.edge"\\n'
    write_program(
        programs / "tar",
        f"{shutil.which('tar')} \"$@\" && mv edge-profile program && printf '{start}' >edge-profile"
        " && chmod 700 edge-profile",
    )
    found = edge_json("profile", str(GOLDEN_MODEL), "--on", "adb", *QUICK, "--json")
    assert found["device"]["name"] == "Google Pixel 9"
    assert found["device"]["machine"] == "aarch64"
    assert found["device"]["system"].startswith("Android 16, Linux ")
    assert [each["context"] for each in found["engines"][0]["curve"]] == [16, 48]
    assert phone.address not in str(found)  # a serial names one device of all
    assert not left(phone)


@pytest.mark.wing("profiles over adb")
def test_progress_is_shown_and_the_device_cleaned(bench: Bench) -> None:
    phone, steps = bench.connect(), list[str]()
    device = find_device(phone.address)
    assert ask_machine(device).cores >= usable_cores()  # of which a container may grant a part
    found = parse_result(run_kit(device, kit_for(), lambda what, share: steps.append(what)), "it")
    assert found.prompts == 3
    assert steps[0] == "copying the kit"
    assert steps[-1] == "done"
    assert not left(phone)


def test_devices_are_chosen(bench: Bench) -> None:
    with pytest.raises(
        InputError, match=r"^adb knows no device: connect one that allows USB debugging, or adb connect"
    ):
        find_device(None)
    with pytest.raises(InputError, match=r"^adb knows no device R3CN: it knows none$"):
        find_device("R3CN")
    first = bench.connect()
    assert find_device(None) == find_device(first.address) == Device(first.address)
    with pytest.raises(InputError, match=rf"^adb knows no device R3CN: it knows adb:{first.address}$"):
        find_device("R3CN")
    with pytest.raises(InputError, match=r"it knows adb:127[^;]*; adb connect 10\.0\.0\.1:5555 first$"):
        find_device("10.0.0.1:5555")
    other = bench.connect()
    with pytest.raises(InputError) as caught:
        find_device(None)
    several = {f"adb:{first.address}", f"adb:{other.address}"}
    assert set(str(caught.value).partition("--on ")[2].split(" or ")) == several


@pytest.mark.parametrize(("state", "said"), [
    ("unauthorized", "confirm on its screen that this computer may debug it"),
    ("offline", "it is offline: connect it again, or start adb anew with adb kill-server"),
])  # fmt: skip
def test_devices_that_are_not_ready_say_why(
    state: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "bin" / "adb", f"printf 'R3CN\\t{state}\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(EngineError, match=rf"^R3CN: {said}$"):
        find_device("R3CN")


def test_without_adb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnsupportedError, match=r"^there is no adb here: install adb"):
        find_device(None)


@pytest.mark.parametrize("serial", ["", "-s", "a;b", "$(x)"])
def test_invalid_serials_are_refused(serial: str) -> None:
    with pytest.raises(
        InputError, match=r"^--on adb:.* names no device: write adb, or adb: and a serial of adb devices$"
    ):
        check_place(f"adb:{serial}")

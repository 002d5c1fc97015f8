"""`edge profile --on ssh:…` with the real ssh and sshd, which speak through a pipe rather than a port."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from kits import GOLDEN_MODEL, QUICK, kit_for, quietly, write_program
from test_cli import json_here as edge_json

from edge.devices.host import usable_cores
from edge.errors import EngineError, InputError
from edge.lab.profiling.kit.make import MODEL, PROGRAM
from edge.lab.profiling.kit.remote import ask_machine, run_kit
from edge.lab.profiling.kit.ssh import Address
from edge.lab.report.page import render
from edge.lab.report.search import search_report
from edge.lab.searching.search import search

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
SERVER = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv HOME={folder}/home
{more}
"""
CLIENT = """
Host board
ProxyCommand {folder}/serve
Host *
User {user}
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
"""


@dataclass
class Board:
    """A machine that ssh knows as `board`. Its home folder is empty at first."""

    folder: Path

    @property
    def left(self) -> list[str]:
        return sorted(os.listdir(self.folder / "home"))

    def serve(self, more: str) -> None:
        (self.folder / "sshd_config").write_text(SERVER.format(folder=self.folder, more=more))


@pytest.fixture
def board(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Board:
    if SSHD is None or SSH is None:
        pytest.skip("no sshd: apt-get install openssh-server openssh-client")
    folder = tmp_path_factory.mktemp("ssh")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # which the service makes where one runs
    (folder / "home").mkdir()
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "key.pub", folder / "authorized")
    (folder / "known").write_text(f"board {(folder / 'host.pub').read_text()}")
    (folder / "client_config").write_text(CLIENT.format(folder=folder, user=getpass.getuser()))
    write_program(folder / "serve", f"echo $$ >{folder}/pid; exec {SSHD} -i -f {folder}/sshd_config 2>/dev/null")
    (folder / "bin").mkdir()
    write_program(folder / "bin" / "ssh", f'exec {SSH} -F {folder}/client_config "$@"')
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    made = Board(folder)
    made.serve("")
    return made


@pytest.mark.wing("profiles over ssh")
def test_machine_measures_itself_over_ssh(board: Board) -> None:
    found = edge_json("profile", str(GOLDEN_MODEL), "--on", "ssh:board", *QUICK, "--json")
    assert [each["engine"] for each in found["engines"]] == ["cpu"]
    assert found["engines"][0]["plan"]["config"]["threads"] >= usable_cores()  # of which a container may grant a part
    assert [each["context"] for each in found["engines"][0]["curve"]] == [16, 48]
    assert not board.left


@pytest.mark.exhaustive
def test_search_measures_its_front_over_ssh(board: Board) -> None:
    device = "intel-n100" if platform.machine() == "x86_64" else "raspberry-pi-5"
    wanted = {"device": device, "on": "ssh:board", "types": [], "policies": ["full"], "kv_dtypes": ["f16"],
              "tokens": 64, "threads": 1, "text": f"{os.urandom(200).hex()}"}  # fmt: skip
    found = search(GOLDEN_MODEL, **wanted)
    (point,) = found.points
    assert point.speed.tok_s == point.tok_s > 0
    assert point.speed.energy_kind in ("estimate", "counter")
    assert device in point.candidate.tok_s.source  # predicted beside it
    assert "measured at ssh:board, by kits" in render(".md", search_report(found), {})
    assert not board.left
    (board.folder / "authorized").write_text("")
    with pytest.raises(EngineError, match=r"^board: it takes none of your keys"):
        search(GOLDEN_MODEL, **wanted)
    shutil.copy(board.folder / "key.pub", board.folder / "authorized")
    again = search(GOLDEN_MODEL, **wanted)
    with pytest.raises(InputError, match=r"^ssh:board is no pixel-9: it runs linux on"):
        search(GOLDEN_MODEL, **{**wanted, "device": "pixel-9"})
    assert (again.measured, again.remembered) == (0, found.measured)
    assert [(each.quality, each.speed) for each in again.points] == [(point.quality, point.speed)]


def test_absent_hosts_are_named(board: Board) -> None:
    name = "a" * 64  # which no resolver asks others for
    with pytest.raises(EngineError, match=rf"^{name}: there is no such host$"):
        ask_machine(Address(name))
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(EngineError, match=rf"^127.0.0.1:{port}: nothing listens there: start its ssh server"):
            ask_machine(Address("127.0.0.1", port))


def test_silent_machine_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "ssh", "cat >/dev/null; exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EngineError, match=r"^pi said nothing for 0\.2 s: it was given up$"):
        run_kit(Address("pi"), kit_for(), quietly, silence=0.2)


def test_run_removes_leftovers_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shell that is gone, or before the machine was started again; a run that goes on beside it stays, and that of
    another machine, which shares the home."""
    home, kit = tmp_path / "home", tmp_path / "kit"
    home.mkdir()
    kit.mkdir()
    write_program(kit / PROGRAM, "echo result")
    (kit / MODEL).touch()
    write_program(tmp_path / "ssh", f'for last; do :; done; HOME={home} TMPDIR={home} exec sh -c "$last"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gone = subprocess.Popen(["true"])
    gone.wait()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = os.uname().nodename
    owners = {
        "other-boot": f"{os.getpid()} 7e57 {here}", "gone": f"{gone.pid} {boot} {here}",
        "going-on": f"{os.getpid()} {boot} {here}", "elsewhere": f"{os.getpid()} 7e57 another-{here}",
    }  # fmt: skip
    for name, owner in owners.items():
        (home / f".edge-profile.{name}").mkdir()
        (home / f".edge-profile.{name}" / "owner").write_text(owner + "\n")
    (home / ".edge-profile.mine").mkdir()
    assert run_kit(Address("pi"), kit, quietly) == b"result\n"
    assert sorted(each.name for each in home.iterdir()) == [
        f".edge-profile.{name}" for name in ("elsewhere", "going-on", "mine")
    ]


@pytest.mark.parametrize(("text", "host", "port"), [
    ("pi", "pi", None), ("pi@raspberrypi.local:2222", "pi@raspberrypi.local", 2222),
    ("me@[fe80::1%eth0]:22", "me@fe80::1%eth0", 22), ("a.b-c@10.0.0.7", "a.b-c@10.0.0.7", None),
])  # fmt: skip
def test_addresses(text: str, host: str, port: int | None) -> None:
    assert Address.of(text) == Address(host, port)


@pytest.mark.parametrize("text", ["", "-oProxyCommand=x", "a@-b", "a b", "a;b", "pi:", "pi:99999", "a@b@c", "$(x)"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="names no host: write ssh:user@host or ssh:user@host:port"):
        Address.of(text)

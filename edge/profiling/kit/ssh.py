"""Run a kit on another machine with the system's `ssh`.

The kit travels as a tar archive into the standard input of one remote shell, which unpacks it into a folder of its own,
runs it, and removes the folder however that ends: when the kit fails, when the disk is full, and when the connection is
lost, since the kit ends by SIGPIPE at its next line of progress. The result is what the shell prints.
"""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edge.devices.profiles.profile import DeviceProfile
from edge.errors import EngineError, InputError, UnsupportedError
from edge.exporting.model_file import MODEL
from edge.profiling.kit.machine import QUESTION, profile_of
from edge.profiling.kit.make import PROGRAM

OnStep = Callable[[str, float], None]
"""Called with the current step, and the part of it that is done."""

_CONNECT_S = 20
_SILENCE_S = 120.0  # a kit says something more often, but for the slowest prompts
_PROBE_S = 60.0
_MOST_RESULT = 16 << 20
_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=10",
    "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR", "-o", "ForwardX11=no", "-o", "ForwardAgent=no",
)  # fmt: skip
# ssh's own exit status, and what it says then: the last pattern that fits names the advice.
_CONNECTION = 255
_ADVICE = (
    (r"host key verification failed", "its key is not known here: connect once with {ssh}, and confirm the key"),
    (r"permission denied", "it takes none of your keys: see that {ssh} works without a password (ssh-copy-id)"),
    (r"could not resolve|name or service not known", "there is no such host"),
    (r"connection refused", "nothing listens there: start its ssh server, or correct the port"),
    (r"timed out|no route to host|unreachable", "it does not answer"),
)
_UNPACKED = "edge-profile: unpacked"
_PLACE = re.compile(r"(?P<user>[\w.+-]+@)?(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\])(:(?P<port>\d{1,5}))?")
_FULL = re.compile(
    r"no space left|quota exceeded|file too large|wrote only|short write", re.IGNORECASE
)  # GNU's, BusyBox's
_PROGRESS = re.compile(r"\s*(?P<percent>\d+(\.\d+)?)% (?P<what>.+)")
# In the home folder rather than in /tmp, which may be memory, or forbid programs. One line without single quotes, since
# the login's shell, which may be any, hands it to sh.
_RUN = "; ".join((
    "umask 077",
    "export LC_ALL=C",
    "made() { mktemp -d \"$1.XXXXXX\" 2>/dev/null; }",
    "dir=$(made \"$HOME/.edge-profile\" || made \"${TMPDIR:-/tmp}/edge-profile\")"
    " || { echo edge-profile: no folder can be made there >&2; exit 71; }",
    "clean() { cd /; rm -rf \"$dir\"; }",
    "stop() { exit 72; }",
    "trap clean EXIT",
    "trap stop HUP INT TERM PIPE",
    "cd \"$dir\" || exit 71",
    "tar -xf - || { echo edge-profile: the kit cannot be unpacked there >&2; exit 73; }",
    f"echo {_UNPACKED} >&2",
    f"./{PROGRAM} </dev/null",
))  # fmt: skip


@dataclass(frozen=True)
class Address:
    """user@host:port, as people write it."""

    host: str  # with the user's name, if one was given
    port: int | None = None

    @classmethod
    def of(cls, text: str) -> Address:
        """Raises InputError."""
        found = re.fullmatch(
            r"(?P<user>[\w.+-]+@)?(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\])(:(?P<port>\d{1,5}))?", text
        )
        port = int(found["port"]) if found and found["port"] else None
        if found is None or text.startswith("-") or found["host"].startswith("-") or (port and port > 65535):
            raise InputError(f"--on ssh:{text} names no host: write ssh:user@host or ssh:user@host:port")
        return cls((found["user"] or "") + found["host"].strip("[]"), port)

    def __str__(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"

    @property
    def command(self) -> list[str]:
        return ["ssh", *(["-p", str(self.port)] if self.port else []), self.host]


def ask_machine(address: Address) -> DeviceProfile:
    """The profile of the machine at an address, by its own words. Raises InputError, UnsupportedError, and EngineError
    where it cannot be reached."""
    command = [*_ssh(address), "sh"]
    try:
        done = subprocess.run(command, input=QUESTION.encode(), capture_output=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        raise EngineError(f"{address} did not answer within {_PROBE_S:g} s") from None
    if done.returncode == _CONNECTION:
        raise _unreachable(address, done.stderr.decode(errors="replace"), began=False)
    return profile_of(done.stdout.decode(errors="replace"), address.host.rpartition("@")[2])


def run_kit(address: Address, folder: Path, on_step: OnStep, silence: float = _SILENCE_S) -> bytes:
    """Copy a kit to an address, run it there, and return its result. Nothing of it stays there.

    silence: seconds without a word after which it counts as lost. Raises EngineError."""
    with _process([*_ssh(address), f"exec sh -c '{_RUN}'"]) as process:
        lines, result = queue.Queue[str | None](), list[bytes]()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        threads = [
            threading.Thread(target=_send, args=(folder, process.stdin, on_step), daemon=True),
            threading.Thread(target=_receive, args=(process.stdout, result), daemon=True),
            threading.Thread(target=_tell, args=(process.stderr, lines), daemon=True),
        ]
        for each in threads:
            each.start()
        said = _follow(address, lines, threads[0], on_step, silence)
        status = process.wait()
        threads[1].join()
    if status:
        raise _failure(address, status, said)
    return b"".join(result)


def _ssh(address: Address) -> list[str]:
    """The beginning of a command. Raises UnsupportedError without ssh."""
    program = shutil.which("ssh")
    if program is None:
        raise UnsupportedError("there is no ssh here: install openssh-client")
    return [program, *_OPTIONS, *address.command[1:-1], "--", address.host]


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, whose end closes the connection."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class _Counted:
    """A file that says how much was written to it."""

    def __init__(self, file: IO[bytes], size: int, on_step: OnStep) -> None:
        self._file, self._size, self._on_step, self._sent = file, size, on_step, 0

    def write(self, data: bytes) -> int:
        self._file.write(data)
        self._sent += len(data)
        self._on_step("copying the kit", min(1.0, self._sent / self._size))
        return len(data)


def _send(folder: Path, file: IO[bytes], on_step: OnStep) -> None:
    paths = [folder / PROGRAM, folder / MODEL]
    with suppress(OSError, ValueError):  # the other side has ended, and says why
        counted = _Counted(file, sum(path.stat().st_size for path in paths), on_step)
        with tarfile.open(fileobj=counted, mode="w|", format=tarfile.USTAR_FORMAT) as archive:  # type: ignore[call-overload]
            for path in paths:
                archive.add(path, path.name, filter=_plain)
        file.close()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the names and numbers of this machine's users."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o700
    return entry


def _receive(file: IO[bytes], result: list[bytes]) -> None:
    size = 0
    with suppress(OSError, ValueError):
        while size < _MOST_RESULT and (part := file.read(1 << 16)):
            result.append(part)
            size += len(part)


def _tell(file: IO[bytes], lines: queue.Queue[str | None]) -> None:
    with suppress(OSError, ValueError):
        for line in file:
            lines.put(line.decode(errors="replace").strip())
    lines.put(None)


def _follow(
    address: Address, lines: queue.Queue[str | None], sender: threading.Thread, on_step: OnStep, silence: float
) -> list[str]:
    """Report progress until the last line; the lines that were no progress. While the kit is copied, which may take
    long, ssh notices itself that a connection is lost."""
    said, heard = list[str](), time.monotonic()
    while True:
        try:
            line = lines.get(timeout=min(1.0, silence))
        except queue.Empty:
            if not sender.is_alive() and time.monotonic() - heard > silence:
                raise EngineError(f"{address} said nothing for {silence:g} s: it was given up") from None
            if sender.is_alive():
                heard = time.monotonic()
            continue
        if line is None:
            return said
        heard = time.monotonic()
        if found := _PROGRESS.fullmatch(line):
            on_step(found["what"], float(found["percent"]) / 100)
        elif line:
            said.append(line)


def _failure(address: Address, status: int, said: list[str]) -> EngineError:
    text = "\n".join(each for each in said if each != _UNPACKED)
    if status == _CONNECTION:
        return _unreachable(address, text, began=_UNPACKED in said)
    if _FULL.search(text):
        return EngineError(f"{address} has no room for the kit: its disk is full")
    prefix = f"{PROGRAM}: "
    own = [each.removeprefix(prefix) for each in said if each.startswith(prefix) and each != _UNPACKED]
    why = own[-1] if own else _last(text) or (f"signal {status - 128}" if status > 128 else f"status {status}")
    if status in (128 + 9, 128 + 15):
        why = "its system ended the kit, perhaps for want of memory"
    return EngineError(f"{address}: {why}")


def _unreachable(address: Address, text: str, *, began: bool) -> EngineError:
    for pattern, advice in _ADVICE:
        if re.search(pattern, text, re.IGNORECASE) and not began:
            return EngineError(f"{address}: {advice.format(ssh=' '.join(address.command))}")
    if began:
        return EngineError(f"the connection to {address} was lost while the kit ran")
    return EngineError(f"{address} cannot be reached: {_last(text) or 'ssh does not say why'}")


def _last(text: str) -> str:
    """The last line, in printable characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "".join(each if each.isprintable() else "?" for each in lines[-1])[:200] if lines else ""

"""Run a kit on another machine, through a local program that reaches its shell, such as `ssh`.

The kit travels as a tar archive into the standard input of one remote shell, which unpacks it into a new folder, runs
it, and removes the folder however the run ends: when the kit fails, when the disk is full, and when the connection is
lost, since SIGPIPE ends the kit at its next line of progress, seconds later. The shell's standard output is the result.
"""

from __future__ import annotations

import queue
import re
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from edge.apps.sections.model_file import MODEL
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import EngineError
from edge.lab.profiling.kit.machine import QUESTION, profile_of
from edge.lab.profiling.kit.make import PROGRAM

OnStep = Callable[[str, float], None]
"""Called with the current step, and the share of it that is done, from 0 to 1."""

_SILENCE_S = 120.0  # a kit reports progress every few seconds, even during long prompts
_PROBE_S = 60.0
_MOST_RESULT = 16 << 20
_LONGEST_LINE, _MOST_LINES = 1 << 16, 256  # of a machine's standard error
# The shell's own messages: the exit status does not suffice, since some programs return 0 for a lost connection.
_UNPACKED, _MEASURED = "edge-profile: unpacked", "edge-profile: measured"
# Messages of GNU tar and BusyBox
_FULL = re.compile(r"no space left|quota exceeded|file too large|wrote only|short write", re.IGNORECASE)
_PROGRESS = re.compile(r"\s*(?P<percent>\d+(\.\d+)?)% (?P<what>.+)")
# In the home folder rather than in /tmp, which may be in memory, or forbid execution; Android has neither, but a folder
# for developers. One line without single quotes, since the login shell, which may be any, passes it to sh.
_RUN = "; ".join((
    "umask 077",
    "export LC_ALL=C",
    "boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)",
    # Remove folders of runs that could not clean up, as after a loss of power: of an earlier boot, or of a shell that
    # is gone. Keep those of other machines that share the home folder.
    "for old in \"$HOME\"/.edge-profile.* \"${TMPDIR:-/tmp}\"/edge-profile.* /data/local/tmp/edge-profile.*; do"
    " read -r shell at host 2>/dev/null <\"$old/owner\" || continue;"
    " [ \"$host\" = \"$(uname -n)\" ] || continue;"
    " [ \"$at\" = \"$boot\" ] && kill -0 \"$shell\" 2>/dev/null || rm -rf \"$old\"; done 2>/dev/null",
    "made() { mktemp -d \"$1.XXXXXX\" 2>/dev/null; }",
    "dir=$(made \"$HOME/.edge-profile\" || made \"${TMPDIR:-/tmp}/edge-profile\""
    " || made /data/local/tmp/edge-profile)"
    " || { echo edge-profile: no folder can be made there >&2; exit 71; }",
    "clean() { cd /; rm -rf \"$dir\"; }",
    "stop() { exit 72; }",
    "trap clean EXIT",
    "trap stop HUP INT TERM PIPE",
    "cd \"$dir\" || exit 71",
    "echo $$ $boot $(uname -n) >owner",
    "tar -xf - || { echo edge-profile: the kit cannot be unpacked there >&2; exit 73; }",
    f"echo {_UNPACKED} >&2",
    f"./{PROGRAM} </dev/null || exit $?",
    f"echo {_MEASURED} >&2",
))  # fmt: skip


class Remote(Protocol):
    """A machine that has a shell. `str()` names it in messages."""

    @property
    def name(self) -> str:
        """The name of its profile."""

    def shell(self, command: str) -> list[str]:
        """The program and arguments that run a command in the machine's shell, and pass on its three standard streams
        and exit status. Raises UnsupportedError if the program is missing."""

    def cut(self, status: int, text: str, *, began: bool) -> EngineError | None:
        """The error of a failed call if the program itself failed, by its exit status and standard error; None if the
        remote command failed. began: whether the kit was running."""


def ask_machine(remote: Remote) -> DeviceProfile:
    """Ask a machine for its profile. Raises InputError, UnsupportedError, and EngineError if it cannot be reached."""
    try:
        done = subprocess.run(remote.shell("sh"), input=QUESTION.encode(), capture_output=True, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        raise EngineError(f"{remote} did not answer within {_PROBE_S:g} s") from None
    error = remote.cut(done.returncode, done.stderr.decode(errors="replace"), began=False) if done.returncode else None
    if error:
        raise error
    return profile_of(done.stdout.decode(errors="replace"), remote.name)


def run_kit(remote: Remote, folder: Path, on_step: OnStep, silence: float = _SILENCE_S) -> bytes:
    """Copy a kit to a machine, run it there, and return its result. Leaves no file there.

    silence: seconds without progress after which the machine counts as lost. Raises EngineError."""
    with _process(remote.shell(f"exec sh -c '{_RUN}'")) as process:
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
        said = _follow(remote, lines, threads[0], on_step, silence)
        status = process.wait()
        threads[1].join()
    if status or _MEASURED not in said:
        raise _failure(remote, status, said)
    return b"".join(result)


def last_line(text: str) -> str:
    """The last line that is not empty, in printable characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "".join(each if each.isprintable() else "?" for each in lines[-1])[:200] if lines else ""


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is terminated at the end of the block, which closes the connection."""
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
    """A file that reports the progress of writing to it."""

    def __init__(self, file: IO[bytes], size: int, on_step: OnStep) -> None:
        self._file, self._size, self._on_step, self._sent = file, size, on_step, 0

    def write(self, data: bytes) -> int:
        self._file.write(data)
        self._sent += len(data)
        self._on_step("copying the kit", min(1.0, self._sent / self._size))
        return len(data)


def _send(folder: Path, file: IO[bytes], on_step: OnStep) -> None:
    paths = [folder / PROGRAM, folder / MODEL]
    with suppress(OSError, ValueError):  # the other side has ended, and reports the reason
        counted = _Counted(file, sum(path.stat().st_size for path in paths), on_step)
        with tarfile.open(fileobj=counted, mode="w|", format=tarfile.USTAR_FORMAT) as archive:  # type: ignore[call-overload]
            for path in paths:
                archive.add(path, path.name, filter=_plain)
        file.close()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the names and ids of this machine's users from an entry."""
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
        while line := file.readline(_LONGEST_LINE):
            lines.put(line.decode(errors="replace").strip())
    lines.put(None)


def _follow(
    remote: Remote, lines: queue.Queue[str | None], sender: threading.Thread, on_step: OnStep, silence: float
) -> list[str]:
    """Report progress until the last line. Returns the lines that were no progress. Silence does not count while the
    kit is copied, which may take long: the program itself notices a lost connection."""
    said, heard = list[str](), time.monotonic()
    while True:
        try:
            line = lines.get(timeout=min(1.0, silence))
        except queue.Empty:
            if sender.is_alive():
                heard = time.monotonic()
            elif time.monotonic() - heard > silence:
                raise EngineError(f"{remote} said nothing for {silence:g} s: it was given up") from None
            continue
        if line is None:
            return said
        heard = time.monotonic()
        if found := _PROGRESS.fullmatch(line):
            on_step(found["what"], float(found["percent"]) / 100)
        elif line:
            said.append(line)
            del said[_MOST_LINES // 2 : len(said) - _MOST_LINES // 2]  # if there are too many, drop the middle


def _failure(remote: Remote, status: int, said: list[str]) -> EngineError:
    began, said = _UNPACKED in said, [each for each in said if each not in (_UNPACKED, _MEASURED)]
    text = "\n".join(said)
    if error := remote.cut(status, text, began=began):
        return error
    if _FULL.search(text):
        return EngineError(f"{remote} has no room for the kit: its disk is full")
    prefix = f"{PROGRAM}: "
    own = [each.removeprefix(prefix) for each in said if each.startswith(prefix)]
    why = own[-1] if own else last_line(text) or (f"signal {status - 128}" if status > 128 else f"status {status}")
    if status in (128 + 9, 128 + 15):
        why = "its system ended the kit, perhaps for want of memory"
    return EngineError(f"{remote}: {why}")

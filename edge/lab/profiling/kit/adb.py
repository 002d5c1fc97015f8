"""An Android device, reached by the system's `adb`."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from edge.errors import EngineError, InputError, UnsupportedError
from edge.lab.profiling.kit.remote import last_line

_LIST_S = 60.0  # it may have to start its server
_SERIAL = re.compile(r"[\w.:\[\]%@()][\w.:\[\]%@() -]*")
_LINE = re.compile(r"(?P<serial>[^\t]+)\t(?P<state>.+)")
_READY = "device"
_ADVICE = {
    "unauthorized": "confirm on its screen that this computer may debug it",
    "authorizing": "confirm on its screen that this computer may debug it",
    "offline": "it is offline: connect it again, or start adb anew with adb kill-server",
    "connecting": "it is still connecting: try again",
    "no permissions": "this user may not open its USB device: install adb's udev rules",
}
_OWN = re.compile(r"^(error|adb(: error)?): (?P<why>.+)", re.MULTILINE)  # adb's own messages
_LOST = (0, 255)  # adb's exit status for a lost device, which depends on its version


@dataclass(frozen=True)
class Device:
    """A device by its serial, as `adb devices` lists it."""

    serial: str

    def __str__(self) -> str:
        return self.serial

    @property
    def name(self) -> str:
        return self.serial

    def shell(self, command: str) -> list[str]:
        """As `Remote.shell`. Raises UnsupportedError without adb."""
        return [_program(), "-s", self.serial, "shell", "-T", command]

    def cut(self, status: int, text: str, *, began: bool) -> EngineError | None:
        """As `Remote.cut`."""
        own = _OWN.search(text)
        if own is None and status not in _LOST:
            return None
        if began or own is None:
            return EngineError(f"the connection to {self} was lost while the kit {'ran' if began else 'was copied'}")
        return EngineError(f"{self} cannot be reached: {last_line(own['why'])}")


def check_serial(serial: str) -> None:
    """Raise InputError for a text that is no serial."""
    if not _SERIAL.fullmatch(serial):
        raise InputError(f"--on adb:{serial} names no device: write adb, or adb: and a serial of adb devices")


def find_device(serial: str | None) -> Device:
    """The device of that serial, or the only device. Raises InputError unless there is one, UnsupportedError without
    adb, and EngineError if the device refuses the connection."""
    states = _states()
    listed = " or ".join(f"adb:{each}" for each in states)
    if serial is None:
        if len(states) > 1:
            raise InputError(f"adb knows {len(states)} devices: choose one with --on {listed}")
        if not states:
            raise InputError("adb knows no device: connect one that allows USB debugging, or adb connect HOST:PORT")
        (serial,) = states
    if serial not in states:
        others = f"it knows {listed}" if states else "it knows none"
        advice = f"; adb connect {serial} first" if ":" in serial else ""
        raise InputError(f"adb knows no device {serial}: {others}{advice}")
    state = states[serial]
    if state == _READY:
        return Device(serial)
    advice = next((words for key, words in _ADVICE.items() if state.startswith(key)), f"adb says {last_line(state)}")
    raise EngineError(f"{serial}: {advice}")


def _states() -> dict[str, str]:
    """adb's word for the state of each device, by serial. Raises EngineError, UnsupportedError."""
    try:
        done = subprocess.run(
            [_program(), "devices"], capture_output=True, timeout=_LIST_S, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"adb did not answer within {_LIST_S:g} s") from None
    if done.returncode:
        raise EngineError(f"adb devices failed: {last_line(done.stderr) or f'status {done.returncode}'}")
    lines = (_LINE.fullmatch(line) for line in done.stdout.splitlines())
    return {line["serial"].strip(): line["state"].strip() for line in lines if line}


def _program() -> str:
    program = shutil.which("adb")
    if program is None:
        raise UnsupportedError("there is no adb here: install adb, of Debian or of Android's platform tools")
    return program

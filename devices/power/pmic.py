"""The Raspberry Pi 5's power controller: volts and amperes of its rails, from `vcgencmd pmic_read_adc`.

The rails exclude the board's losses ahead of them, so the whole device draws slightly more.
"""

from __future__ import annotations

import re
from pathlib import Path

from edge.devices.kernel import read_text
from edge.devices.power.base import Unavailable
from edge.devices.power.integrate import Integrated

_VALUE = r"(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d{1,9}(?:\.\d{1,9})?)[AV]"
_SECONDS = 1.0


def find(root: Path) -> Integrated:
    """The meter of all rails. Raises Unavailable on other boards, without vcgencmd, or if it fails."""
    model = read_text(root / "proc/device-tree/model")
    if "Raspberry Pi 5" not in model:
        raise Unavailable("not a Raspberry Pi 5")
    import shutil  # here: it takes milliseconds, which only this device need spend

    program = shutil.which("vcgencmd")
    if program is None:
        raise Unavailable("vcgencmd is missing: sudo apt install libraspberrypi-bin")
    return Integrated("Pi 5 PMIC", "device", lambda: watts(_ask(program)))


def watts(answer: str) -> float:
    """The sum of volts × amperes over all rails that report both. Raises Unavailable."""
    found: dict[str, dict[str, float]] = {}
    for rail, unit, value in re.findall(_VALUE, answer, re.ASCII):
        found.setdefault(rail, {})[unit] = float(value)
    products = [rail["A"] * rail["V"] for rail in found.values() if len(rail) == 2]
    if not products:
        raise Unavailable("vcgencmd pmic_read_adc shows no rails")
    return sum(products)


def _ask(program: str) -> str:
    import subprocess

    try:
        return subprocess.run(
            [program, "pmic_read_adc"],
            stdin=subprocess.DEVNULL,  # ours may hold a prompt
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"vcgencmd pmic_read_adc failed ({type(error).__name__})") from None

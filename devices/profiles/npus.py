"""NPUs that the system shows without their makers' libraries: by device nodes and the board's own names."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from edge.devices.kernel import read_text
from edge.devices.profiles.profile import Npu
from edge.records import dataclass

_SAYS = "the operating system"
_ACCELERATORS = {  # devices in /sys/class/accel, by their kernel driver
    "intel_vpu": Npu("Intel", "NPU", _SAYS),
    "amdxdna": Npu("AMD", "XDNA", _SAYS),
    "qaic": Npu("Qualcomm", "Cloud AI 100", _SAYS),
    "rocket": Npu("Rockchip", "NPU", _SAYS),
    "ethosu": Npu("Arm", "Ethos-U", _SAYS),
    "habanalabs": Npu("Intel", "Gaudi", _SAYS),
}
_HEXAGON = Npu("Qualcomm", "Hexagon", _SAYS, provider="qnn")
_CDSP = ("fastrpc-cdsp", "fastrpc-cdsp-secure", "fastrpc-cdsp1", "adsprpc-smd")  # of Hexagon: compute, not audio
_APPLE = Npu("Apple", "Neural Engine", _SAYS)


@dataclass(frozen=True)
class SeenNpu:
    """An NPU that has a kernel driver."""

    npu: Npu
    place: str  # device node
    driver: str  # of the kernel
    allowed: bool  # whether this process may open it


def seen_npus(root: Path = Path("/")) -> list[SeenNpu]:
    """The NPUs that have a kernel driver; others are not found."""
    if sys.platform == "darwin" and root == Path("/"):
        return [SeenNpu(_APPLE, "the chip", "Core ML", True)] if platform.machine() == "arm64" else []
    found = []
    for path in sorted(root.glob("sys/class/accel/accel*")):
        fields = dict(line.split("=", 1) for line in read_text(path / "device/uevent").splitlines() if "=" in line)
        driver = fields.get("DRIVER", "unknown")
        npu = _ACCELERATORS.get(driver, Npu("unknown", "accelerator", _SAYS))
        found.append(_seen(npu, root, f"dev/accel/{path.name}", driver))
    if node := next((f"dev/{name}" for name in _CDSP if (root / "dev" / name).exists()), None):
        found.append(_seen(_HEXAGON, root, node, "fastrpc"))
    return found


def board(root: Path = Path("/")) -> str:
    """The device tree's name of this board; empty where there is none, as on most x86 machines."""
    return " ".join(read_text(root / "proc/device-tree/model").rstrip("\0").split())


def chips(root: Path = Path("/")) -> list[str]:
    """The device tree's names of board and chip, such as qcom,sm8650."""
    return [name for name in read_text(root / "proc/device-tree/compatible").split("\0") if name]


def _seen(npu: Npu, root: Path, node: str, driver: str) -> SeenNpu:
    return SeenNpu(npu, f"/{node}", driver, os.access(root / node, os.R_OK | os.W_OK))

"""GPUs as the system shows them without loading their drivers, and the memory that drivers hold for this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from edge.devices.kernel import read_text, whole

_KEYS = ("drm-resident-", "drm-memory-")  # the newer first: some drivers have both


VARIABLE = "EDGE_GPU"
_NODES = ("dev/nvidia0", "dev/kgsl-3d0", "dev/mali0", "dev/dxg")  # NVIDIA, Adreno, Mali, WSL


def is_off() -> bool:
    """Whether `EDGE_GPU` turns GPUs off."""
    return os.environ.get(VARIABLE, "").strip().lower() in ("0", "off", "no", "false")


def seen_gpus(root: Path = Path("/")) -> str:
    """A description of the GPUs that may be there, in under a millisecond, without loading a driver; empty: none.

    Software adapters are not counted.
    """
    if sys.platform != "linux":
        return sys.platform  # they all have one
    cards = [path.parent / "device" for path in sorted(root.glob("sys/class/drm/renderD*/device"))]
    ids = [" ".join(read_text(card / name) for name in ("vendor", "device")) for card in cards]
    nodes = [name for name in _NODES if (root / name).exists()]
    driver = read_text(root / "proc/driver/nvidia/version").partition("\n")[0]
    return ", ".join(filter(str.strip, [*ids, *nodes, driver]))


def resident_memory(root: Path = Path("/")) -> int | None:
    """Resident bytes of the buffers that DRM drivers hold for this process, in all regions; None if no driver says.

    Covers most integrated GPUs and the cards of AMD and Intel. The process's resident set may exclude these buffers.
    Source: the kernel's Documentation/gpu/drm-usage-stats.rst.
    """
    clients = dict[tuple[str, str, str], int]()
    try:
        files = sorted((root / "proc/self/fdinfo").iterdir())
    except OSError:
        return None
    for file in files:
        lines = read_text(file).splitlines()
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        for key in _KEYS:
            sizes = [_bytes(value) for name, value in fields.items() if name.startswith(key)]
            if sizes:  # descriptors that share a client show the same buffers
                names = ("drm-driver", "drm-pdev", "drm-client-id")
                clients[fields.get(names[0], ""), fields.get(names[1], ""), fields.get(names[2], file.name)] = sum(
                    sizes
                )
                break
    return sum(clients.values()) if clients else None


def _bytes(value: str) -> int:
    """Parse `124 KiB`, or `124` for bytes."""
    number, _, unit = value.partition(" ")
    return max(0, whole(number) or 0) * {"KiB": 1 << 10, "MiB": 1 << 20}.get(unit, 1)

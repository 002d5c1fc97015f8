"""Memory that GPUs hold for this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_KEYS = ("drm-resident-", "drm-memory-")  # the newer first: some drivers have both


def resident_memory(root: Path = Path("/")) -> int | None:
    """Bytes of the buffers that drivers of the kernel's DRM keep in memory for this process, whatever the region: most
    of integrated GPUs, and AMD's and Intel's cards. They may not be in the resident set. None if no driver tells.

    Source: the kernel's Documentation/gpu/drm-usage-stats.rst.
    """
    clients = dict[tuple[str, str, str], int]()
    try:
        files = sorted((root / "proc/self/fdinfo").iterdir())
    except OSError:
        return None
    for file in files:
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:  # closed meanwhile
            continue
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
    """Such as 124 KiB, or 124 for bytes."""
    number, _, unit = value.partition(" ")
    return int(number) * {"KiB": 1 << 10, "MiB": 1 << 20}.get(unit, 1) if number.isdigit() else 0

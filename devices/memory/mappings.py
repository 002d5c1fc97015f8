"""Files mapped into this process, with their resident bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge.devices.kernel import read_text, whole

_HEAD = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) [0-9a-f]+ \S+ (\d+)\s*(.*)$")


@dataclass(frozen=True)
class Mapped:
    """All mappings of one file, sizes in bytes."""

    size: int
    resident: int
    code: bool  # whether a mapping is executable, such as a library's


def mapped_files(root: Path = Path("/")) -> dict[str, Mapped]:
    """Mapped files by path; empty where the system does not say. Takes milliseconds."""
    found: dict[str, Mapped] = {}
    path = ""
    for line in read_text(root / "proc/self/smaps").splitlines():
        if head := _HEAD.match(line):
            path = head[3] if head[2] != "0" else ""
            if path:
                before = found.get(path, Mapped(0, 0, False))
                found[path] = Mapped(before.size, before.resident, before.code or "x" in head[1])
        elif path and line.startswith(("Size:", "Rss:")):
            name, _, size = line.partition(":")
            before, count = found[path], (whole(size.removesuffix("kB")) or 0) * 1024
            more, resident = (count, 0) if name == "Size" else (0, count)
            found[path] = Mapped(before.size + more, before.resident + resident, before.code)
    return found

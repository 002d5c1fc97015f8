"""Hashes of the native engine's source files, for the keys of everything that is derived with them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edge.devices.keys import Hasher

_ROOT = Path(__file__).parent

# The files that compiled code and its arguments depend on; a change elsewhere compiles nothing again.
PASS = (
    "compiler/child.py", "cpu/arguments.py", "cpu/elf.py", "cpu/generator.py", "cpu/kernels", "cpu/linker.py",
    "cpu/lowering.py", "cpu/phases", "cpu/scratch.py", "cpu/timing.py", "design.py", "kv/pages.py", "kv/regions.py",
    "kv/row_formats.py", "packing/blocks.py", "packing/cores.py", "packing/layout.py", "packing/shape.py",
    "packing/splits.py", "targets.py",
)  # fmt: skip


@lru_cache
def source_hash(*names: str) -> str:
    """The hash of these files and folders, whose names are relative to the engine's folder."""
    digest = Hasher()
    for name in names:
        path = _ROOT / name
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(each.name.encode() + b"\0" + each.read_bytes())
    return digest.key()

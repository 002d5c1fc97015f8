"""Detection of Core ML folders, which apps run and edge only writes (converters/coreml/writer.py)."""

from __future__ import annotations

from pathlib import Path

MANIFEST = "coreml.json"


def is_coreml_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()

"""manifest.json, which states the files of a bundle: its text, its own hash, and the bundles that it makes known."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edge.apps.sections.model_file import MODEL
from edge.devices.output import check_folder
from edge.errors import InputError

MANIFEST = "manifest.json"


def check_target(folder: Path, *, force: bool) -> None:
    """Raise InputError unless the folder may be written. force: allow replacing a bundle to which nothing was added."""
    check_folder(folder, lambda each: _listed(each) is not None, force=force)
    listed = _listed(folder) or set()
    added = sorted(
        name for path in folder.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and (name := path.relative_to(folder).as_posix()) not in listed
    )  # fmt: skip
    if added:
        named = ", ".join(added[:3]) + (", …" if len(added) > 3 else "")
        raise InputError(f"{folder} holds files of others ({named}): move them, or choose a new folder")


def manifest_text(manifest: dict[str, Any]) -> str:
    return json.dumps(manifest, indent=2) + "\n"


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add to a page's manifest the SHA-256 of its own text, taken with that field empty, to detect damage."""
    if "web" not in manifest:
        return manifest
    blank = manifest | {"web": manifest["web"] | {"sha256": ""}}
    digest = hashlib.sha256(manifest_text(blank).encode()).hexdigest()
    return blank | {"web": blank["web"] | {"sha256": digest}}


def _listed(folder: Path) -> set[str] | None:
    """The files of an older bundle by its manifest; None if it has none."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        return {MANIFEST, *files} if any(Path(name).name == MODEL for name in files) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None

"""The folders that `edge compile` writes: they appear whole, with the description of their files written last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.devices.output import work_folder
from edge.errors import InputError
from edge.storage.fingerprint import hash_file


@contextmanager
def appearing(folder: Path, files: tuple[str, ...], *, force: bool) -> Iterator[Path]:
    """Yield an empty folder, whose `files` appear in `folder` together if the block succeeds; the last is the
    description.

    Raises InputError if the folder holds other files (unless `force`) or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file")
    others = sorted({path.name for path in folder.iterdir()} - set(files)) if folder.exists() else []
    if others and not force:
        raise InputError(f"{folder} holds other files ({others[0]}): choose a new folder, or --force")
    with work_folder(folder) as made:
        yield made
        _put(made, folder, files)


def described(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": hash_file(path)} for path in sorted(folder.iterdir())}


def _put(made: Path, folder: Path, files: tuple[str, ...]) -> None:
    """Publish the files: a new folder appears atomically; in an existing one files are replaced, the description
    last."""
    if not folder.exists():
        made.rename(folder)
        return
    for name in files:
        if (made / name).exists():
            os.replace(made / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)

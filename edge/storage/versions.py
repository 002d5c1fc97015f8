"""Versions of edge and its foundations."""

from __future__ import annotations

import os
import platform
import re
import sys
from functools import lru_cache

from edge.errors import EdgeError

_FOLDER = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)\.dist-info")


def edge_version() -> str:
    """The installed version. Raises EdgeError if edge was never installed."""
    version = version_of("edge-runtime")
    if version is None:
        raise EdgeError("edge is not installed: pip install -e . in its folder")
    return version


def own_versions() -> dict[str, str]:
    """Versions of edge, Python and NumPy, for reports."""
    return {"edge": edge_version(), "python": platform.python_version(), "numpy": version_of("numpy") or "none"}


def version_of(package: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    if (found := _installed().get(_plain(package))) is not None:
        return found
    from importlib import metadata  # 20 ms and a MiB, for packages that are installed in an older way

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@lru_cache(1)
def _installed() -> dict[str, str]:
    """Versions by package, from the names of `*.dist-info` folders; the first on `sys.path` wins, as in importlib."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in filter(None, map(_FOLDER.fullmatch, entries)):
            found.setdefault(_plain(entry["name"]), entry["version"])
    return found


def _plain(name: str) -> str:
    """Normalize a package's name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()

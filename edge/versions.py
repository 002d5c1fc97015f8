"""Versions of edge and of what it stands on."""

from __future__ import annotations

import platform
from importlib import metadata

from edge.errors import EdgeError


def edge_version() -> str:
    """As installed. Raises EdgeError if edge runs from a folder that was never installed."""
    try:
        return metadata.version("edge-runtime")
    except metadata.PackageNotFoundError:
        raise EdgeError("edge is not installed: pip install -e . in its folder") from None


def own_versions() -> dict[str, str]:
    """For reports: edge, Python, NumPy."""
    return {"edge": edge_version(), "python": platform.python_version(), "numpy": metadata.version("numpy")}

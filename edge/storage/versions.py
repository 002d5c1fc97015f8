"""Versions of edge and of what it stands on."""

from __future__ import annotations

import platform

from edge.errors import EdgeError


def edge_version() -> str:
    """As installed. Raises EdgeError if edge runs from a folder that was never installed."""
    from importlib import metadata  # here: 10 ms that the first token need not wait for

    try:
        return metadata.version("edge-runtime")
    except metadata.PackageNotFoundError:
        raise EdgeError("edge is not installed: pip install -e . in its folder") from None


def own_versions() -> dict[str, str]:
    """For reports: edge, Python, NumPy."""
    from importlib import metadata

    return {"edge": edge_version(), "python": platform.python_version(), "numpy": metadata.version("numpy")}

"""Versions of edge and its foundations."""

from __future__ import annotations

import platform

from edge.errors import EdgeError


def edge_version() -> str:
    """The installed version. Raises EdgeError if edge was never installed."""
    from importlib import metadata  # here: 10 ms that the first token need not wait for

    try:
        return metadata.version("edge-runtime")
    except metadata.PackageNotFoundError:
        raise EdgeError("edge is not installed: pip install -e . in its folder") from None


def own_versions() -> dict[str, str]:
    """Versions of edge, Python and NumPy, for reports."""
    from importlib import metadata

    return {"edge": edge_version(), "python": platform.python_version(), "numpy": metadata.version("numpy")}

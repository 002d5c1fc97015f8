"""The installed package `edge-kernels`: compiled passes of known models, for devices without a compiler.

Its folder has volumes (`volume.py`) and index.json: the version of the engine's sources that they were compiled from,
and of each volume its size, its checksum, the keys of its designs and the shapes of their models. `catalog.py` makes
it. The package is data, found where Python finds modules and never imported; whoever can write there can write edge.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from edge.backends.tvm.compiler.volume import read_volume
from edge.backends.tvm.cpu.linker import join
from edge.backends.tvm.sources import PASS, source_hash
from edge.errors import EngineError
from edge.records import dataclass
from edge.values import parse

PACKAGE, DISTRIBUTION, INDEX = "edge_kernels", "edge-kernels", "index.json"
MOST_BYTES = 16 << 20  # of a file of the package


@dataclass(frozen=True)
class Volume:
    """A volume of the index."""

    bytes: int
    sha256: str
    model: str  # its name in the table of models
    isas: list[str]
    shapes: list[dict[str, Any]]  # `model_shape` of its files
    designs: list[str]  # keys


@dataclass(frozen=True)
class Index:
    """The content of index.json."""

    edge: str  # the version of edge that made it
    source: str  # `source_hash` of PASS
    volumes: dict[str, Volume]  # by file name


@dataclass(frozen=True)
class Package:
    """A package that is installed. usable: its volumes are of this version of the engine."""

    folder: Path
    index: Index
    usable: bool
    places: dict[str, str]  # volumes by the keys of designs; empty unless usable


@functools.cache
def installed() -> Package | None:
    """The installed package, or None. Raises EngineError if its index is damaged."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        return _read(Path(folder))
    return None


def holds(key: str) -> bool:
    """Whether the package has a design."""
    found = installed()
    return found is not None and key in found.places


def has_shape(shape: dict[str, Any], isa: str) -> bool:
    """Whether the package has passes of a model of this `model_shape`, for an instruction set."""
    found = installed()
    volumes = found.index.volumes.values() if found and found.usable else []
    return any(isa in each.isas and shape in each.shapes for each in volumes)


def packaged_image(key: str) -> bytes:
    """The image of a design, joined from its pieces. Raises EngineError for a damaged volume, KeyError if there is no
    such design."""
    found = installed()
    name = found.places[key] if found else ""
    if found is None:
        raise KeyError(key)
    volume, path = found.index.volumes[name], found.folder / name
    try:
        data = _bytes(path)
        import hashlib  # loads OpenSSL

        if len(data) != volume.bytes or hashlib.sha256(data).hexdigest() != volume.sha256:
            raise ValueError(f"it does not match {INDEX}")
        return join(read_volume(data, key))
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(path, error) from None


def _read(folder: Path) -> Package:
    path = folder / INDEX
    try:
        index = parse(Index, json.loads(_bytes(path)), INDEX, strict=True)
        if any(Path(name).name != name for name in index.volumes):
            raise ValueError("it names files elsewhere")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    usable = index.source == source_hash(*PASS)
    places = {key: name for name, volume in index.volumes.items() for key in volume.designs} if usable else {}
    return Package(folder, index, usable, places)


def _damaged(path: Path, error: Exception) -> EngineError:
    why = error.strerror if isinstance(error, OSError) else error
    return EngineError(f"{path} is damaged ({why}): install {DISTRIBUTION} again")


def _bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError("it is too long")
    return data

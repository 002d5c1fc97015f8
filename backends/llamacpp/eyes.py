"""Pictures by llama.cpp's mtmd, for encoders that edge does not run: each is encoded in a child process."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np

from edge.devices.child import run_child
from edge.errors import UnsupportedError
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_FOLDER = "MTMD_CPP_LIB"  # llama-cpp-python's variable
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Seen:
    """A picture as mtmd encodes it. parts, grid, whole: see `edge.model.towers.Layout`."""

    parts: tuple[str | int, ...]
    rows: list[FloatArray]  # of each part that has some, float32 [n, width]
    grid: tuple[int, int] | None
    whole: bool


def why_not() -> str | None:
    """Why mtmd cannot be used here; None if it can."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return "llama-cpp-python is not installed"
    folder = Path(os.environ.get(_FOLDER) or Path(spec.origin).parent / "lib")
    if any(folder.glob("*mtmd*")):
        return None
    return (
        "this llama-cpp-python was built without libmtmd: reinstall it (pip install --force-reinstall --no-cache-dir "
        "llama-cpp-python) without LLAVA_BUILD=OFF in CMAKE_ARGS"
    )


def see(model: Path, mmproj: Path, pixels: AnyArray, threads: int, tokens: int | None = None) -> Seen:
    """Encode a picture, uint8 [height, width, 3]. tokens: the most rows; None: mtmd's own. Raises UnsupportedError for
    an encoder that mtmd does not run with this model, EngineError."""
    if why := why_not():
        raise UnsupportedError(why)
    with tempfile.TemporaryDirectory() as folder:
        picture, rows = Path(folder) / "picture.npy", Path(folder) / "rows.npy"
        np.save(picture, pixels)
        request = {
            "model": str(model), "mmproj": str(mmproj), "picture": str(picture), "rows": str(rows),
            "threads": threads, "tokens": tokens,
        }  # fmt: skip
        found = run_child(
            "edge.backends.llamacpp.eyes_child", request, lambda _: None, failure="llama.cpp's mtmd gave up",
            purpose="looks at a picture", timeout=_TIMEOUT_S,
        )  # fmt: skip
        made: FloatArray = np.load(rows)
    parts = tuple(part for part in found["parts"] if part != "")
    if len(found["grids"]) > 1:
        raise UnsupportedError(f"{mmproj}: mtmd divides the picture, whose positions have several components")
    grid = tuple(found["grids"][0]) if found["grids"] else None
    ends = np.cumsum([part for part in parts if isinstance(part, int)])
    return Seen(parts, np.split(made, ends[:-1]), grid, found["whole"])

"""What a bundle holds besides model.edge, for each system: the library, or its sources, and the files for people."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from edge.backends.tvm.design import Design
from edge.embed.library import make_library

_HERE = Path(__file__).parent
_RUNTIME = _HERE / "runtime"

Tell = Callable[[str, float], None]


def write_platform(designs: Sequence[Design], system: str, trusted: str, folder: Path, tell: Tell) -> Path:
    """Write the files of a system. Returns the folder, in `folder`, where model.edge belongs.

    trusted: trusted.c. tell: is called with a step and the share of it that is done.
    Raises EngineError if a compiler fails, MissingExtraError without TVM, UnsupportedError without a C compiler.
    """
    machine = designs[0].target.machine
    made = {"trusted.c": trusted}
    make_library(
        designs, folder, machine, system, tables=made, progress=lambda part: tell("compiling for the device", part)
    )
    shutil.copy(_RUNTIME / "edge.h", folder)
    shutil.copytree(_HERE / "c", folder, dirs_exist_ok=True)
    return folder

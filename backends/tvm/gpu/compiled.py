"""GPU programs of this machine, from the cache folder or generated in a child process.

TVM runs in the child, which returns its memory at exit. Run as a module, this is the child.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge.backends.tvm.compiler.compiled import compiler_size, is_installed
from edge.backends.tvm.gpu.design import Design
from edge.backends.tvm.gpu.program import Program
from edge.backends.tvm.sources import source_hash
from edge.devices.child import Say, run_child, serve
from edge.errors import MissingExtraError
from edge.storage import cache

_SOURCES = ("gpu", "packing/blocks.py", "packing/cores.py", "packing/layout.py")
_TIMEOUT_S = 300.0
COMPILER_BYTES = 200 << 20  # of the child, measured: 168 to 180 MiB
_FOR_ADAPTERS = 24 << 20  # more, for the products with LoRA adapters beside those without
_IMPORTED = 0.5  # share of the work that importing TVM is


def compiler_bytes(*, adapters: bool) -> int:
    """Bytes of the child. adapters: the program supports LoRA adapters."""
    return COMPILER_BYTES + _FOR_ADAPTERS * adapters


def program_of(design: Design, progress: Callable[[float], None] | None = None) -> Program:
    """The design's program, generated in a child process if the cache lacks it.

    Raises EngineError if TVM's compiler fails, MissingExtraError if there is none, EdgeError if the cache folder
    cannot be written.
    """
    make = functools.partial(_make, design, progress)
    path = cache.find_or_make("kernels", _key(design), ".json", make, about=design.about())
    return Program.from_json(path.read_text(encoding="utf-8"))


def find_program(design: Design) -> Program | None:
    """The design's program if the cache has it."""
    path = cache.find("kernels", _key(design), ".json")
    return Program.from_json(path.read_text(encoding="utf-8")) if path else None


def _make(design: Design, progress: Callable[[float], None] | None, out: Path) -> None:
    if not is_installed():
        raise MissingExtraError("apache-tvm", "tvm")
    request = {"design": base64.b64encode(pickle.dumps(design)).decode(), "out": str(out)}
    run_child(
        "edge.backends.tvm.gpu.compiled", request, lambda said: progress(said["done"]) if progress else None,
        timeout=_TIMEOUT_S, failure="TVM's compiler failed (--backend=cpu runs the model on the CPU)",
        takes=compiler_bytes(adapters=design.adapters.rank > 0), purpose="makes kernels",
    )  # fmt: skip


def _key(design: Design) -> str:
    """A hash of everything that the kernels depend on."""
    return hashlib.sha256(f"{design!r}\n{source_hash(*_SOURCES)}\n{compiler_size()}".encode()).hexdigest()[:32]


def _compile(request: Any, say: Say) -> None:
    from edge.backends.tvm.cpu.lowering import import_compiler

    import_compiler()
    from edge.backends.tvm.gpu.generator import generate

    say({"done": _IMPORTED})
    design: Design = pickle.loads(base64.b64decode(request["design"]))  # from our parent
    Path(request["out"]).write_text(generate(design).to_json(), encoding="utf-8")


if __name__ == "__main__":
    serve(_compile)

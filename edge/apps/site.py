"""A bundle for web pages: a static folder with a chat page, a JavaScript package, and WebAssembly modules.

index.html page.js page.css sw.js …   the page
chat/                                 its conversation, shared with the page of `edge serve`
edge/                                 the package, and a module for each instruction set
model.edge                            weights, tokenizer, chat template and plan
model.gpu                             with --gpu: the weights as a GPU reads them; its programs are edge/gpu.bin
manifest.json                         with "web": see `describe_site`
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge.apps.gpu_programs import GPUPrograms, mapped_bytes
from edge.apps.module import PAGE, initial_pages, make_modules
from edge.apps.sections.model_file import HEADER
from edge.backends.tvm.design import Design
from edge.plan.plan import Plan

_WEB = Path(__file__).parent / "web"
CHAT = _WEB / "chat"  # scripts and styles that the page shares with the server's
HEADERS_FILE = _WEB / "page" / "_headers"
_PACKAGE, _MODULE = "edge", "edge-{}.wasm"
_PROGRAMS, _GPU_WEIGHTS = f"{_PACKAGE}/gpu.bin", "model.gpu"
PIECE = 4 << 20  # bytes of model.edge that are fetched and checked at once


def write_site(designs: Sequence[Design], trusted: str, folder: Path, tell: Callable[[float], None]) -> Path:
    """Write all files but model.edge and manifest.json. Returns the folder where model.edge belongs.

    Raises EngineError if a compiler fails, MissingExtraError without TVM or a linker.
    """
    shutil.copytree(_WEB / "page", folder, dirs_exist_ok=True)
    shutil.copytree(CHAT, folder / CHAT.name)
    write_package(designs, trusted, folder, tell)
    return folder


def write_package(designs: Sequence[Design], trusted: str, folder: Path, tell: Callable[[float], None]) -> None:
    """Write the JavaScript package and its modules alone. Raises as `write_site`."""
    package = folder / _PACKAGE
    shutil.copytree(_WEB / "package", package)
    make_modules(designs, package, tables={"trusted.c": trusted}, progress=tell)


def write_gpu(programs: GPUPrograms, folder: Path) -> None:
    """Write the programs and the weights for a page's GPU."""
    (folder / _PROGRAMS).write_bytes(programs.section)
    with open(folder / _GPU_WEIGHTS, "wb") as out:
        programs.write_weights(out, 0)


def describe_gpu_files(programs: GPUPrograms, folder: Path, plan: Plan) -> dict[str, Any]:
    """Part `gpu` of `describe_site`: both files, SHA-256 of the weights' pieces, and the bytes of all buffers."""
    path = folder / _GPU_WEIGHTS
    return {
        "programs": _PROGRAMS, "weights": _GPU_WEIGHTS, "bytes": path.stat().st_size, "piece": PIECE,
        "pieces": _hashes(path),
        "memory": sum(programs.bytes().values()) + mapped_bytes(programs.model.spec, plan.config),
    }  # fmt: skip


def describe_ears(path: Path) -> dict[str, Any]:
    """Part `ears` of `describe_site`: the encoder's file, and SHA-256 of its pieces."""
    size = path.stat().st_size
    return {"model": path.name, "bytes": size, "resident": size, "piece": PIECE, "pieces": _hashes(path)}


def describe_site(folder: Path, model: Path, isas: Sequence[str], plan: Plan) -> dict[str, Any]:
    """The manifest's part `web`, which the package reads: the model's file, its bytes, how many of them the engine
    keeps in memory (`resident`), and SHA-256 of its pieces of `piece` bytes; the module of each instruction set, the
    best first; the engine's memory in pages of 64 KiB; and an empty hash of the manifest's own text, for `seal`.
    """
    modules = {isa: f"{_PACKAGE}/{_MODULE.format(isa)}" for isa in isas}
    with model.open("rb") as file:
        (header,) = np.frombuffer(file.read(HEADER.itemsize), HEADER)
    return {
        "model": model.relative_to(folder).as_posix(),
        "bytes": model.stat().st_size,
        "resident": int(header["resident"]),
        "piece": PIECE,
        "pieces": _hashes(model),
        "modules": modules,
        "sha256": "",
        "memory": {
            "initial": max(initial_pages((folder / path).read_bytes()) for path in modules.values()),
            "maximum": (plan.bytes.total + plan.bytes.reserve) // PAGE,
        },
    }


def _hashes(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [hashlib.sha256(piece).hexdigest() for piece in iter(lambda: file.read(PIECE), b"")]

"""The child process that compiles and links a pass: some seconds, once per design.

TVM's compiler runs in a process of its own, which returns its memory at exit. `compiled.py` sends the request through
`edge.devices.child`: {"design": JSON, "frugal": bool, "out": [IMAGE] or [IMAGE, OBJECT]}, of an exported design
[OBJECT]. OBJECT is an object file for other linkers. Messages are {"done": fraction of the work}.

A frugal child compiles one unit at a time, and evicts TVM's code in between: of its 200 MiB, 140 are pages of that
library. A freshly installed library lies in the page cache in large pieces, which are mapped whole: 80 MiB more. So it
is evicted from the page cache first.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge.backends.tvm.design import Design
from edge.devices.child import Say, serve
from edge.devices.host import usable_cores
from edge.devices.memory import release_code, release_free_memory

_AT_ONCE = 4  # units; with 8, Gemma 4's take 301 MiB instead of 275
_IMPORTED = 0.2  # share of the work that importing TVM is


def compile_pass(request: Any, say: Say) -> None:
    from edge.backends.tvm.cpu.lowering import compile_object, import_compiler

    frugal = request["frugal"]

    def tidy() -> None:
        if frugal:
            release_free_memory()
            release_code()

    if frugal:
        evict_library()
    tidy()
    import_compiler()
    tidy()
    from edge.backends.tvm.cpu.generator import build
    from edge.backends.tvm.cpu.linker import link

    say({"done": _IMPORTED})
    design = Design.from_json(request["design"])
    program = build(design)
    image, *wanted = map(Path, request["out"])
    if design.exported:
        image.write_bytes(compile_object(program.entries, program.functions, design.target))
        return
    if wanted:  # a single object file, which takes a single thread
        objects = [compile_object(program.entries, program.functions, design.target)]
        wanted[0].write_bytes(objects[0])
    else:
        objects = []

        def compile_part(entries: dict[str, Any], functions: dict[str, Any]) -> bytes:
            tidy()
            return compile_object(entries, functions, design.target)

        at_once = 1 if frugal else min(_AT_ONCE, usable_cores())
        with ThreadPoolExecutor(at_once) as pool:  # TVM and LLVM release Python's lock
            parts = [pool.submit(compile_part, *part) for part in program.parts()]
            for done, _ in enumerate(as_completed(parts), 1):
                say({"done": _IMPORTED + (1 - _IMPORTED) * done / len(parts)})
            objects = [part.result() for part in parts]
    image.write_bytes(link(objects))


def evict_library() -> None:
    """Evict TVM's compiler from the page cache, unless other processes have mapped it."""
    spec = find_spec("tvm")
    if spec is None or spec.origin is None or not hasattr(os, "posix_fadvise"):
        return
    for path in (Path(spec.origin).parent / "lib").glob("libtvm_*"):
        with suppress(OSError), open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages cannot be evicted
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    serve(compile_pass)

"""The program that compiles and links a pass. It takes about 300 MiB and some seconds, once per design.

TVM's compiler has a process of its own, so that its memory does not count against a run's budget. `compiled.py` sends
the request through `edge.devices.child`: {"design": JSON, "out": [IMAGE] or [IMAGE, OBJECT]}, of an embedded design
[OBJECT]. OBJECT is an object file for other linkers. Messages are {"done": the share of the work}.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from edge.backends.tvm.design import Design
from edge.devices.child import Say, serve
from edge.devices.host import usable_cores

_IMPORTED = 0.2  # share of the work that importing TVM is


def compile_pass(request: Any, say: Say) -> None:
    from edge.backends.tvm.cpu.lowering import compile_object, import_compiler

    import_compiler()
    from edge.backends.tvm.cpu.elf import link
    from edge.backends.tvm.cpu.generator import build

    say({"done": _IMPORTED})
    design = Design.from_json(request["design"])
    program = build(design)
    image, *wanted = map(Path, request["out"])
    if design.embedded:
        image.write_bytes(compile_object(program.entries, program.functions, design.target))
        return
    if wanted:  # a single object file, which takes a single thread
        objects = [compile_object(program.entries, program.functions, design.target)]
        wanted[0].write_bytes(objects[0])
    else:
        objects = []
        with ThreadPoolExecutor(usable_cores()) as pool:  # TVM and LLVM release Python's lock
            parts = [pool.submit(compile_object, *part, design.target) for part in program.parts()]
            for done, _ in enumerate(as_completed(parts), 1):
                say({"done": _IMPORTED + (1 - _IMPORTED) * done / len(parts)})
            objects = [part.result() for part in parts]
    image.write_bytes(link(objects))


if __name__ == "__main__":
    serve(compile_pass)

"""Compile and link a pass, as a program of its own: TVM's compiler never enters the process whose memory is
promised. It takes about 300 MiB and some seconds, once per design.

`compiled.py` asks it by `edge.devices.child`: {"design": JSON, "out": [IMAGE] or [IMAGE, OBJECT]}. The design says for
which machine; OBJECT is a file that a linker takes. Messages are {"done": the share of the work}.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from edge.backends.tvm.design import Design
from edge.devices.child import Say, serve
from edge.devices.host import usable_cores

_IMPORTED = 0.2  # of the work, when TVM is there


def compile_pass(request: Any, say: Say) -> None:
    from edge.backends.tvm.cpu.lowering import compile_object, import_compiler

    import_compiler()
    from edge.backends.tvm.cpu.elf import link
    from edge.backends.tvm.cpu.generator import build

    say({"done": _IMPORTED})
    design = Design.from_json(request["design"])
    program = build(design)
    image, *wanted = map(Path, request["out"])
    if wanted:  # one file, for one thread
        objects = [compile_object(program.entries, program.functions, design.target)]
        wanted[0].write_bytes(objects[0])
    else:
        objects = []
        with ThreadPoolExecutor(usable_cores()) as pool:  # TVM and LLVM run outside of Python's lock
            parts = [pool.submit(compile_object, *part, design.target) for part in program.parts()]
            for done, _ in enumerate(as_completed(parts), 1):
                say({"done": _IMPORTED + (1 - _IMPORTED) * done / len(parts)})
            objects = [part.result() for part in parts]
    image.write_bytes(link(objects))


if __name__ == "__main__":
    serve(compile_pass)

"""Compile and link a pass, as a program of its own: TVM's compiler never enters the process whose memory is
promised. It takes about 400 MiB and some seconds, once per design.

`runtime.py` asks it by `edge.devices.child`: {"design": JSON, "out": [IMAGE] or [IMAGE, OBJECT]}. The design says for
which machine; OBJECT is what a linker takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge.backends.tvm.compiler.design import Design
from edge.devices.child import serve
from edge.devices.output import work_folder


def compile_pass(request: Any) -> None:
    from tvm import compile as compile_module
    from tvm.ir.transform import PassContext
    from tvm.target import Target

    from edge.backends.tvm.cpu.generator import build
    from edge.backends.tvm.cpu.linking import link

    design = Design.from_json(request["design"])
    # Storage rewriting would merge registers into arrays too large for the stack, which come from a slow allocator.
    with PassContext(config={"tirx.disable_storage_rewrite": True}):
        executable = compile_module(build(design), target=Target(design.target.llvm))
    image, *wanted = map(Path, request["out"])
    with work_folder() as folder:
        written = folder / "pass.o"
        executable.mod.write_to_file(str(written), "o")
        compiled = written.read_bytes()
    image.write_bytes(link(compiled))
    for path in wanted:
        path.write_bytes(compiled)


if __name__ == "__main__":
    serve(lambda request, say: compile_pass(request))

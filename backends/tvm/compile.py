"""Compile and link a pass, as a program of its own: TVM's compiler never enters the process whose memory is
promised. It takes about 400 MiB and some seconds, once per design; `runtime.py` calls it.

    python -m edge.backends.tvm.compile IMAGE [OBJECT] < design.json

The design says for which machine; OBJECT is what a linker takes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from edge.backends.tvm.design import Design


def main() -> None:
    from tvm import compile as compile_module
    from tvm.ir.transform import PassContext
    from tvm.target import Target

    from edge.backends.tvm.generator import build
    from edge.backends.tvm.linking import link

    design = Design.from_json(sys.stdin.read())
    # Storage rewriting would merge registers into arrays too large for the stack, which come from a slow allocator.
    with PassContext(config={"tirx.disable_storage_rewrite": True}):
        executable = compile_module(build(design), target=Target(design.target.llvm))
    image, *wanted = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "pass.o"
        executable.mod.write_to_file(str(written), "o")
        compiled = written.read_bytes()
    image.write_bytes(link(compiled))
    for path in wanted:
        path.write_bytes(compiled)


if __name__ == "__main__":
    main()

"""Compile a pass to an object file, as a program of its own: TVM's compiler never enters the process whose memory is
promised. It takes about 400 MiB and some seconds, once per design; `runtime.py` calls it.

    python -m edge.backends.tvm.compile OUT.o < design.json
"""

from __future__ import annotations

import sys

from edge.backends.tvm.design import Design


def main() -> None:
    from tvm import compile as compile_module
    from tvm.ir.transform import PassContext
    from tvm.target import Target

    from edge.backends.tvm.generator import build

    design = Design.from_json(sys.stdin.read())
    # Storage rewriting would merge registers into arrays too large for the stack, which come from a slow allocator.
    with PassContext(config={"tirx.disable_storage_rewrite": True}):
        executable = compile_module(build(design), target=Target(design.target.llvm))
    executable.mod.write_to_file(sys.argv[1], "o")


if __name__ == "__main__":
    main()

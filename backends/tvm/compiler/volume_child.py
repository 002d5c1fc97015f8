"""The child process that compiles the designs of a volume (`volume.py`), for `catalog.py`.

The request is {"designs": [[key, JSON], …], "out": path}, messages are {"done": fraction of the work}. Functions whose
code is the same are compiled once, for the first design that has them: products for rows of several dtypes, attention
of files that differ in their block types. Designs come with the least instruction set of a family first, whose code
the others run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from edge.backends.tvm.compiler.volume import write_volume
from edge.backends.tvm.design import Design
from edge.devices.child import Say, serve
from edge.devices.host import usable_cores


def compile_volume(request: Any, say: Say) -> None:
    from edge.backends.tvm.cpu.lowering import compile_object, import_compiler

    import_compiler()
    from tvm.tirx import AttrStmt, PrimFunc, Var
    from tvm.tirx.analysis import undefined_vars
    from tvm_ffi import structural_hash

    from edge.backends.tvm.cpu.generator import build
    from edge.backends.tvm.cpu.linker import Piece, read_object

    def piece(entries: dict[str, Any], functions: dict[str, Any], design: Design) -> Piece:
        return read_object(compile_object(entries, functions, design.target))

    def code(function: Any) -> int:
        """A hash of what a function's machine code depends on: not of the types of pointers that it does not use, nor
        of the LLVM code that it imports, which it calls by name and which all of a family that have it share."""
        body = function.body
        while isinstance(body, AttrStmt):
            body = body.body
        used = {each.name for each in undefined_vars(body, [])}
        params = [each if each.name in used else Var(each.name, "int32") for each in function.params]
        return int(structural_hash(PrimFunc(params, body, function.ret_type, function.attrs)))

    compiling = dict[Any, Future[Piece]]()
    orders = dict[str, list[Any]]()
    with ThreadPoolExecutor(usable_cores()) as pool:  # TVM and LLVM release Python's lock
        for key, text in request["designs"]:
            design = Design.from_json(text)
            orders[key] = []
            for part in build(design).parts():
                unit = tuple((name, code(function)) for each in part for name, function in each.items())
                if unit not in compiling:
                    compiling[unit] = pool.submit(piece, *part, design)
                orders[key].append(unit)
        for done, future in enumerate(as_completed(compiling.values()), 1):
            future.result()
            say({"done": done / len(compiling)})
    volume = write_volume({key: [compiling[unit].result() for unit in units] for key, units in orders.items()})
    Path(request["out"]).write_bytes(volume)


if __name__ == "__main__":
    serve(compile_volume)

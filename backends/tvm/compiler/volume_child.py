"""The child process that compiles the designs of a volume (`volume.py`), for `catalog.py`.

The request is {"designs": [[key, JSON], …], "out": path}, messages are {"done": fraction of the work}. Functions that
several designs have in common, such as attention of files that differ in their block types, are compiled once.
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
    from tvm_ffi import structural_hash

    from edge.backends.tvm.cpu.generator import build
    from edge.backends.tvm.cpu.linker import Piece, read_object

    def piece(entries: dict[str, Any], functions: dict[str, Any], design: Design) -> Piece:
        return read_object(compile_object(entries, functions, design.target))

    compiling = dict[Any, Future[Piece]]()
    orders = dict[str, list[Any]]()
    with ThreadPoolExecutor(usable_cores()) as pool:  # TVM and LLVM release Python's lock
        for key, text in request["designs"]:
            design = Design.from_json(text)
            orders[key] = []
            for part in build(design).parts():
                hashes = [(name, structural_hash(function)) for each in part for name, function in each.items()]
                unit = (design.target.name, *hashes)
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

"""Machine code of small models without LLVM's optimizations, which are two thirds of what compiling them costs, and
without TVM's simplifier, which is half of the rest.

Kernels of software GPUs, whose drivers compile for longer than they run, work on one row of a matrix and one query head
at a time: 0.6 of the time. `test_gpu_kernels.py` and `test_gpu_rows.py` have all sizes.

Processes that compile for tests call `shorten`, those that choose designs `shorten_kernels`. Code of real models, and
all of `make test-all`, is what users have.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from edge.backends.tvm.gpu.hosts import Adapter
    from edge.backends.tvm.targets import Target

QUICK = "EDGE_TEST_QUICK_CODE"
_SMALL = 256  # values of a token's state: golden models have fewer, real ones more
# ELF's types of sections: variables that begin as zeros, and functions that a loader would call.
_VARIABLES, _SYMBOLS, _RELOCATIONS = (8, 14), 2, 4
_EXCLUDED = 1 << 31  # among a section's flags: linkers leave it out
_SECTION = struct.Struct("<IIQQQQIIQQ")


def shorten() -> None:
    if os.environ.get(QUICK) != "1":
        return
    from tvm.ir.transform import Sequential
    from tvm.tirx import transform

    from edge.backends.tvm.cpu import generator, lowering
    from edge.backends.tvm.design import Design

    read, compile_object, simplify = Design.from_json, lowering.compile_object, transform.StmtSimplify
    build = generator.build

    def build_small(design: Design) -> generator.Program:
        """Units in one object file, since each costs 5 ms; but apart in volumes, whose designs share them and all run
        drafts."""
        program = build(design)
        is_large = design.target.llvm.get("opt-level", 2) > 1
        return program if is_large or design.batches else replace(program, units={"pass": program.functions})

    def read_small(text: str) -> Design:
        design = read(text)
        if design.shape.hidden > _SMALL or design.target.machine == "wasm32":
            return design
        is_elf = "linux" in design.target.llvm["mtriple"] and not design.target.is_text
        level = int(design.exported and not is_elf)  # in apps, where only an optimizer removes what TVM declares
        return replace(design, target=replace(design.target, llvm={**design.target.llvm, "opt-level": level}))

    def compile_code(entries: Mapping[str, Any], functions: Mapping[str, Any], target: Target) -> bytes:
        transform.StmtSimplify = (lambda: Sequential([])) if target.llvm.get("opt-level", 2) < 2 else simplify
        made = compile_object(entries, functions, target)
        return _without_variables(made) if made.startswith(b"\x7fELF") else made

    Design.from_json = staticmethod(read_small)  # type: ignore[method-assign, assignment]
    lowering.compile_object, generator.build = compile_code, build_small


def shorten_kernels(patch: pytest.MonkeyPatch) -> None:
    if os.environ.get(QUICK) != "1":
        return
    from edge.backends.tvm.gpu.design import Tuning

    usual = Tuning.of

    def choose(adapter: Adapter) -> Tuning:
        return replace(usual(adapter), rows=1, heads=1) if adapter.kind == "cpu" else usual(adapter)

    patch.setattr(Tuning, "of", choose)


def _without_variables(object_file: bytes) -> bytes:
    """TVM declares some that no code uses; an optimizer removes them, and linkers of apps and ours refuse them."""
    found = bytearray(object_file)
    (start,), (size, count) = struct.unpack_from("<Q", found, 0x28), struct.unpack_from("<HH", found, 0x3A)
    headers = {at: _SECTION.unpack_from(found, at) for at in range(start, start + size * count, size)}
    emptied = {number for number, each in enumerate(headers.values()) if each[1] in _VARIABLES}
    for number, (at, (_, kind, flags, _, offset, length, _, about, _, entry)) in enumerate(headers.items()):
        if number in emptied or (kind == _RELOCATIONS and about in emptied):
            struct.pack_into("<Q", found, at + 0x20, 0)
            struct.pack_into("<Q", found, at + 8, flags | _EXCLUDED)
        elif kind == _SYMBOLS:  # instead of those that nothing uses any more, one that is used twice
            places = range(offset + about * entry, offset + length, entry)  # of symbols that are not local
            outside = [found[each : each + entry] for each in places if not _section_of(found, each)]
            for each in places if outside else ():
                if _section_of(found, each) in emptied:
                    found[each : each + entry] = outside[0]
    return bytes(found)


def _section_of(found: bytearray, symbol: int) -> int:
    return int(struct.unpack_from("<H", found, symbol + 6)[0])

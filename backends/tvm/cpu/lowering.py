"""The part of TVM's compiler that the native engine needs: from functions of the generator to an object file.

TVM's own pipeline is made for schedules and GPUs. It spends nine tenths of its time in passes that change nothing in
functions like ours, whose loops are written out. So these go through the few other passes.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

from edge.backends.tvm.targets import Target
from edge.devices.output import work_folder


class _Absent(types.ModuleType):
    """A stand-in for a part of TVM that is not imported."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def import_compiler() -> None:
    """Import TVM without the parts that compiling for a CPU does not need, which take two thirds of the import's time.

    For processes that only compile: those parts do not work afterwards.
    """
    os.environ["TVM_DEVICE_BACKEND_AUTOLOAD"] = "0"  # CUDA's, Vulkan's …
    for name in ("tvm.relax", "tvm.runtime.disco", "tvm.te"):
        sys.modules.setdefault(name, _Absent(name))
    # TVM imports PyTorch wherever it is installed: 400 MiB that no plan counts.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    import tvm  # noqa: F401


def compile_object(entries: Mapping[str, Any], functions: Mapping[str, Any], target: Target) -> bytes:
    """The object file of TVM functions: entries have TVM's calling convention, the others C's.

    It is assembly text if the target says so, as for Apple's systems, whose assembler notes the platform.
    """
    from tvm import IRModule, get_global_func
    from tvm.ir.transform import PassContext, Sequential
    from tvm.target import Target as Machine
    from tvm.tirx import transform

    machine = Machine(target.llvm)
    bind = transform.BindTarget(machine.with_host(machine))
    with PassContext():
        module = transform.MakePackedAPI()(bind(IRModule(entries)))
        module.update(bind(IRModule(functions)))
        module = Sequential([
            transform.StmtSimplify(),
            get_global_func("s_tir.transform.RewriteUnsafeSelect")(),
            transform.LowerTVMBuiltin(),
            transform.LowerIntrin(),
        ])(module)  # fmt: skip
        compiled = get_global_func("target.build.llvm")(module, machine)
    with work_folder() as folder:
        path = folder / f"pass.{'s' if target.is_text else 'o'}"
        compiled.write_to_file(str(path), path.suffix[1:])
        if not target.is_text:
            return _unexported(_renamed(path.read_bytes()))
        return (_cleaned if target.is_apple else _cleaned_elf)(path.read_text()).encode()


# TVM adds functions that convert float16 to every file, under the compiler library's names but with another calling
# convention. In an app they would take the place of the library's.
_CONVERSIONS = {b"__truncsfhf2": b"tvm_truncsf2", b"__extendhfsf2": b"tvm_extendsf2"}


def _renamed(object_file: bytes) -> bytes:
    for name, other in _CONVERSIONS.items():
        object_file = object_file.replace(b"\0%b\0" % name, b"\0%b\0" % other)
    return object_file


def _unexported(object_file: bytes) -> bytes:
    """Remove TVM's directives to linkers for Windows, which would export each of the functions from a DLL."""
    return re.sub(rb"[ \0]-export:edge_\w+", lambda found: b" " * len(found[0]), object_file)


def _cleaned(assembly: str) -> str:
    """Mach-O assembly in which those functions are private, without information for debuggers and the platform."""
    code = assembly.partition("\t.section\t__DWARF")[0] + ".subsections_via_symbols\n"
    names = "|".join(f"_{name.decode()}" for name in _CONVERSIONS)
    return re.sub(rf"^\t\.(loc|file|build_version|(globl|weak_definition)\t({names})\b).*\n", "", code, flags=re.M)


def _cleaned_elf(assembly: str) -> str:
    """ELF assembly, likewise."""
    code = re.split(r"^\t\.section\t\.debug", assembly, maxsplit=1, flags=re.M)[0]
    for name, other in _CONVERSIONS.items():
        code = re.sub(rf"^\t\.(globl|weak)\t{name.decode()}\b.*\n", "", code, flags=re.M)
        code = re.sub(rf"\b{name.decode()}\b", other.decode(), code)
    code = re.sub(r"^\t\.(loc|file|cfi_\w+)\b.*\n|[ \t]*# .*$", "", code, flags=re.M)  # comments of x86, too
    return code + '\t.section\t".note.GNU-stack","",@progbits\n'

"""The part of TVM's compiler that GPUs need: from a function of the generator to source text.

TVM's own pipeline splits a function into a host part and a device part, and reorders the device's parameters. Ours are
device functions from the start: parameters keep their order and names.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from tvm import IRModule, get_global_func, s_tir
from tvm.ir.transform import PassContext, Sequential
from tvm.target import Target as Machine
from tvm.tirx import transform

from edge.backends.tvm.gpu.intrinsics import PRELUDES, WITHOUT_PRELUDE
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.program import Kernel

_MACHINES: dict[str, dict[str, Any]] = {
    "wgsl": {"kind": "webgpu", "max_num_threads": 256, "max_shared_memory_per_block": 16384},
    "opencl": {"kind": "opencl", "max_num_threads": 256, "max_shared_memory_per_block": 16384},
    "cuda": {"kind": "cuda", "arch": "sm_70", "max_num_threads": 256},
    "metal": {"kind": "metal", "max_num_threads": 256},
}
_CUDA_HEAD = """typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef long long int64_t;
typedef unsigned long long uint64_t;
"""
_WEIGHTS = ("w4", "w1", "residual_w4", "rest", "r4", "r1", "lora4")  # buffers that no kernel writes
_DEVICE_KERNEL = 2  # TVM's calling convention of kernels


def lower(built: Built, language: str) -> Kernel:
    """The kernel's source in one of `program.LANGUAGES`."""
    if language == "cuda":
        import_module("tvm.backend.cuda.cpp")  # text of functions, which the code generator looks up by name
    machine = Machine(_MACHINES[language])
    with PassContext():
        module = transform.BindTarget(Machine(_MACHINES[language], host="llvm"))(IRModule({built.name: built.function}))
        module = Sequential([
            s_tir.transform.UnifyThreadBinding(),
            s_tir.transform.LowerOpaqueBlock(),
            transform.FlattenBuffer(),
            transform.NarrowDataType(32),
            transform.VectorizeLoop(True),
            transform.UnrollLoop(),
            transform.StmtSimplify(),
        ])(module)  # fmt: skip
        function = module[built.name].with_attr({
            "target": machine,
            "calling_conv": _DEVICE_KERNEL,
            "tirx.is_global_func": True,
            "tirx.kernel_launch_params": ["blockIdx.x", "blockIdx.y", "threadIdx.x"],
        })  # fmt: skip
        module = transform.LowerIntrin()(IRModule({built.name: function}))
        source = get_global_func(f"target.build.{machine.kind.name}")(module, machine).inspect_source()
    return Kernel(
        built.name, _with_prelude(_adapted(source, language, built), language), (built.threads, 1),
        tuple(built.buffers), tuple(built.written), tuple(built.scalars), built.shared,
    )  # fmt: skip


def _adapted(source: str, language: str, built: Built) -> str:
    """Add what TVM omits. OpenCL and CUDA: read-only buffers become const, so that loads go through read-only caches.
    OpenCL and Metal: the workgroup size, which their compilers schedule for. CUDA: TVM's header includes files that
    NVRTC lacks without CUDA's own folder. A kernel waits at its start for the previous one, which may still run; hence
    only weights go through read-only caches (by restricted pointers to const)."""
    if language == "metal":
        return source.replace("kernel void", f"[[max_total_threads_per_threadgroup({built.threads})]]\nkernel void")
    if language not in ("cuda", "opencl"):
        return source
    for name in set(built.buffers) - set(built.written):
        restricted = "" if language == "cuda" and name not in _WEIGHTS else r" \2"
        source = re.sub(rf"(\w+\*) ((?:__)?restrict(?:__)?) {name}\b", rf"const \1{restricted} {name}", source)
    if language == "cuda":
        declaration, start, body = source[source.index('extern "C" __global__') :].partition(") {\n")
        waits = "" if "edge_begin()" in body else "  edge_begin();\n"
        return f"{_CUDA_HEAD}{declaration}{start}  edge_overlap();\n{waits}{body}"
    return source.replace("__kernel", f"__kernel __attribute__((reqd_work_group_size({built.threads}, 1, 1)))")


def _with_prelude(source: str, language: str) -> str:
    """Prepend the functions of `intrinsics.py` that the kernel calls."""
    if language == "opencl":  # TVM writes vectors of several scalars as C++ does
        source = re.sub(r"\b(float4|uint4)\(", r"(\1)(", source)
    if language == "metal":  # and conversions of vectors as C does, where they mean bits
        source = re.sub(r"\((float4|int4|uint4)\)\(", r"\1(", source)
    used = [text for name, text in PRELUDES[language].items() if re.search(rf"\b{name}\b", source)]
    head = WITHOUT_PRELUDE.search(source) if language == "metal" else None
    if head:  # after the includes
        return source[: head.end()] + "".join(used) + source[head.end() :]
    return "".join(used) + source

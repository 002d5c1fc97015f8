"""A device that runs CUDA's kernels on the CPU: compiled by g++, tensor cores emulated (`cuda.h`)."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.tvm.gpu.hosts import Adapter, Limits
from edge.backends.tvm.gpu.intrinsics import PRELUDES
from edge.backends.tvm.gpu.program import Dispatch, Kernel
from edge.types import AnyArray

_HEADER = Path(__file__).parent / "cuda.h"
_LIMITS = Limits(1 << 30, 1 << 30, 256, 1024, 48 << 10, 1 << 16)


def has_compiler() -> bool:
    return shutil.which("g++") is not None


class Emulator:
    """The part of `hosts.Device` that tests of kernels need. folder: for compiled kernels."""

    def __init__(self, folder: Path) -> None:
        self.adapter = Adapter(
            "emulator", "cuda", 0, "any", "", "", "discrete", False, None, _LIMITS, frozenset({"mma"})
        )
        self._folder = folder
        self._kernels = dict[str, tuple[Kernel, Any]]()

    def create(self, nbytes: int) -> AnyArray:
        return np.zeros(nbytes, np.uint8)

    def free(self, buffer: AnyArray) -> None:
        pass

    def write(self, buffer: AnyArray, offset: int, data: AnyArray) -> None:
        buffer[offset : offset + data.nbytes] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)

    def read(self, buffer: AnyArray, offset: int, nbytes: int) -> AnyArray:
        return buffer[offset : offset + nbytes].copy()

    def prepare(self, kernels: Mapping[str, Kernel]) -> None:
        self._kernels |= {name: (kernel, _compiled(self._folder, kernel)) for name, kernel in kernels.items()}

    def record(self, dispatches: Sequence[Dispatch], buffers: Mapping[str, AnyArray]) -> Any:
        return dispatches, buffers

    def run(self, recording: Any, tokens: int = 1) -> None:
        dispatches, buffers = recording
        for each in dispatches:
            kernel, library = self._kernels[each.kernel]
            values: list[Any] = [
                ctypes.c_void_p(buffers[part.buffer].ctypes.data + part.offset) for part in each.slices
            ]
            values += map(ctypes.c_int32, each.scalars)
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            assert library.launch(pointers, *each.workgroups(tokens), kernel.threads[0]) == 0, "threads wait for ever"


def _compiled(folder: Path, kernel: Kernel) -> Any:
    source = kernel.source
    for prelude in PRELUDES["cuda"].values():
        source = source.replace(prelude, "")
    source = f"""#include "{_HEADER}"
{source}
extern "C" int launch(void *const *given, int groups_x, int groups_y, int count) {{
    parameters = given;
    return run([] {{ call({kernel.name}); }}, groups_x, groups_y, count);
}}
"""
    path = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
    if not path.with_suffix(".so").exists():
        path.with_suffix(".cpp").write_text(source)
        options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-o"]
        command = ["g++", *options, path.with_suffix(".so"), path.with_suffix(".cpp")]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(path.with_suffix(".so")))

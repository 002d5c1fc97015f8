"""Host for GPUs through OpenCL, by pyopencl: Adreno and Mali in phones, and any other driver.

A recorded dispatch is a kernel object with its arguments set once, and a prepared call of clEnqueueNDRangeKernel: a run
costs the host about a microsecond for each. Recordings are not command buffers (cl_khr_command_buffer), which the
drivers of Adreno and Mali lack.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from edge.backends.tvm.gpu.hosts import Adapter, Limits
from edge.backends.tvm.gpu.hosts.binaries import find_binary, has_binary, keep_binary
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.errors import EngineError
from edge.types import AnyArray

_STAGED = 1 << 20  # bytes of writes that may be under way; bigger ones are waited for
_OPTIONS = ["-cl-std=CL1.2", "-cl-mad-enable"]
_POCL_METHOD = "POCL_WORK_GROUP_METHOD"
_POCL = "Portable Computing Language"  # its platform's name
# Of Clang and LLVM beyond what plans count of drivers: together measured up to 260 MiB with pocl 3.1.
POCL_COMPILER_BYTES = 200 << 20
_WORST = 1 << 31  # OpenCL names no limit of workgroups in a dimension; indices are int32


def adapters() -> list[Adapter]:
    return [_adapter(index, platform, device) for index, (platform, device) in enumerate(_devices())]


def missing() -> str | None:
    """Why there are no adapters; None if there are."""
    try:
        import pyopencl
    except Exception as error:  # each package has its own error for a library that does not load
        absent = isinstance(error, ModuleNotFoundError)
        return "pyopencl is not installed: pip install 'edge-runtime[opencl]'" if absent else f"pyopencl: {error}"
    try:
        platforms = pyopencl.get_platforms()
    except Exception:
        platforms = []
    if not platforms:
        return "libOpenCL finds no driver: none is installed, or /etc/OpenCL/vendors does not name it"
    return None if _devices() else f"OpenCL's driver {platforms[0].name} has no device"


def open_device(adapter: Adapter) -> OpenCLDevice:
    found = _devices()
    if adapter.index >= len(found):
        raise EngineError(f"OpenCL no longer shows {adapter.name}")
    return OpenCLDevice(adapter, found[adapter.index][1])


def compiling_bytes(adapter: Adapter, kernels: Iterable[Kernel] | None) -> int | None:
    """See `Host`. With a binary, pocl compiles little, even if its own cache is empty."""
    if not adapter.driver.startswith(_POCL):
        return None
    compiler = _compiler(adapter)
    made = kernels is not None and all(has_binary(compiler, each.source) for each in kernels)
    return 0 if made else POCL_COMPILER_BYTES


def _devices() -> list[tuple[Any, Any]]:
    """Platforms and their little-endian devices with a compiler; empty if anything is missing."""
    found = []
    # The default of pocl 3.1, loopvec, vectorizes some loops wrongly.
    os.environ.setdefault(_POCL_METHOD, "loops")
    try:
        import pyopencl as cl

        for platform in cl.get_platforms():
            try:
                devices = platform.get_devices()
            except Exception:  # a platform without devices, or whose driver fails
                continue
            found += [(platform, each) for each in devices if _usable(each)]
    except Exception:  # no pyopencl, no libOpenCL, no driver
        return []
    return found


def _usable(device: Any) -> bool:
    try:
        return bool(device.available and device.compiler_available and device.endian_little)
    except Exception:
        return False


def _adapter(index: int, platform: Any, device: Any) -> Adapter:
    import pyopencl as cl

    kinds = cl.device_type
    unified = bool(device.host_unified_memory)
    kind = "unknown"
    if device.type & kinds.GPU:
        kind = "integrated" if unified else "discrete"
    elif device.type & kinds.CPU:
        kind = "cpu"
    extensions = set(device.extensions.split())
    named = {"f16": "cl_khr_fp16", "dot4": "cl_khr_integer_dot_product", "subgroups": "cl_khr_subgroups"}
    return Adapter(
        host="opencl", language="opencl", index=index, name=device.name.strip(), vendor=device.vendor.strip(),
        driver=f"{platform.name.strip()} {device.driver_version.strip()}", kind=kind, unified=unified,
        memory=None if unified else int(device.global_mem_size),
        limits=Limits(
            binding=int(device.max_mem_alloc_size), buffer=int(device.max_mem_alloc_size),
            buffers=int(device.max_parameter_size) // 8,
            threads=min(int(device.max_work_group_size), int(device.max_work_item_sizes[0])),
            shared=int(device.local_mem_size), groups=_WORST - 1,
        ),
        features=frozenset({name for name, extension in named.items() if extension in extensions} | {"timestamps"}),
    )  # fmt: skip


@dataclass
class _Recorded:
    """A recording."""

    dispatches: tuple[Dispatch, ...]
    kernels: tuple[Any, ...]  # with their arguments set
    threads: tuple[tuple[int, int], ...]
    held: list[Any]  # buffers and sub-buffers, which kernels do not keep alive
    varying: bool  # workgroups depend on the tokens of a run
    tokens: int = 0
    calls: tuple[Callable[[], Any], ...] = ()  # that enqueue everything, for `tokens`


class OpenCLDevice:
    """The `hosts.Device` of OpenCL. Buffers are pyopencl's; a slice is a sub-buffer."""

    def __init__(self, adapter: Adapter, device: Any) -> None:
        import pyopencl as cl

        self.adapter, self.allocated = adapter, 0
        self._cl: Any = cl
        self._programs = dict[str, tuple[Kernel, Any]]()
        self._buffers = dict[int, Any]()  # by their handles
        self._staged, self._staged_bytes = list[Any](), 0  # events of writes; without them pyopencl waits
        self._align = max(1, device.mem_base_addr_align // 8)
        with _said("open"):
            self._context = cl.Context([device])
            self._queue = cl.CommandQueue(self._context)
        self._timing: Any = None  # a queue with profiling, which costs a little
        self._enqueue = _native_enqueue()

    def create(self, nbytes: int) -> Any:
        size, most = max(16, -(-nbytes // 16) * 16), self.adapter.limits.buffer
        if size > most:
            raise EngineError(f"OpenCL could not allocate a buffer of {size} bytes: this device allows {most}")
        with _said(f"allocate a buffer of {size} bytes"):
            buffer = self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, size)
            try:  # drivers allocate when a buffer is used
                self._cl.enqueue_fill_buffer(self._queue, buffer, np.uint32(0), 0, size)
                self._queue.finish()
            except BaseException:
                buffer.release()
                raise
        self._buffers[buffer.int_ptr] = buffer
        self.allocated += size
        return buffer

    def free(self, buffer: Any) -> None:
        if self._buffers.pop(buffer.int_ptr, None) is not None:
            self.allocated -= buffer.size
            buffer.release()

    def write(self, buffer: Any, offset: int, data: AnyArray) -> None:
        whole = np.ascontiguousarray(data)
        if not whole.nbytes:
            return
        wait = whole.nbytes > _STAGED
        if not wait:
            whole = whole.copy()
            if self._staged_bytes + whole.nbytes > _STAGED:
                self._finish()
        with _said("write to a buffer"):
            event = self._cl.enqueue_copy(self._queue, buffer, whole, dst_offset=offset, is_blocking=wait)
        if not wait:
            self._staged.append(event)
            self._staged_bytes += whole.nbytes

    def read(self, buffer: Any, offset: int, nbytes: int) -> AnyArray:
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            with _said("run, or read a buffer"):
                self._cl.enqueue_copy(self._queue, data, buffer, src_offset=offset, is_blocking=True)
        self._finish()
        return data

    def prepare(self, kernels: Mapping[str, Kernel], progress: Callable[[float], None] | None = None) -> None:
        for done, (name, kernel) in enumerate(kernels.items(), 1):
            if name not in self._programs or self._programs[name][0] != kernel:
                with _said(f"compile {name}"):
                    self._programs[name] = kernel, self._built(kernel.source)
            if progress:
                progress(done / len(kernels))

    def record(self, dispatches: Sequence[Dispatch], buffers: Mapping[str, Any]) -> _Recorded:
        kernels, threads, held = list[Any](), list[tuple[int, int]](), dict[tuple[int, int, int], Any]()
        for dispatch in dispatches:
            kernel, program = self._programs[dispatch.kernel]
            with _said(f"prepare {dispatch.kernel}"):
                made = self._cl.Kernel(program, kernel.name)
                parts = [self._part(buffers[each.buffer], each, held) for each in dispatch.slices]
                made.set_args(*parts, *map(np.int32, dispatch.scalars))
            kernels.append(made)
            threads.append(kernel.threads)
        varying = any(each.per for each in dispatches)
        return _Recorded(tuple(dispatches), tuple(kernels), tuple(threads), [*held.values()], varying)

    def run(self, recording: _Recorded, tokens: int = 1, times: int = 1) -> None:
        if not recording.calls or (recording.varying and recording.tokens != tokens):
            recording.calls, recording.tokens = tuple(self._calls(recording, tokens)), tokens
        with _said("run"):
            for _ in range(times):
                for call in recording.calls:
                    code = call()
                    if code:
                        raise EngineError(f"OpenCL could not run a kernel: {self._code(code)}")
                self._queue.flush()

    def time(self, recording: _Recorded, tokens: int = 1) -> list[float]:
        with _said("time"):
            if self._timing is None:
                profiling = self._cl.command_queue_properties.PROFILING_ENABLE
                self._timing = self._cl.CommandQueue(self._context, properties=profiling)
            self._finish()
            events = [
                self._cl.enqueue_nd_range_kernel(self._timing, kernel, *shape)
                for kernel, shape in zip(recording.kernels, _shapes(recording, tokens), strict=True)
            ]
            self._timing.finish()
            return [(each.profile.end - each.profile.start) * 1e-9 for each in events]

    def close(self) -> None:
        for buffer in [*self._buffers.values()]:
            self.free(buffer)
        self._programs.clear()

    def _built(self, source: str) -> Any:
        """The program, from the cache folder if the driver accepts the binary there."""
        compiler = _compiler(self.adapter)
        if binary := find_binary(compiler, source):
            with suppress(self._cl.Error):
                return self._cl.Program(self._context, self._context.devices, [binary]).build(_OPTIONS, cache_dir=False)
        program = self._cl.Program(self._context, source).build(_OPTIONS, cache_dir=False)  # pyopencl's own cache
        with suppress(self._cl.Error):  # some drivers return no binary
            keep_binary(compiler, source, program.get_info(self._cl.program_info.BINARIES)[0])
        return program

    def _finish(self) -> None:
        with _said("run"):
            self._queue.finish()
        self._staged.clear()
        self._staged_bytes = 0

    def _part(self, buffer: Any, part: Slice, held: dict[tuple[int, int, int], Any]) -> Any:
        size = part.size or buffer.size - part.offset
        if part.offset == 0 and size == buffer.size:
            return held.setdefault((buffer.int_ptr, 0, size), buffer)
        if part.offset % self._align:
            raise EngineError(
                f"OpenCL's driver of {self.adapter.name} wants parts of buffers at multiples of {self._align} bytes,"
                f" not at {part.offset}: choose another driver with EDGE_GPU"
            )
        key = buffer.int_ptr, part.offset, size
        if key not in held:
            held[key] = buffer.get_sub_region(part.offset, size)
        return held[key]

    def _calls(self, recording: _Recorded, tokens: int) -> Iterator[Callable[[], Any]]:
        pair = ctypes.c_size_t * 2
        for kernel, (size, group) in zip(recording.kernels, _shapes(recording, tokens), strict=True):
            if self._enqueue is None:
                yield partial(_enqueue_slowly, self._cl, self._queue, kernel, size, group)
                continue
            queue, handle = ctypes.c_void_p(self._queue.int_ptr), ctypes.c_void_p(kernel.int_ptr)
            two, none = ctypes.c_uint(2), ctypes.c_uint(0)
            yield partial(self._enqueue, queue, handle, two, None, pair(*size), pair(*group), none, None, None)

    def _code(self, code: int) -> str:
        return str(self._cl.status_code.to_string(code, f"error {code}"))


def _compiler(adapter: Adapter) -> str:
    """Properties that binaries depend on besides their source."""
    return f"{adapter.key} {' '.join(_OPTIONS)} {os.environ.get(_POCL_METHOD, '')}"


def _shapes(recording: _Recorded, tokens: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Total threads and workgroup size, in x and y, of each dispatch."""
    for dispatch, threads in zip(recording.dispatches, recording.threads, strict=True):
        groups = dispatch.workgroups(tokens)
        yield (groups[0] * threads[0], groups[1] * threads[1]), threads


def _native_enqueue() -> Any:
    """clEnqueueNDRangeKernel from the library that pyopencl has loaded; None where the linker does not find it.

    pyopencl's own function takes a microsecond more: it converts arguments and creates an event.
    """
    import pyopencl

    try:
        return ctypes.CDLL(pyopencl._cl.__file__).clEnqueueNDRangeKernel
    except (AttributeError, OSError):
        return None


def _enqueue_slowly(cl: Any, queue: Any, kernel: Any, size: tuple[int, int], group: tuple[int, int]) -> int:
    cl.enqueue_nd_range_kernel(queue, kernel, size, group)
    return 0


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Convert pyopencl's exceptions into a one-line EngineError."""
    import pyopencl as cl

    try:
        yield
    except cl.MemoryError as error:
        raise EngineError(f"OpenCL could not {what}: the device has not enough memory ({_first(error)})") from None
    except cl.Error as error:
        raise EngineError(f"OpenCL could not {what}: {_first(error)}") from None


def _first(error: Exception) -> str:
    """The first line of a compiler's log that mentions an error, otherwise of the message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = [line for line in lines[1:] if "error" in line.lower()]
    return (wrong or lines or [type(error).__name__])[0]

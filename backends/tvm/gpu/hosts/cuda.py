"""Host for NVIDIA GPUs through CUDA's driver and NVRTC, by cuda-bindings.

A recording is a CUDA graph, captured from ordinary launches once for each number of workgroups that a pass may have,
and replayed by one call. Kernels are compiled for the device's own architecture.

Since compute capability 9.0, a kernel of a graph is launched as soon as all workgroups of the previous kernel run, and
waits for its end (programmatic dependent launch): see `lowering.py` for the kernels' part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from edge.backends.tvm.gpu.hosts import Adapter, Limits
from edge.backends.tvm.gpu.hosts.binaries import find_binary, keep_binary
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.errors import EngineError
from edge.types import AnyArray

_BUFFERS = 256  # parameters may have 4 KiB
_GRAPHS = 8  # of a recording that are kept
_FEATURES = {  # with the compute capability and the version of CUDA that have them
    "f16": (0, 0, 0), "subgroups": (0, 0, 0), "timestamps": (0, 0, 0), "dot4": (6, 1, 0), "mma": (8, 0, 0),
    "overlap": (9, 0, 12030),
}  # fmt: skip


def adapters() -> list[Adapter]:
    try:
        driver = _driver()
        return [_adapter(driver, index) for index in range(_call(driver, "cuDeviceGetCount"))]
    except Exception:  # no package, no libcuda, no device, or a driver that does not fit
        return []


def missing() -> str | None:
    """Why there are no adapters; None if there are."""
    try:
        driver = _driver()
    except ModuleNotFoundError:
        return "cuda-bindings is not installed: pip install 'edge-runtime[cuda]'"
    except EngineError as error:
        return str(error)
    except Exception:
        return "libcuda was not found: NVIDIA's driver is not installed"
    return None if _call(driver, "cuDeviceGetCount") else "CUDA's driver shows no device"


def open_device(adapter: Adapter) -> CudaDevice:
    try:
        driver = _driver()
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"CUDA cannot be opened: {_first(str(error))}") from None
    return CudaDevice(adapter, driver)


def compiling_bytes(_adapter: Adapter, _kernels: Iterable[Kernel] | None) -> int | None:
    """None: not measured."""
    return None


def compile_source(name: str, source: str, architecture: str) -> bytes:
    """Compile by NVRTC to machine code for an architecture such as sm_86, or to PTX for one such as compute_86. Needs
    no GPU.

    Raises EngineError with the compiler's first error.
    """
    try:
        from cuda.bindings import nvrtc

        made = _call(nvrtc, "nvrtcCreateProgram", source.encode(), f"{name}.cu".encode(), 0, [], [])
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"NVRTC cannot be loaded (pip install 'edge-runtime[cuda]'): {_first(str(error))}") from None
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        if nvrtc.nvrtcCompileProgram(made, len(options), options)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_call(nvrtc, "nvrtcGetProgramLogSize", made))
            _call(nvrtc, "nvrtcGetProgramLog", made, log)
            raise EngineError(f"NVRTC could not compile {name}: {_first(log.decode(errors='replace'))}")
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        code = bytearray(_call(nvrtc, f"nvrtcGet{kind}Size", made))
        _call(nvrtc, f"nvrtcGet{kind}", made, code)
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(made)


def _compiled(name: str, source: str, architecture: str) -> bytes:
    """`compile_source`, cached."""
    from cuda.bindings import nvrtc

    compiler = f"NVRTC {'.'.join(map(str, _call(nvrtc, 'nvrtcVersion')))} {architecture}"
    code = find_binary(compiler, source)
    if code is None:
        code = compile_source(name, source, architecture)
        keep_binary(compiler, source, code)
    return code


def architecture_for(major: int, minor: int) -> str:
    """The architecture to compile for: the device's own, or for a newer device the newest that NVRTC knows, as PTX for
    the driver to translate. Raises EngineError for a device that NVRTC no longer supports."""
    from cuda.bindings import nvrtc

    known, own = sorted(_call(nvrtc, "nvrtcGetSupportedArchs")), 10 * major + minor
    if own in known:
        return f"sm_{own}"
    older = [each for each in known if each < own]
    if not older:
        raise EngineError(
            f"NVRTC {'.'.join(map(str, nvrtc.nvrtcVersion()[1:]))} compiles for compute capability {known[0] / 10:.1f}"
            f" and later, this GPU has {major}.{minor}: install an older cuda-bindings, or choose another with EDGE_GPU"
        )
    return f"compute_{older[-1]}"


def _driver() -> Any:
    from cuda.bindings import driver

    _call(driver, "cuInit", 0)
    return driver


def _adapter(driver: Any, index: int) -> Adapter:
    device = _call(driver, "cuDeviceGet", index)

    def attribute(name: str) -> int:
        number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver, "cuDeviceGetAttribute", number, device))

    unified, version = bool(attribute("INTEGRATED")), _call(driver, "cuDriverGetVersion")
    capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    memory = int(_call(driver, "cuDeviceTotalMem", device))
    return Adapter(
        host="cuda", language="cuda", index=index, name=_text(_call(driver, "cuDeviceGetName", 256, device)),
        vendor="NVIDIA", driver=f"CUDA {version // 1000}.{version % 1000 // 10}",
        kind="integrated" if unified else "discrete", unified=unified, memory=None if unified else memory,
        limits=Limits(
            binding=memory, buffer=memory, buffers=_BUFFERS, threads=attribute("MAX_THREADS_PER_BLOCK"),
            shared=attribute("MAX_SHARED_MEMORY_PER_BLOCK"),
            groups=min(attribute("MAX_GRID_DIM_X"), attribute("MAX_GRID_DIM_Y")),
        ),
        features=frozenset(each for each, since in _FEATURES.items() if (*capability, version) >= since),
        bus=_text(_call(driver, "cuDeviceGetPCIBusId", 32, device)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Memory:
    """Device memory of `size` bytes."""

    pointer: int
    size: int


@dataclass
class _Launch:
    """A prepared launch."""

    dispatch: Dispatch
    function: Any
    threads: tuple[int, int]
    values: list[AnyArray]  # the kernel's parameters
    pointers: AnyArray  # addresses of the values, for cuLaunchKernel


@dataclass
class _Recorded:
    """A recording."""

    launches: tuple[_Launch, ...]
    varying: tuple[Dispatch, ...]  # dispatches whose workgroups depend on the tokens of a run
    graphs: dict[tuple[int, ...], Any] = field(default_factory=dict)  # executable, by these workgroups


class CudaDevice:
    """The `hosts.Device` of CUDA. Buffers and slices are pointers."""

    def __init__(self, adapter: Adapter, driver: Any) -> None:
        self.adapter, self.allocated = adapter, 0
        self._cu = driver
        self._device = self._do("cuDeviceGet", adapter.index)
        self._context: Any = self._do("cuDevicePrimaryCtxRetain", self._device)
        self._enter()
        self._stream = self._do("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._kernels = dict[str, tuple[Kernel, Any, Any]]()  # with their modules and functions
        self._buffers = dict[int, _Memory]()  # by their pointers
        self._recordings = list[_Recorded]()

    def create(self, nbytes: int) -> _Memory:
        self._enter()
        size = max(16, -(-nbytes // 16) * 16)
        try:
            pointer = int(self._do("cuMemAlloc", size))
        except EngineError as error:
            free = self._do("cuMemGetInfo")[0]
            raise EngineError(f"{error}: a buffer of {size} bytes, {free} are free") from None
        memory = self._buffers[pointer] = _Memory(pointer, size)
        self.allocated += size
        self._do("cuMemsetD8Async", pointer, 0, size, self._stream)
        return memory

    def free(self, buffer: _Memory) -> None:
        if self._buffers.pop(buffer.pointer, None) is not None:
            self._enter()
            self.allocated -= buffer.size
            self._do("cuStreamSynchronize", self._stream)
            self._do("cuMemFree", buffer.pointer)

    def write(self, buffer: _Memory, offset: int, data: AnyArray) -> None:
        self._enter()
        whole = np.ascontiguousarray(data)
        if whole.nbytes:  # pageable memory: the driver has copied it when the call returns
            self._do("cuMemcpyHtoDAsync", buffer.pointer + offset, whole.ctypes.data, whole.nbytes, self._stream)

    def read(self, buffer: _Memory, offset: int, nbytes: int) -> AnyArray:
        self._enter()
        data = np.empty(nbytes, np.uint8)
        if nbytes:
            self._do("cuMemcpyDtoHAsync", data.ctypes.data, buffer.pointer + offset, nbytes, self._stream)
        self._do("cuStreamSynchronize", self._stream)
        return data

    def prepare(self, kernels: Mapping[str, Kernel], progress: Callable[[float], None] | None = None) -> None:
        self._enter()
        names = self._cu.CUdevice_attribute
        major, minor = (
            self._do("cuDeviceGetAttribute", each, self._device)
            for each in (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        architecture = architecture_for(major, minor)
        limit = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        for done, (name, kernel) in enumerate(kernels.items(), 1):
            if name not in self._kernels or self._kernels[name][0] != kernel:
                module = self._do("cuModuleLoadData", _compiled(name, kernel.source, architecture))
                function = self._do("cuModuleGetFunction", module, kernel.name.encode())
                # Also loads the kernel, which CUDA otherwise does at its first launch: not possible in a capture.
                most = self._do("cuFuncGetAttribute", limit, function)
                if most < kernel.threads[0] * kernel.threads[1]:
                    raise EngineError(f"CUDA runs {name} with {most} threads at most, not {kernel.threads}")
                self._kernels[name] = kernel, module, function
            if progress:
                progress(done / len(kernels))

    def record(self, dispatches: Sequence[Dispatch], buffers: Mapping[str, _Memory]) -> _Recorded:
        launches = []
        for dispatch in dispatches:
            kernel, _, function = self._kernels[dispatch.kernel]
            values = [np.array([_address(buffers[each.buffer], each)], np.uint64) for each in dispatch.slices]
            values += [np.array([each], np.int32) for each in dispatch.scalars]
            pointers = np.array([each.ctypes.data for each in values], np.uint64)
            launches.append(_Launch(dispatch, function, kernel.threads, values, pointers))
        recorded = _Recorded(tuple(launches), tuple(each for each in dispatches if each.per))
        self._recordings.append(recorded)
        return recorded

    def run(self, recording: _Recorded, tokens: int = 1, times: int = 1) -> None:
        self._enter()
        groups = tuple(each.workgroups(tokens)[1] for each in recording.varying)
        graph = recording.graphs.pop(groups, None)
        if graph is None:
            graph = self._captured(recording, tokens)
        recording.graphs[groups] = graph  # the newest
        if len(recording.graphs) > _GRAPHS:
            self._do("cuStreamSynchronize", self._stream)
            self._do("cuGraphExecDestroy", recording.graphs.pop(next(iter(recording.graphs))))
        for _ in range(times):
            self._do("cuGraphLaunch", graph, self._stream)

    def time(self, recording: _Recorded, tokens: int = 1) -> list[float]:
        self._enter()
        events = [self._do("cuEventCreate", 0) for _ in range(len(recording.launches) + 1)]
        try:
            self._do("cuEventRecord", events[0], self._stream)
            for each, event in zip(recording.launches, events[1:], strict=True):
                self._launch(each, tokens)
                self._do("cuEventRecord", event, self._stream)
            self._do("cuStreamSynchronize", self._stream)
            return [self._do("cuEventElapsedTime", begin, end) * 1e-3 for begin, end in pairwise(events)]
        finally:
            for event in events:
                self._cu.cuEventDestroy(event)

    def close(self) -> None:
        if self._context is None:
            return
        cu = self._cu  # results are ignored: after an error in a kernel every call fails
        cu.cuCtxSetCurrent(self._context)
        cu.cuStreamSynchronize(self._stream)
        for recording in self._recordings:
            for graph in recording.graphs.values():
                cu.cuGraphExecDestroy(graph)
            recording.graphs.clear()
        for memory in self._buffers.values():
            cu.cuMemFree(memory.pointer)
        for _, module, _ in self._kernels.values():
            cu.cuModuleUnload(module)
        cu.cuStreamDestroy(self._stream)
        cu.cuDevicePrimaryCtxRelease(self._device)
        self._context, self.allocated = None, 0
        for held in (self._recordings, self._buffers, self._kernels):
            held.clear()

    def _captured(self, recording: _Recorded, tokens: int) -> Any:
        """An executable graph of all launches, one after the other."""
        mode = self._cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._do("cuStreamBeginCapture", self._stream, mode)
        try:
            for number, each in enumerate(recording.launches):
                # Workgroups of a chunk that wait would take the place of those that work.
                overlaps = number > 0 and not each.dispatch.per and "overlap" in self.adapter.features
                self._launch(each, tokens, overlaps=overlaps)
        except EngineError:
            self._cu.cuStreamEndCapture(self._stream)
            raise
        graph = self._do("cuStreamEndCapture", self._stream)
        try:
            return self._do("cuGraphInstantiate", graph, 0)
        finally:
            self._do("cuGraphDestroy", graph)

    def _launch(self, launch: _Launch, tokens: int, *, overlaps: bool = False) -> None:
        """Launch a kernel. overlaps: it may start before the previous launch ends, and then waits for that itself."""
        cu, config = self._cu, self._cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY = launch.dispatch.workgroups(tokens)
        config.blockDimX, config.blockDimY = launch.threads
        config.gridDimZ = config.blockDimZ = 1
        config.hStream = self._stream
        if overlaps:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self._do("cuLaunchKernelEx", config, launch.function, launch.pointers.ctypes.data, 0)

    def _enter(self) -> None:
        """Make the context current in this thread; any thread may call."""
        if self._context is None:
            raise EngineError("this GPU device is closed")
        self._do("cuCtxSetCurrent", self._context)

    def _do(self, function: str, *arguments: Any) -> Any:
        return _call(self._cu, function, *arguments)


def _call(library: Any, function: str, *arguments: Any) -> Any:
    """Call a function of cuda-bindings; return its results: None, one, or a tuple. Raises EngineError."""
    status, *results = getattr(library, function)(*arguments)
    if int(status):
        raise EngineError(f"CUDA failed in {function}: {getattr(status, 'name', status)}")
    return results[0] if len(results) == 1 else tuple(results)


def _address(memory: _Memory, part: Slice) -> int:
    return memory.pointer + part.offset


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode(errors="replace").strip()


def _first(log: str) -> str:
    lines = [line.strip("\0 \t") for line in log.splitlines()]
    wrong = [line for line in lines if re.search(r"\berror\b", line)]
    return next(iter(wrong or [line for line in lines if line]), "no reason given")

"""Host for GPUs through wgpu-native (Vulkan, Metal, Direct3D 12), by the C functions that the package wgpu loads.

The package's own classes cost ten microseconds a call, poll in a thread of their own, and log errors that no call
raises. Here a recorded dispatch is a pipeline, a bind group and its workgroups, all made once; a run is one compute
pass of three calls for each dispatch. Callbacks collect errors, and the call that caused them raises them.

Shaders keep the library's checks of bounds and loops: without them lavapipe is not faster. The library has no cache of
pipelines (drivers have their own), so they are compiled by several threads. On Vulkan and Direct3D 12 it takes memory
from the driver in blocks of 128 MiB, and 64 MiB for copies, which `allocated` does not count.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.backends.tvm.gpu.hosts import ALIGNMENT, Adapter, Limits
from edge.backends.tvm.gpu.hosts.wgpu_native import TIMEOUT, Errors, adapter_handles, native_library
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.devices.host import usable_cores
from edge.errors import EngineError
from edge.types import AnyArray

_STAGED = 8 << 20  # bytes that are copied at once between the process and the device
# Dispatches of one submit times their tokens, by the kind of GPU: drivers reset one that is busy for seconds.
_WORK = {"discrete": 16384}
_LEAST_WORK = 2048
_COMPILERS = 4  # threads
_QUERIES = 4096  # of a query set, WebGPU's limit
_FRAME = ("Validation Error", "Caused by:", "In wgpu", "\u250c", "\u2502", "\u2514", "=")  # also lines of quoted source
_numbers = itertools.count(1)  # of devices
_LAVAPIPE = "llvmpipe"  # its adapters' names begin with it
_KINDS = {1: "discrete", 2: "integrated", 3: "cpu"}


def adapters() -> list[Adapter]:
    try:
        return [_adapter(index, handle) for index, handle in enumerate(adapter_handles())]
    except Exception:  # no package, or its library does not load
        return []


def missing() -> str | None:
    """Why there are no adapters; None if there are."""
    try:
        import wgpu.backends.wgpu_native  # noqa: F401
    except Exception as error:  # each package has its own error for a library that does not load
        absent = isinstance(error, ModuleNotFoundError)
        return "wgpu is not installed: pip install 'edge-runtime[gpu]'" if absent else f"wgpu: {error}"
    return None if adapters() else "wgpu finds no Vulkan, Metal or Direct3D 12 driver"


def open_device(adapter: Adapter) -> WGPUDevice:
    handles = adapter_handles()
    if adapter.index >= len(handles):
        raise EngineError(f"wgpu no longer shows {adapter.name}")
    return WGPUDevice(adapter, handles[adapter.index])


def compiling_bytes(adapter: Adapter, _kernels: Iterable[Kernel] | None) -> int | None:
    """See `Host`. 0 for lavapipe, whose compiler plans count in every run, whatever Mesa's own cache holds."""
    return 0 if adapter.name.startswith(_LAVAPIPE) else None


def _limits(handle: Any) -> Any:
    native = native_library()
    limits = native.ffi.new("WGPULimits *")
    native.lib.wgpuAdapterGetLimits(handle, limits)
    return limits


def _features(handle: Any) -> dict[str, int]:
    """The adapter's features that we use, with wgpu's numbers for them."""
    lib = native_library().lib
    known = {
        "f16": lib.WGPUFeatureName_ShaderF16,
        "timestamps": lib.WGPUFeatureName_TimestampQuery,
        "subgroups": lib.WGPUNativeFeature_Subgroup,
    }
    return {name: number for name, number in known.items() if lib.wgpuAdapterHasFeature(handle, number)}


def _adapter(index: int, handle: Any) -> Adapter:
    native = native_library()
    info, limits = native.ffi.new("WGPUAdapterInfo *"), _limits(handle)
    native.lib.wgpuAdapterGetInfo(handle, info)
    name, vendor, driver = (native.text(each) for each in (info.device, info.vendor, info.description))
    through = {4: "Direct3D 12", 5: "Metal", 6: "Vulkan"}.get(info.backendType, "")
    kind, vendor_id = _KINDS.get(info.adapterType, "unknown"), info.vendorID
    native.lib.wgpuAdapterInfoFreeMembers(info[0])
    return Adapter(
        host="wgpu", language="wgsl", index=index, name=name, vendor=vendor or f"{vendor_id:#06x}",
        driver=f"{through} {driver}".strip(), kind=kind, unified=kind in ("integrated", "cpu"), memory=None,
        limits=Limits(
            binding=int(limits.maxStorageBufferBindingSize), buffer=int(limits.maxBufferSize),
            buffers=int(limits.maxStorageBuffersPerShaderStage),
            threads=min(int(limits.maxComputeInvocationsPerWorkgroup), int(limits.maxComputeWorkgroupSizeX)),
            shared=int(limits.maxComputeWorkgroupStorageSize), groups=int(limits.maxComputeWorkgroupsPerDimension),
        ),
        features=frozenset(_features(handle)) | {"dot4"},  # part of WGSL, if not of every chip
    )  # fmt: skip


@dataclass(eq=False)
class _Buffer:
    handle: Any
    size: int


@dataclass(frozen=True)
class _Pipeline:
    kernel: Kernel
    layout: Any
    pipeline: Any


@dataclass(eq=False)
class _Recorded:
    """A recording."""

    dispatches: tuple[Dispatch, ...]
    pipelines: tuple[Any, ...]
    groups: tuple[Any, ...]
    buffers: frozenset[_Buffer]
    frees: int  # device's count of frees when `buffers` were last checked
    tokens: int = 0
    steps: tuple[tuple[Any, Any, int, int], ...] = ()  # pipeline, bind group, workgroups in x and y


class WGPUDevice:
    """The `hosts.Device` of wgpu-native. `close` releases all handles."""

    def __init__(self, adapter: Adapter, handle: Any) -> None:
        self.adapter, self.allocated = adapter, 0
        self.work_per_submit = _WORK.get(adapter.kind, _LEAST_WORK)
        self._native = native = native_library()
        self._ffi, self._lib = native.ffi, native.lib
        self._errors = native.errors[number := next(_numbers)] = Errors()
        self._pipelines = dict[str, _Pipeline]()
        self._buffers = set[_Buffer]()
        self._frees = self._staged = 0
        self._held = list[tuple[Any, Any]]()  # release functions, and the handles that they release
        self._stage: _Buffer | None = None
        self._device = self._open(handle, number)
        self._queue = self._lib.wgpuDeviceGetQueue(self._device)

    def _open(self, handle: Any, number: int) -> Any:
        ffi, lib, native = self._ffi, self._lib, self._native
        features, limits = ffi.new("WGPUFeatureName[]", list(_features(handle).values())), _limits(handle)
        own = ffi.cast("void *", number)
        described = ffi.new("WGPUDeviceDescriptor *", {
            "requiredFeatureCount": len(features), "requiredFeatures": features, "requiredLimits": limits,
            "deviceLostCallbackInfo": {
                "mode": lib.WGPUCallbackMode_AllowSpontaneous, "callback": native.lost, "userdata1": own,
            },
            "uncapturedErrorCallbackInfo": {"callback": native.failed, "userdata1": own},
        })  # fmt: skip
        info = ffi.new("WGPURequestDeviceCallbackInfo *", {
            "mode": lib.WGPUCallbackMode_AllowSpontaneous, "callback": native.on_request,
        })  # fmt: skip
        native.requested.clear()
        lib.wgpuAdapterRequestDevice(handle, described, info[0])
        lib.wgpuInstanceProcessEvents(native.instance)
        device, message = native.requested.pop() if native.requested else (None, "it does not answer")
        if device is None:
            raise EngineError(f"wgpu could not open {self.adapter.name}: {_first(message)}")
        return device

    def create(self, nbytes: int) -> _Buffer:
        lib = self._lib
        size, most = max(16, -(-nbytes // 16) * 16), self.adapter.limits.buffer
        if size > most:
            raise EngineError(f"wgpu could not allocate a buffer of {size} bytes: this device allows {most}")
        usage = lib.WGPUBufferUsage_Storage | lib.WGPUBufferUsage_CopySrc | lib.WGPUBufferUsage_CopyDst
        buffer = self._buffer(size, usage)
        self._buffers.add(buffer)
        self.allocated += size
        return buffer

    def free(self, buffer: _Buffer) -> None:
        if buffer in self._buffers:
            self._buffers.remove(buffer)
            self._frees += 1
            self.allocated -= buffer.size
            self._drop(buffer)

    def write(self, buffer: _Buffer, offset: int, data: AnyArray) -> None:
        self._write(self._live(buffer), offset, data)

    def _write(self, buffer: _Buffer, offset: int, data: AnyArray) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _STAGED):
            part = flat[start : start + _STAGED]
            at = self._ffi.from_buffer(part)
            self._lib.wgpuQueueWriteBuffer(self._queue, buffer.handle, offset + start, at, part.size)
            self._staged += part.size
            if self._staged >= _STAGED:  # the library keeps copies until the device has them
                self._lib.wgpuQueueSubmit(self._queue, 0, self._ffi.NULL)
                self._wait()
        self._check("write to a buffer")

    def read(self, buffer: _Buffer, offset: int, nbytes: int) -> AnyArray:
        return self._read(self._live(buffer), offset, nbytes)

    def _read(self, buffer: _Buffer, offset: int, nbytes: int) -> AnyArray:
        data = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, _STAGED):
            self._read_part(buffer, offset + start, data[start : start + _STAGED])
        return data

    def _read_part(self, buffer: _Buffer, offset: int, data: AnyArray) -> None:
        lib, size = self._lib, -(-data.size // 4) * 4
        stage, self._stage = self._stage, None
        try:
            if stage is None or stage.size < size:
                if stage is not None:
                    self._drop(stage)
                    stage = None
                usage = lib.WGPUBufferUsage_MapRead | lib.WGPUBufferUsage_CopyDst
                stage = self._buffer(max(size, 1 << 16), usage)
            self._copy(buffer, offset, stage, data, size)
        except BaseException:  # also an interrupt: a submit that uses a mapped buffer makes the library abort
            if stage is not None:
                self._drop(stage)
            raise
        self._stage = stage

    def _copy(self, buffer: _Buffer, offset: int, stage: _Buffer, data: AnyArray, size: int) -> None:
        ffi, lib, native = self._ffi, self._lib, self._native
        encoder = lib.wgpuDeviceCreateCommandEncoder(self._opened(), ffi.NULL)
        lib.wgpuCommandEncoderCopyBufferToBuffer(encoder, buffer.handle, offset, stage.handle, 0, size)
        self._submit(encoder, "read a buffer")
        info = ffi.new("WGPUBufferMapCallbackInfo *", {
            "mode": lib.WGPUCallbackMode_AllowSpontaneous, "callback": native.on_map, "userdata1": stage.handle,
        })  # fmt: skip
        native.mapped.discard(stage.handle)
        lib.wgpuBufferMapAsync(stage.handle, lib.WGPUMapMode_Read, 0, size, info[0])
        self._check("read a buffer")
        self._wait()
        if stage.handle not in native.mapped:
            raise EngineError(f"wgpu could not read a buffer: {TIMEOUT}")
        ffi.memmove(ffi.from_buffer(data), lib.wgpuBufferGetConstMappedRange(stage.handle, 0, size), data.size)
        lib.wgpuBufferUnmap(stage.handle)

    def prepare(self, kernels: Mapping[str, Kernel], progress: Callable[[float], None] | None = None) -> None:
        known = self._pipelines
        new = {name: each for name, each in kernels.items() if name not in known or known[name].kernel != each}
        with ThreadPoolExecutor(min(_COMPILERS, usable_cores())) as pool:
            compiled = pool.map(self._compile, new.values())
            for done, (name, pipeline) in enumerate(zip(new, compiled, strict=True), 1):
                known[name] = pipeline
                if progress:
                    progress(done / len(new))

    def _compile(self, kernel: Kernel) -> _Pipeline:
        ffi, lib, what = self._ffi, self._lib, f"compile {kernel.name}"
        source, entry = (ffi.new("char[]", text.encode()) for text in (kernel.source, kernel.name))
        code = ffi.new("WGPUShaderSourceWGSL *", {
            "chain": {"sType": lib.WGPUSType_ShaderSourceWGSL}, "code": {"data": source, "length": len(source) - 1},
        })  # fmt: skip
        described = ffi.new("WGPUShaderModuleDescriptor *", {"nextInChain": ffi.cast("WGPUChainedStruct *", code)})
        module = lib.wgpuDeviceCreateShaderModule(self._opened(), described)
        self._keep(lib.wgpuShaderModuleRelease, module, what)
        written = (lib.WGPUBufferBindingType_Storage, lib.WGPUBufferBindingType_ReadOnlyStorage)
        kinds = [written[each not in kernel.written] for each in kernel.buffers] + [lib.WGPUBufferBindingType_Uniform]
        entries = ffi.new("WGPUBindGroupLayoutEntry[]", [
            {"binding": at, "visibility": lib.WGPUShaderStage_Compute, "buffer": {"type": kind}}
            for at, kind in enumerate(kinds)
        ])  # fmt: skip
        layout = lib.wgpuDeviceCreateBindGroupLayout(
            self._device, ffi.new("WGPUBindGroupLayoutDescriptor *", {"entryCount": len(kinds), "entries": entries})
        )
        self._keep(lib.wgpuBindGroupLayoutRelease, layout, what)
        groups = {"bindGroupLayoutCount": 1, "bindGroupLayouts": ffi.new("WGPUBindGroupLayout[]", [layout])}
        whole = lib.wgpuDeviceCreatePipelineLayout(self._device, ffi.new("WGPUPipelineLayoutDescriptor *", groups))
        self._keep(lib.wgpuPipelineLayoutRelease, whole, what)
        compute = {"module": module, "entryPoint": {"data": entry, "length": len(entry) - 1}}
        pipeline = lib.wgpuDeviceCreateComputePipeline(
            self._device, ffi.new("WGPUComputePipelineDescriptor *", {"layout": whole, "compute": compute})
        )
        self._keep(lib.wgpuComputePipelineRelease, pipeline, what)
        return _Pipeline(kernel, layout, pipeline)

    def record(self, dispatches: Sequence[Dispatch], buffers: Mapping[str, _Buffer]) -> _Recorded:
        lib = self._lib
        numbers = np.zeros((max(1, len(dispatches)), ALIGNMENT // 4), np.int32)
        for row, dispatch in zip(numbers, dispatches, strict=False):
            row[: len(dispatch.scalars) + 1] = *dispatch.scalars, dispatch.groups[0] - 1
        uniform = self._buffer(numbers.nbytes, lib.WGPUBufferUsage_Uniform | lib.WGPUBufferUsage_CopyDst)
        groups = list[Any]()
        try:
            self._write(uniform, 0, numbers)
            for at, dispatch in enumerate(dispatches):
                groups.append(self._group(dispatch, buffers, uniform, at * ALIGNMENT))
            pipelines = tuple(self._pipelines[each.kernel].pipeline for each in dispatches)
            used = frozenset(buffers[part.buffer] for each in dispatches for part in each.slices)
            recording = _Recorded(tuple(dispatches), pipelines, tuple(groups), used, self._frees)
        except BaseException:
            _release_recording(lib, groups, uniform.handle)
            raise
        weakref.finalize(recording, _release_recording, lib, groups, uniform.handle)
        return recording

    def _group(self, dispatch: Dispatch, buffers: Mapping[str, _Buffer], uniform: _Buffer, offset: int) -> Any:
        ffi, lib = self._ffi, self._lib
        entries = ffi.new("WGPUBindGroupEntry[]", [
            *(_entry(at, self._live(buffers[each.buffer]), each) for at, each in enumerate(dispatch.slices)),
            {"binding": len(dispatch.slices), "buffer": uniform.handle, "offset": offset, "size": ALIGNMENT},
        ])  # fmt: skip
        layout = self._pipelines[dispatch.kernel].layout
        described = {"layout": layout, "entryCount": len(entries), "entries": entries}
        group = lib.wgpuDeviceCreateBindGroup(self._device, ffi.new("WGPUBindGroupDescriptor *", described))
        self._check(f"bind the buffers of {dispatch.kernel}")
        return group

    def run(self, recording: _Recorded, tokens: int = 1, times: int = 1) -> None:
        self._ready(recording)
        if recording.tokens != tokens:
            recording.steps, recording.tokens = tuple(_steps(recording, tokens)), tokens
        steps = itertools.chain.from_iterable(itertools.repeat(recording.steps, times))
        while part := tuple(itertools.islice(steps, max(1, self.work_per_submit // tokens))):
            encoder = self._lib.wgpuDeviceCreateCommandEncoder(self._opened(), self._ffi.NULL)
            self._encode(encoder, part, self._ffi.NULL)
            self._submit(encoder, "run")

    def _encode(self, encoder: Any, steps: Iterable[tuple[Any, Any, int, int]], described: Any) -> None:
        """Encode a compute pass."""
        lib, null = self._lib, self._ffi.NULL
        set_pipeline, set_group = lib.wgpuComputePassEncoderSetPipeline, lib.wgpuComputePassEncoderSetBindGroup
        dispatch, current = lib.wgpuComputePassEncoderDispatchWorkgroups, None
        compute = lib.wgpuCommandEncoderBeginComputePass(encoder, described)
        for pipeline, group, x, y in steps:
            if pipeline is not current:
                set_pipeline(compute, pipeline)
                current = pipeline
            set_group(compute, 0, group, 0, null)
            dispatch(compute, x, y, 1)
        lib.wgpuComputePassEncoderEnd(compute)
        lib.wgpuComputePassEncoderRelease(compute)

    def _submit(self, encoder: Any, what: str) -> None:
        lib, ffi = self._lib, self._ffi
        commands = lib.wgpuCommandEncoderFinish(encoder, ffi.NULL)
        lib.wgpuCommandEncoderRelease(encoder)
        if not self._errors.messages:
            lib.wgpuQueueSubmit(self._queue, 1, ffi.new("WGPUCommandBuffer[]", [commands]))
        lib.wgpuCommandBufferRelease(commands)
        self._check(what)

    def time(self, recording: _Recorded, tokens: int = 1) -> list[float]:
        self._ready(recording)
        steps = list(_steps(recording, tokens))
        if "timestamps" not in self.adapter.features:
            return [self._waited(each) for each in steps]
        most = max(1, min(_QUERIES // 2, self.work_per_submit // tokens))
        return [each for at in range(0, len(steps), most) for each in self._timed(steps[at : at + most])]

    def _waited(self, step: tuple[Any, Any, int, int]) -> float:
        """Submit one dispatch and wait; seconds from the call to its end."""
        self._wait()
        start = time.perf_counter()
        encoder = self._lib.wgpuDeviceCreateCommandEncoder(self._opened(), self._ffi.NULL)
        self._encode(encoder, [step], self._ffi.NULL)
        self._submit(encoder, "time")
        self._wait()
        return time.perf_counter() - start

    def _timed(self, steps: Sequence[tuple[Any, Any, int, int]]) -> list[float]:
        """Time a compute pass for each dispatch by timestamps at its beginning and end."""
        ffi, lib, count = self._ffi, self._lib, 2 * len(steps)
        described = ffi.new("WGPUQuerySetDescriptor *", {"type": lib.WGPUQueryType_Timestamp, "count": count})
        queries = lib.wgpuDeviceCreateQuerySet(self._device, described)
        self._check("time")
        resolved = self._buffer(8 * count, lib.WGPUBufferUsage_QueryResolve | lib.WGPUBufferUsage_CopySrc)
        encoder = lib.wgpuDeviceCreateCommandEncoder(self._opened(), ffi.NULL)
        for at, step in enumerate(steps):
            writes = ffi.new("WGPUPassTimestampWrites *", {
                "querySet": queries, "beginningOfPassWriteIndex": 2 * at, "endOfPassWriteIndex": 2 * at + 1,
            })  # fmt: skip
            self._encode(encoder, [step], ffi.new("WGPUComputePassDescriptor *", {"timestampWrites": writes}))
        lib.wgpuCommandEncoderResolveQuerySet(encoder, queries, 0, count, resolved.handle, 0)
        try:
            self._submit(encoder, "time")
            ticks = self._read(resolved, 0, 8 * count).view(np.uint64).astype(np.float64).reshape(-1, 2)
        finally:
            self._drop(resolved)
            lib.wgpuQuerySetRelease(queries)
        period = float(lib.wgpuQueueGetTimestampPeriod(self._queue)) * 1e-9
        return [float(each) * period for each in ticks[:, 1] - ticks[:, 0]]

    def close(self) -> None:
        if self._device is None:
            return
        for buffer in [*self._buffers]:
            self.free(buffer)
        if self._stage is not None:
            self._drop(self._stage)
        for release, handle in reversed(self._held):
            release(handle)
        self._held.clear()
        self._pipelines.clear()
        self._lib.wgpuQueueRelease(self._queue)
        self._lib.wgpuDeviceRelease(self._device)
        self._device = None

    def _wait(self) -> None:
        """Wait until the device is idle."""
        self._lib.wgpuDevicePoll(self._opened(), 1, self._ffi.NULL)
        self._staged = 0
        self._check("run")

    def _buffer(self, size: int, usage: int) -> _Buffer:
        described = self._ffi.new("WGPUBufferDescriptor *", {"size": size, "usage": usage})
        handle = self._lib.wgpuDeviceCreateBuffer(self._opened(), described)
        self._check(f"allocate a buffer of {size} bytes")
        return _Buffer(handle, size)

    def _drop(self, buffer: _Buffer) -> None:
        self._lib.wgpuBufferDestroy(buffer.handle)
        self._lib.wgpuBufferRelease(buffer.handle)

    def _ready(self, recording: _Recorded) -> None:
        """Raise if a buffer of the recording was freed: submitting it would make the library abort."""
        if recording.frees != self._frees:
            for buffer in recording.buffers:
                self._live(buffer)
            recording.frees = self._frees

    def _live(self, buffer: _Buffer) -> _Buffer:
        """The buffer, checked: its handle is a pointer that the library trusts."""
        if buffer not in self._buffers:
            raise EngineError("wgpu: the buffer was freed")
        return buffer

    def _keep(self, release: Any, handle: Any, what: str) -> Any:
        self._check(what)
        self._held.append((release, handle))
        return handle

    def _opened(self) -> Any:
        if self._device is None:
            raise EngineError("wgpu: the device was closed")
        if self._errors.lost:
            self._check("go on")
        return self._device

    def _check(self, what: str) -> None:
        """Raise the errors of the last calls."""
        if self._native.interrupts:
            raise self._native.interrupts.pop()
        if self._errors.lost:
            raise EngineError(f"wgpu could not {what}: the device is lost ({_first(self._errors.lost)})")
        if self._errors.messages:
            message = self._errors.messages[0]
            self._errors.messages.clear()
            raise EngineError(f"wgpu could not {what}: {_first(message)}")


def _entry(binding: int, buffer: _Buffer, part: Slice) -> dict[str, Any]:
    size = part.size or buffer.size - part.offset
    if size <= 0 or part.offset + size > buffer.size:  # a size of 0 makes the library abort
        raise EngineError(f"wgpu: bytes {part.offset} to {part.offset + size} are not all in {part.buffer}")
    return {"binding": binding, "buffer": buffer.handle, "offset": part.offset, "size": size}


def _release_recording(lib: Any, groups: Sequence[Any], uniform: Any) -> None:
    for each in groups:
        lib.wgpuBindGroupRelease(each)
    lib.wgpuBufferRelease(uniform)


def _steps(recording: _Recorded, tokens: int) -> Iterable[tuple[Any, Any, int, int]]:
    for dispatch, pipeline, group in zip(recording.dispatches, recording.pipelines, recording.groups, strict=True):
        yield pipeline, group, *dispatch.workgroups(tokens)


def _first(message: str) -> str:
    """A message's lines, without the frame around them, as one line."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line for line in lines if line and not line.startswith(_FRAME) and "\u2502" not in line]
    return ": ".join(told) or lines[0]

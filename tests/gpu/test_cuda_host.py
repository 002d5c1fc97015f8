"""What CUDA's host asks of the driver, whose calls need a card: this stands in for the driver, and is no part of edge.

Launches are read as the driver reads them, from the addresses of parameters; kernels are written in Python.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.backends.tvm.gpu.hosts import Adapter, Limits, cuda
from edge.backends.tvm.gpu.program import Dispatch, Kernel, Slice
from edge.errors import EngineError

_DONE, _NO_MEMORY = 0, 2
KERNEL = Kernel("edge_add", "source", (32, 1), ("out", "x"), ("out",), ("factor",), 0)


class Driver:
    """Memory is the process's own. functions: by their names, called with the launch's parameters and workgroups."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=8, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=6
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)

    @staticmethod
    def CUlaunchConfig() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(attrs=[], numAttrs=0, sharedMemBytes=0)

    @staticmethod
    def CUlaunchAttribute() -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace())

    def __init__(self) -> None:
        self.memory, self.alive = dict[int, np.ndarray](), Counter[str]()
        self.captured: list[Callable[[], None]] | None = None
        self.threads, self.overlaps = 1024, list[bool]()
        self.captures, self.launches, self.enough = 0, list[tuple[int, ...]](), True

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        told: dict[str, Callable[..., Any]] = {
            "cuDeviceGet": lambda index: index, "cuDeviceGetAttribute": lambda attribute, _: attribute,
            "cuModuleGetFunction": lambda _, name: name.decode(), "cuFuncGetAttribute": lambda *_: self.threads,
            "cuEventElapsedTime": lambda *_: 2.0,
        }  # fmt: skip
        plain = {"cuCtxSetCurrent", "cuStreamSynchronize", "cuEventRecord"}
        made = {"cuDevicePrimaryCtxRetain": "context", "cuStreamCreate": "stream", "cuEventCreate": "event"}
        gone = {
            "cuDevicePrimaryCtxRelease": "context", "cuStreamDestroy": "stream", "cuModuleUnload": "module",
            "cuGraphDestroy": "graph", "cuGraphExecDestroy": "graph", "cuEventDestroy": "event",
        }  # fmt: skip
        if name in told:
            return lambda *given: (_DONE, told[name](*given))
        if name in plain:
            return lambda *_: (_DONE,)
        if name in made:
            return lambda *_: self._count(made[name], 1)
        if name in gone:
            return lambda *_: self._count(gone[name], -1)[:1]
        raise AttributeError(name)

    def _count(self, what: str, by: int) -> tuple[int, str]:
        self.alive[what] += by
        assert self.alive[what] >= 0
        return _DONE, what

    def cuMemGetInfo(self) -> tuple[int, int, int]:  # noqa: N802
        return _DONE, 1000, 2000

    def cuMemAlloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        if not self.enough:
            return _NO_MEMORY, 0
        array = np.full(size, 255, np.uint8)
        self.memory[array.ctypes.data] = array
        return _DONE, array.ctypes.data

    def cuMemFree(self, pointer: int) -> tuple[int]:  # noqa: N802
        del self.memory[pointer]
        return (_DONE,)

    def cuMemsetD8Async(self, pointer: int, value: int, size: int, stream: str) -> tuple[int]:  # noqa: N802
        ctypes.memset(pointer, value, size)
        return (_DONE,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: str) -> tuple[int]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return (_DONE,)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync  # noqa: N815

    def cuModuleLoadData(self, code: bytes) -> tuple[int, str]:  # noqa: N802
        assert code == b"machine code"
        return self._count("module", 1)

    def cuStreamBeginCapture(self, stream: str, mode: int) -> tuple[int]:  # noqa: N802
        self.captured, self.captures = [], self.captures + 1
        return (_DONE,)

    def cuStreamEndCapture(self, stream: str) -> tuple[int, Any]:  # noqa: N802
        graph, self.captured = self.captured, None
        self._count("graph", 1)
        return _DONE, graph

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:  # noqa: N802
        self._count("graph", 1)
        return _DONE, list(graph)

    def cuGraphLaunch(self, graph: Any, stream: str) -> tuple[int]:  # noqa: N802
        for each in graph:
            each()
        return (_DONE,)

    def cuLaunchKernelEx(self, config: Any, function: str, pointers: int, _extra: int) -> tuple[int]:  # noqa: N802
        sizes = [getattr(config, f"{of}Dim{axis}") for of in ("grid", "block") for axis in "XYZ"]
        assert config.numAttrs == len(config.attrs)
        overlaps = [(each.id, each.value.programmaticStreamSerializationAllowed) for each in config.attrs]
        assert overlaps in ([], [(6, 1)])
        self.overlaps.append(bool(overlaps))
        addresses = (ctypes.c_uint64 * 3).from_address(pointers)
        out, x = (ctypes.c_uint64.from_address(addresses[each]).value for each in range(2))
        factor = ctypes.c_int32.from_address(addresses[2]).value
        assert (function, config.sharedMemBytes, sizes[2:]) == ("edge_add", 0, [1, 32, 1, 1])

        def run() -> None:
            self.launches.append((sizes[0], sizes[1], factor))
            ctypes.c_int32.from_address(out).value += factor * ctypes.c_int32.from_address(x).value

        run() if self.captured is None else self.captured.append(run)
        return (_DONE,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(cuda, "architecture_for", lambda major, minor: f"sm_{major}{minor}")
    monkeypatch.setattr(cuda, "_compiled", lambda name, source, architecture: b"machine code")
    return Driver()


def opened(driver: Driver, *features: str) -> cuda.CudaDevice:
    limits = Limits(1 << 30, 1 << 30, 256, 1024, 49152, 65535)
    return cuda.CudaDevice(
        Adapter(
            "cuda", "cuda", 0, "RTX", "NVIDIA", "CUDA 12.9", "discrete", False, 1 << 30, limits, frozenset(features)
        ),
        driver,
    )


def test_recording_is_captured_once_and_replayed(driver: Driver) -> None:
    device = opened(driver)
    device.prepare({"edge_add": KERNEL})
    out, x = device.create(16), device.create(1024)
    assert not device.read(x, 0, 1024).any()
    device.write(x, 512, np.array([5], np.int32))
    slices = Slice("out"), Slice("x", 512, 4)
    dispatches = [
        Dispatch("edge_add", slices, (factor,), (3, 7), "other", None, per) for factor, per in ((2, 0), (10, 8))
    ]
    recording = device.record(dispatches, {"out": out, "x": x})
    device.run(recording, tokens=1, times=3)
    assert device.read(out, 0, 4).view(np.int32)[0] == 3 * (2 + 10) * 5
    assert driver.launches == [(3, 7, 2), (3, 1, 10)] * 3
    for tokens in (8, 9, 3, 16):  # as many workgroups as 1 or 9 tokens have
        device.run(recording, tokens)
    assert driver.captures == 2
    assert driver.launches[-1] == (3, 2, 10)
    for tokens in range(1, 200, 8):
        device.run(recording, tokens)
    assert driver.alive["graph"] <= 16  # the oldest are given back, and captured ones once they are instantiated
    assert device.time(recording) == [0.002, 0.002]
    device.close()
    device.close()
    assert not driver.alive.total()
    assert not driver.memory
    assert device.allocated == 0


def test_launches_of_a_graph_overlap_those_before(driver: Driver) -> None:
    """If the device can, and not those of chunks, nor across graphs, nor while each is timed."""
    for features, expected in ((), [False] * 3), (("overlap",), [False, True, False]):
        device = opened(driver, *features)
        device.prepare({"edge_add": KERNEL})
        step = Dispatch("edge_add", (Slice("out"), Slice("x")), (1,), (1, 1), "other")
        dispatches = [step, step, replace(step, per=8)]
        recording = device.record(dispatches, {"out": device.create(16), "x": device.create(16)})
        driver.overlaps.clear()
        device.run(recording)
        assert driver.overlaps == expected
        device.time(recording)
        assert driver.overlaps == [*expected, *[False] * 3]
        device.close()


def test_refusals_of_the_driver_raise_one_line(driver: Driver) -> None:
    """A kernel that takes too many registers, and exhausted memory of the card."""
    device = opened(driver)
    driver.threads = 16
    with pytest.raises(EngineError, match="edge_add with 16 threads at most"):
        device.prepare({"edge_add": KERNEL})
    buffer = device.create(100)
    assert device.allocated == 112
    driver.enough = False
    with pytest.raises(EngineError, match="a buffer of 4096 bytes, 1000 are free"):
        device.create(4096)
    device.free(buffer)
    assert device.allocated == 0
    device.close()
    with pytest.raises(EngineError, match="closed"):
        device.create(4)

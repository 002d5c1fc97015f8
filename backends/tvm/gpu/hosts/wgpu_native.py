"""The library wgpu-native: its functions through cffi, its adapters, and the results of its callbacks.

Constants and structures are those of webgpu.h and wgpu.h.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

TIMEOUT = "the GPU reset, was removed, or a submit took longer than its driver allows"


class Errors:
    """Errors of a device from callbacks: the reason of its loss, and errors of this thread's calls since the last
    check. The library calls back before the failing call returns."""

    def __init__(self) -> None:
        self.lost = ""
        self._own = threading.local()

    @property
    def messages(self) -> list[str]:
        found: list[str] = self._own.__dict__.setdefault("messages", [])
        return found


class Native:
    """wgpu-native's functions, an instance, and callbacks, which live as long as the process: the library may call them
    after a device was released."""

    def __init__(self) -> None:
        from wgpu.backends.wgpu_native import ffi, lib

        self.ffi: Any = ffi
        self.lib: Any = lib
        self.errors = dict[int, Errors]()  # by the number of a device
        self.requested = list[tuple[Any, str]]()
        self.mapped = set[Any]()  # buffers
        self.interrupts = list[BaseException]()
        extras = ffi.new("WGPUInstanceExtras *", {"chain": {"sType": lib.WGPUSType_InstanceExtras}})
        extras.backends = 1 | 4 | 8  # Vulkan, Metal, Direct3D 12: OpenGL's compute shaders are the slowest way
        self.instance = lib.wgpuCreateInstance(
            ffi.new("WGPUInstanceDescriptor *", {"nextInChain": ffi.cast("WGPUChainedStruct *", extras)})
        )

        def failed(_device: Any, kind: int, message: Any, number: Any, _: Any) -> None:
            memory = "not enough memory: " if kind == lib.WGPUErrorType_OutOfMemory else ""
            self._errors(number).messages.append(memory + self.text(message))

        def lost(_device: Any, reason: int, message: Any, number: Any, _: Any) -> None:
            if reason != lib.WGPUDeviceLostReason_Destroyed:
                self._errors(number).lost = self.text(message) or TIMEOUT

        def requested(status: int, device: Any, message: Any, _: Any, __: Any) -> None:
            opened = status == lib.WGPURequestDeviceStatus_Success
            self.requested.append((device if opened else None, self.text(message)))

        def mapped(status: int, _message: Any, buffer: Any, _: Any) -> None:
            if status == lib.WGPUMapAsyncStatus_Success:
                self.mapped.add(ffi.cast("WGPUBuffer", buffer))

        def callback(parameters: str, function: Callable[..., None]) -> Any:
            return ffi.callback(f"void({parameters}, void *, void *)", function, onerror=self._interrupted)

        self.failed = callback("WGPUDevice const *, WGPUErrorType, WGPUStringView", failed)
        self.lost = callback("WGPUDevice const *, WGPUDeviceLostReason, WGPUStringView", lost)
        self.on_request = callback("WGPURequestDeviceStatus, WGPUDevice, WGPUStringView", requested)
        self.on_map = callback("WGPUMapAsyncStatus, WGPUStringView", mapped)

    def _interrupted(self, _kind: object, error: BaseException, _trace: object) -> None:
        """Keep an exception raised in a callback: Python runs signal handlers there, and cffi would print their
        exceptions."""
        self.interrupts.append(error)

    def _errors(self, number: Any) -> Errors:
        return self.errors.setdefault(int(self.ffi.cast("uintptr_t", number)), Errors())

    def text(self, view: Any) -> str:
        return self.ffi.string(view.data, view.length).decode(errors="replace") if view.length and view.data else ""


@cache
def native_library() -> Native:
    return Native()


@cache
def adapter_handles() -> tuple[Any, ...]:
    native = native_library()
    with _without_wayland():
        count = native.lib.wgpuInstanceEnumerateAdapters(native.instance, native.ffi.NULL, native.ffi.NULL)
        found = native.ffi.new("WGPUAdapter[]", max(1, count))
        native.lib.wgpuInstanceEnumerateAdapters(native.instance, native.ffi.NULL, found)
    return tuple(found[index] for index in range(count))


@contextmanager
def _without_wayland() -> Iterator[None]:
    """Hide Wayland: Mesa's Vulkan layer asks its server for the default GPU, and prints a message without
    XDG_RUNTIME_DIR."""
    if "XDG_RUNTIME_DIR" in os.environ:
        yield
        return
    os.environ["XDG_RUNTIME_DIR"] = os.devnull  # valid, but without a socket
    try:
        yield
    finally:
        del os.environ["XDG_RUNTIME_DIR"]

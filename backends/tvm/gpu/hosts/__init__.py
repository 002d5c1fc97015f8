"""Drivers that run programs (`gpu/program.py`) on GPUs: what every one of them is, and which are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from edge.backends.tvm.gpu.program import Dispatch, Kernel
from edge.types import AnyArray

Buffer = Any  # as the host likes it
Recording = Any

ALIGNMENT = 256  # bytes, of slices


@dataclass(frozen=True)
class Limits:
    """binding, buffer: bytes of a slice that a kernel sees, and of a buffer. buffers: that a kernel may have. threads,
    shared: of a workgroup, and its bytes. groups: workgroups in one dimension."""

    binding: int
    buffer: int
    buffers: int
    threads: int
    shared: int
    groups: int


@dataclass(frozen=True)
class Adapter:
    """A GPU, or a CPU that poses as one, as a driver shows it.

    host: the module of `hosts/`. language: of `program.LANGUAGES`. index: among the host's adapters. kind: discrete,
    integrated, cpu or unknown. unified: its buffers are the process's main memory. memory: bytes of its own, None where
    the driver does not tell. features: f16, dot4 (products of packed bytes), subgroups, timestamps.
    """

    host: str
    language: str
    index: int
    name: str
    vendor: str
    driver: str
    kind: str
    unified: bool
    memory: int | None
    limits: Limits
    features: frozenset[str]

    @property
    def key(self) -> str:
        """What tuning records are filed under: a new driver compiles otherwise."""
        return f"{self.host} {self.vendor} {self.name} {self.driver}"


class Device(Protocol):
    """An adapter, opened. All its work happens in the order of the calls.

    allocated: bytes of its buffers, our own count.
    Every call raises EngineError where the device is lost, with one line that says so.
    """

    adapter: Adapter
    allocated: int

    def create(self, nbytes: int) -> Buffer:
        """Memory of the device, zeros. Raises EngineError if there is not enough."""
        ...

    def free(self, buffer: Buffer) -> None: ...

    def write(self, buffer: Buffer, offset: int, data: AnyArray) -> None:
        """Copy an array; offset and size in bytes, multiples of 4. The array may change after the call."""
        ...

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> AnyArray:
        """Wait for everything before, and copy: uint8 [nbytes], the caller's own."""
        ...

    def prepare(self, kernels: Mapping[str, Kernel], progress: Callable[[float], None] | None = None) -> None:
        """Compile kernels, which `record` then finds by name. Raises EngineError with the driver's first line."""
        ...

    def record(self, dispatches: Sequence[Dispatch], buffers: Mapping[str, Buffer]) -> Recording:
        """Everything about these dispatches that does not change from run to run: bindings, scalars."""
        ...

    def run(self, recording: Recording, tokens: int = 1, times: int = 1) -> None:
        """Start all dispatches, `times` over; returns before they have ended. tokens: see `Dispatch.per`."""
        ...

    def time(self, recording: Recording, tokens: int = 1) -> list[float]:
        """Run it once and wait: seconds of every dispatch. By the device's timestamps where it has them."""
        ...

    def close(self) -> None:
        """Free everything; safe to call twice."""
        ...


class Host(Protocol):
    """The module of one driver. Register it in `_HOSTS`."""

    PACKAGE: str  # of Python
    EXTRA: str  # of this project that installs it

    def adapters(self) -> list[Adapter]:
        """None if the package, the driver or the hardware is not there. Never raises."""
        ...

    def open_device(self, adapter: Adapter) -> Device:
        """Raises EngineError if the driver does not open it."""
        ...


_HOSTS = ("cuda", "wgpu", "opencl")  # the order of preference where several drive the same GPU


def host_named(name: str) -> Host:
    return cast(Host, import_module(f"edge.backends.tvm.gpu.hosts.{name}"))


def all_adapters() -> list[Adapter]:
    """GPUs first, then CPUs that pose as GPUs; in each group by the order of hosts."""
    found = [adapter for name in _HOSTS for adapter in host_named(name).adapters()]
    return sorted(found, key=lambda adapter: adapter.kind == "cpu")


def open_device(adapter: Adapter) -> Device:
    return host_named(adapter.host).open_device(adapter)

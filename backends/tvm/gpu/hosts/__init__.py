"""Hosts: drivers that run programs (`gpu/program.py`) on GPUs; their protocol and their registry."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from edge.backends.tvm.gpu.program import Dispatch, Kernel
from edge.devices.graphics import VARIABLE, is_off, resident_memory
from edge.devices.power import nvml
from edge.errors import UnsupportedError
from edge.records import dataclass
from edge.types import AnyArray

Buffer = Any  # the host's own type
Recording = Any

ALIGNMENT = 256  # bytes, of slices


@dataclass(frozen=True)
class Limits:
    """Limits of an adapter."""

    binding: int  # bytes of a slice bound to a kernel
    buffer: int  # bytes of a buffer
    buffers: int  # number per kernel
    threads: int  # of a workgroup
    shared: int  # bytes of workgroup memory
    groups: int  # workgroups in one dimension


PORTABLE = Limits(binding=128 << 20, buffer=256 << 20, buffers=8, threads=256, shared=16384, groups=65535)  # WebGPU's


@dataclass(frozen=True)
class Adapter:
    """A GPU as a driver shows it, or a software adapter, which runs on the CPU."""

    host: str  # module of `hosts/`
    language: str  # of `program.LANGUAGES`
    index: int  # among the host's adapters
    name: str
    vendor: str
    driver: str
    kind: str  # discrete, integrated, cpu or unknown
    unified: bool  # its buffers are in the process's main memory
    memory: int | None  # bytes of its own; None: not reported by the driver
    limits: Limits
    features: frozenset[str]  # f16, dot4 (products of packed bytes), mma (tensor cores), overlap (of launches), …
    bus: str = ""  # PCI address; empty: not reported by the driver

    @property
    def place(self) -> str:
        """A name such as wgpu:0, for `EDGE_GPU`."""
        return f"{self.host}:{self.index}"

    @property
    def key(self) -> str:
        """The key of tuning records; includes the driver, since another one compiles differently."""
        return f"{self.host} {self.vendor} {self.name} {self.driver}"


class Device(Protocol):
    """An opened adapter, which executes calls in order. allocated: bytes of its buffers, by our own count.

    Every call raises a one-line EngineError if the device is lost.
    """

    adapter: Adapter
    allocated: int

    def create(self, nbytes: int) -> Buffer:
        """Allocate zeroed device memory. Raises EngineError if there is not enough."""
        ...

    def free(self, buffer: Buffer) -> None: ...

    def write(self, buffer: Buffer, offset: int, data: AnyArray) -> None:
        """Copy an array to a buffer; offset and size in bytes, multiples of 4. The array may change after the call."""
        ...

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> AnyArray:
        """Wait for all earlier calls, and copy: uint8 [nbytes], owned by the caller."""
        ...

    def prepare(self, kernels: Mapping[str, Kernel], progress: Callable[[float], None] | None = None) -> None:
        """Compile kernels, for `record` to find by name. Raises EngineError with the driver's first line."""
        ...

    def record(self, dispatches: Sequence[Dispatch], buffers: Mapping[str, Buffer]) -> Recording:
        """Prepare everything about these dispatches that stays the same from run to run: bindings, scalars."""
        ...

    def run(self, recording: Recording, tokens: int = 1, times: int = 1) -> None:
        """Start all dispatches, `times` over, without waiting for their end. tokens: see `Dispatch.per`."""
        ...

    def time(self, recording: Recording, tokens: int = 1) -> list[float]:
        """Run a recording once and wait; return seconds of every dispatch, by the device's timestamps where it has
        them."""
        ...

    def close(self) -> None:
        """Free everything; safe to call twice."""
        ...


class Host(Protocol):
    """The interface of a driver's module. Register it in `_HOSTS`."""

    def adapters(self) -> list[Adapter]:
        """The adapters; empty if the package, the driver or the hardware is missing. Never raises."""
        ...

    def missing(self) -> str | None:
        """The missing part, in a few words; None if there are adapters. Never raises."""
        ...

    def open_device(self, adapter: Adapter) -> Device:
        """Open an adapter. Raises EngineError if the driver fails."""
        ...

    def compiling_bytes(self, adapter: Adapter, kernels: Iterable[Kernel] | None) -> int | None:
        """Bytes of this process that the driver needs to compile these kernels (None: those of any model), beyond its
        memory in every run, which plans count anyway. Returns None for drivers that were not measured."""
        ...


_HOSTS = ("cuda", "wgpu", "opencl")  # the order of preference where several drive the same GPU
_KINDS = ("discrete", "integrated", "unknown", "cpu")  # the order of preference among adapters


def host_named(name: str) -> Host:
    return cast(Host, import_module(f"edge.backends.tvm.gpu.hosts.{name}"))


def all_adapters() -> list[Adapter]:
    """All adapters: GPUs first, then software adapters, each in the order of hosts."""
    found = [adapter for name in _HOSTS for adapter in host_named(name).adapters()]
    return sorted(found, key=lambda adapter: _KINDS.index(adapter.kind))


def what_is_missing() -> list[str]:
    """The reason why each host without adapters has none."""
    return [reason for name in _HOSTS if (reason := host_named(name).missing())]


def choose_adapter(text: str | None = None) -> Adapter:
    """The adapter whose name contains `text`, or whose `place` or `key` equals it. Default: that of `EDGE_GPU`, else
    the first that is not a software adapter.

    Raises UnsupportedError with the adapters that exist, or with the places searched; also if `EDGE_GPU` is off.
    """
    if text is None and is_off():
        raise UnsupportedError(f"{VARIABLE}={os.environ[VARIABLE].strip()} hides all GPUs: unset {VARIABLE} to use one")
    found, wanted = all_adapters(), (os.environ.get(VARIABLE, "") if text is None else text).strip().lower()
    if not found:
        raise UnsupportedError(f"no GPU was found: {'; '.join(what_is_missing())}")
    if re.fullmatch(rf"({'|'.join(_HOSTS)}):\d+", wanted):
        fit = [adapter for adapter in found if adapter.place == wanted]
    elif keyed := [adapter for adapter in found if adapter.key.lower() == wanted]:
        fit = keyed
    elif wanted:
        fit = [adapter for adapter in found if wanted in adapter.name.lower()]
    else:
        fit = [adapter for adapter in found if adapter.kind != "cpu"]
    if fit:
        return fit[0]
    there = ", ".join(f"{adapter.place} ({adapter.name})" for adapter in found)
    if wanted:
        raise UnsupportedError(f"no GPU is called {wanted!r} ({VARIABLE}): there are {there}")
    raise UnsupportedError(
        f"no GPU was found, only software adapters, which run on the CPU: {there}; {VARIABLE}={found[0].place} takes "
        "one all the same"
    )


def open_device(adapter: Adapter) -> Device:
    return host_named(adapter.host).open_device(adapter)


def card_of(adapter: Adapter) -> nvml.Card | None:
    """The NVIDIA card of an adapter, for its energy counter (`devices.power.measure_card`); None for other makes."""
    nvidia = "nvidia" in f"{adapter.vendor} {adapter.name}".lower() and adapter.kind == "discrete"
    return nvml.Card(adapter.name, adapter.bus) if nvidia else None


def free_memory(adapter: Adapter) -> int | None:
    """Free bytes of a card's own memory if its driver reports them, else the size of this memory; None if unknown."""
    card = card_of(adapter)
    free = None if card is None else nvml.free_memory(card)
    return adapter.memory if free is None else free


def used_memory(adapter: Adapter) -> int | None:
    """Bytes that this process holds on GPUs according to the system, to compare with `Device.allocated`; None if
    unknown.

    Source: NVML for an NVIDIA card, fdinfo for GPUs with kernel drivers.
    """
    card = card_of(adapter)
    return resident_memory() if card is None else nvml.used_memory(card)

"""Drivers that run programs (`gpu/program.py`) on GPUs: what every one of them is, and which are there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from edge.backends.tvm.gpu.program import Dispatch, Kernel
from edge.devices.graphics import VARIABLE, is_off, resident_memory
from edge.devices.power import nvml
from edge.errors import UnsupportedError
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


PORTABLE = Limits(binding=128 << 20, buffer=256 << 20, buffers=8, threads=256, shared=16384, groups=65535)  # WebGPU's


@dataclass(frozen=True)
class Adapter:
    """A GPU, or a software adapter, which runs on the CPU, as a driver shows it.

    host: the module of `hosts/`. language: of `program.LANGUAGES`. index: among the host's adapters. kind: discrete,
    integrated, cpu or unknown. unified: its buffers are the process's main memory. memory: bytes of its own, None where
    the driver does not tell. features: f16, dot4 (products of packed bytes), subgroups, timestamps. bus: its address on
    PCI, empty where the driver does not tell.
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
    bus: str = ""

    @property
    def place(self) -> str:
        """Such as wgpu:0, by which `EDGE_GPU` chooses it."""
        return f"{self.host}:{self.index}"

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

    def adapters(self) -> list[Adapter]:
        """None if the package, the driver or the hardware is not there. Never raises."""
        ...

    def missing(self) -> str | None:
        """What is not there, in a few words; None if there are adapters. Never raises."""
        ...

    def open_device(self, adapter: Adapter) -> Device:
        """Raises EngineError if the driver does not open it."""
        ...


_HOSTS = ("cuda", "wgpu", "opencl")  # the order of preference where several drive the same GPU
_KINDS = ("discrete", "integrated", "unknown", "cpu")  # the order of preference among adapters


def host_named(name: str) -> Host:
    return cast(Host, import_module(f"edge.backends.tvm.gpu.hosts.{name}"))


def all_adapters() -> list[Adapter]:
    """GPUs first, then software adapters; in each group by the order of hosts."""
    found = [adapter for name in _HOSTS for adapter in host_named(name).adapters()]
    return sorted(found, key=lambda adapter: _KINDS.index(adapter.kind))


def what_is_missing() -> list[str]:
    """For each host without adapters, the reason."""
    return [reason for name in _HOSTS if (reason := host_named(name).missing())]


def choose_adapter(text: str | None = None) -> Adapter:
    """The adapter whose name has this text in it, or whose `place` or `key` it is; by default that of `EDGE_GPU`;
    otherwise the first that is no software adapter.

    Raises UnsupportedError with the adapters that there are, or with what was looked for; if `EDGE_GPU` is off, too.
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
    """The card whose counter of joules a run on the adapter reads (`devices.power.measure_card`); None for others than
    NVIDIA's."""
    nvidia = "nvidia" in f"{adapter.vendor} {adapter.name}".lower() and adapter.kind == "discrete"
    return nvml.Card(adapter.name, adapter.bus) if nvidia else None


def free_memory(adapter: Adapter) -> int | None:
    """Bytes of a card's own memory that are free: as its driver tells now, or all that it has; None if it is silent."""
    card = card_of(adapter)
    free = None if card is None else nvml.free_memory(card)
    return adapter.memory if free is None else free


def used_memory(adapter: Adapter) -> int | None:
    """Bytes that the system says this process holds on GPUs, to compare with `Device.allocated`; None if it does not
    tell. By NVML of an NVIDIA card, by fdinfo of all GPUs whose drivers are in the kernel."""
    card = card_of(adapter)
    return resident_memory() if card is None else nvml.used_memory(card)

"""Energy (joules of the card alone) and memory of an NVIDIA card, by the package nvidia-ml-py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from edge.devices.power.base import MeterKind, Reading, Scope, Unavailable
from edge.records import dataclass

_MILLI = 1e-3


@dataclass(frozen=True)
class Card:
    """An NVIDIA card as CUDA names it."""

    name: str
    bus: str = ""  # PCI address; empty if the driver does not say: the first card of that name


class Nvml:
    """The energy counter of a card."""

    source = "NVML"
    kind: MeterKind = "counter"
    scope: Scope = "package"

    def __init__(self, library: Any, card: Any) -> None:
        self._library, self._card = library, card
        self._first = self._last = self._count()
        self._samples = 0

    def read(self) -> Reading:
        now = self._count()
        self._samples += now != self._last
        self._last = now
        joules = (now - self._first) * _MILLI
        return Reading(joules, None, self.source, self.kind, self.scope, self._samples)

    def _count(self) -> int:
        try:
            return int(self._library.nvmlDeviceGetTotalEnergyConsumption(self._card))
        except self._library.NVMLError as error:
            raise Unavailable(f"NVML: {error}") from None


def find(_root: Path, card: Card | None = None) -> Nvml:
    """The meter of a card; None: of the first. Raises Unavailable without the package or such a card."""
    return Nvml(*_opened(card))


def used_memory(card: Card) -> int | None:
    """Bytes of the card's memory that this process holds; None if the driver does not say."""
    try:
        library, handle = _opened(card)
        running = library.nvmlDeviceGetComputeRunningProcesses(handle)
        running += library.nvmlDeviceGetGraphicsRunningProcesses(handle)
    except Exception:  # Unavailable, or an error of the library
        return None
    return max((each.usedGpuMemory or 0 for each in running if each.pid == os.getpid()), default=None)


def free_memory(card: Card) -> int | None:
    """Free bytes of the card's memory; None if the driver does not say."""
    try:
        library, handle = _opened(card)
        return int(library.nvmlDeviceGetMemoryInfo(handle).free)
    except Exception:  # Unavailable, or an error of the library
        return None


def _opened(card: Card | None) -> tuple[Any, Any]:
    try:
        import pynvml
    except ImportError:
        raise Unavailable("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        if card and card.bus:
            return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(card.bus.encode())
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if card is None or _name(pynvml.nvmlDeviceGetName(handle)) == card.name:
                return pynvml, handle
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML: {error}") from None
    raise Unavailable(f"NVML shows no {card.name}" if card else "NVML shows no card")


def _name(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else told

"""NVIDIA's energy counter, by the package nvidia-ml-py: joules of the graphics card alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge.devices.power.base import MeterKind, Reading, Scope, Unavailable

_MILLI = 1e-3


class Nvml:
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


def find(_root: Path) -> Nvml:
    try:
        import pynvml
    except ImportError:
        raise Unavailable("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        return Nvml(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML: {error}") from None

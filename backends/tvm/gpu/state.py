"""The fixed state of layers without rows, in device memory."""

from __future__ import annotations

import numpy as np

from edge.backends.fixed_state import FixedState
from edge.backends.tvm.gpu.hosts import Device
from edge.types import FloatArray


class DeviceState(FixedState):
    """The states of all layers, `size` values in a buffer that kernels read and write."""

    def __init__(self, device: Device, size: int) -> None:
        super().__init__([size], values=np.zeros(0, np.float32))  # none in memory of the host
        self.buffer = device.create(4 * size)
        self._device, self._size = device, size

    @property
    def nbytes(self) -> int:
        return 4 * self._size

    def _read(self) -> FloatArray:
        return self._device.read(self.buffer, 0, self.nbytes).view(np.float32)

    def _write(self, values: FloatArray) -> None:
        self._device.write(self.buffer, 0, np.ascontiguousarray(values))

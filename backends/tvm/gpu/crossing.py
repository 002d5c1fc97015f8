"""Rows that tokens see across (`CrossEngine`): an encoder's states, through the keys and values of each layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.tvm.cpu.arguments import cross_dtype
from edge.backends.tvm.gpu.design import CROSS_MOVE, Design, RowForm
from edge.backends.tvm.gpu.hosts import Device
from edge.backends.tvm.gpu.kv import DeviceRows
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.packing.cores import round_up
from edge.errors import EngineError
from edge.model.structure.layers import Network
from edge.types import AnyArray, FloatArray


class CrossRows:
    """count: rows of each head, the same for all."""

    count = 0

    def __init__(self, device: Device, design: Design, network: Network, config: EngineConfig) -> None:
        self._design, self._network, self._most = design, network, max(1, config.crossed)
        form = RowForm.of(design.shape.attention, cross_dtype(config.kv_dtype))
        self.rows = DeviceRows(device, cross_rows(network, config), form, kernel=CROSS_MOVE)

    def fill(self, states: FloatArray, run: Callable[[FloatArray], None]) -> None:
        """Replace the rows by those of states, float32 [n, hidden]. run: runs the pass `cross` for some states, whose
        rows it appends to the first `count`."""
        if len(states) > self._most:
            raise EngineError(f"{len(states)} states to read across, and there is room for {self._most}")
        self.count = 0
        for at in range(0, len(states), self._design.chunk):
            part = states[at : at + self._design.chunk]
            run(part)
            self.count += len(part)

    def place(self, state: AnyArray) -> None:
        """Write the first row of each head, and the number of its rows, to the words of `Tables`."""
        tables, heads = self._design.tables, self._design.shape.kv_heads
        for layer in self._network.crossings:
            own = slice(layer * heads, (layer + 1) * heads)
            state[tables.starts :][own], state[tables.lengths :][own] = self._first(layer)[:, 0], self.count

    def read(self, layer: int) -> tuple[FloatArray, FloatArray]:
        """Keys and values of a layer, float32 [heads, n, size]."""
        core = self._network.attention[layer]
        assert core
        rows = self._first(layer) + np.arange(self.count)
        return self.rows.keys(rows, 0)[..., : core.row.key], self.rows.values(rows)[..., : core.row.value]

    def _first(self, layer: int) -> AnyArray:
        """The first row of each head, [heads, 1]."""
        heads = self._design.shape.kv_heads
        return _stride(self._most) * (self._network.crossings.index(layer) * heads + np.arange(heads))[:, None]


def cross_rows(network: Network, config: EngineConfig) -> int:
    """The number of rows of all heads."""
    return _stride(config.crossed) * sum(core.kv_heads for core in network.attention if core and core.across)


def _stride(most: int) -> int:
    return round_up(max(1, most), TILE)

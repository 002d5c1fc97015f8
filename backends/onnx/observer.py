"""Batches attention scores of observed queries until they are read or rows move.

A batch of dozens takes a fraction of the time of single queries: the keys are read once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge.backends.head_kv import HeadKV
from edge.backends.onnx.attention import attention_to
from edge.backends.onnx.inputs import Windows
from edge.backends.onnx.kv import OnnxStore
from edge.model.structure.layers import Network
from edge.types import FloatArray


class Observer:
    """At most `most` waiting queries of successive tokens. votes: as in `ObservedEngine.observe`."""

    def __init__(
        self, network: Network, kv: HeadKV[OnnxStore], windows: Windows, most: int, sinks: Mapping[int, FloatArray]
    ) -> None:
        self._kv, self._windows, self._most = kv, windows, most
        self._sinks = sinks  # of layers that have them, [heads]
        attention = [(layer, core) for layer, core in enumerate(network.attention) if core]
        sources = {layer: core.source(layer) for layer, core in attention}
        # Layers that read rows which policies choose, and the places of these in the store.
        self._read = {layer: kv.layers.index(source) for layer, source in sources.items() if source in kv.layers}
        self._cores = {layer: core for layer, core in attention if layer in self._read}
        self._queries = {
            layer: np.zeros((most, core.heads, core.head_dim), np.float32) for layer, core in self._cores.items()
        }
        self._count = self._end = 0  # tokens that wait; rows in use when the last of them had run
        self._votes = False

    def observe(self, *, votes: bool) -> None:
        if votes != self._votes:
            self.settle()
            self._votes = votes

    def add(self, queries: Mapping[int, FloatArray], count: int) -> None:
        """Add the queries, before RoPE, of the last `count` tokens that ran, at most `most`: by layer, float32 [count,
        heads · head]."""
        length = self._kv.length
        if self._count and (self._end != length - count or self._count + count > self._most):
            self.settle()
        new = slice(self._count, self._count + count)
        for layer, waiting in self._queries.items():
            waiting[new] = queries[layer].reshape(count, *waiting.shape[1:])
        self._count, self._end = new.stop, length

    def settle(self) -> None:
        """Add the waiting queries' attention to the rows' totals."""
        count, kv, store, self._count = self._count, self._kv, self._kv.store, 0
        if not count:
            return
        positions, rotation = kv.rope_positions()[:, : self._end], kv.rope.rotation
        hidden = {} if kv.ring else self._windows.added(positions, count)
        tables = [rotation.tables(kind, positions[0, -count:]) for kind in range(len(rotation.angles))]
        for layer, index in self._read.items():
            core, queries = self._cores[layer], self._queries[layer][:count].swapaxes(0, 1)
            queries = rotation.apply(queries, tables[rotation.kinds[layer]], rotation.kinds[layer])
            rows, scales = store.array[0, index, :, : self._end], store.scales[0, index]
            queries = queries * np.float32(core.scale)
            paid = attention_to(
                rows, scales, store.dtype, queries, self._votes, core.score_cap, hidden.get(layer),
                self._sinks.get(layer),
            )  # fmt: skip
            store.paid[index, :, : self._end] += paid

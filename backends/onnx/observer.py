"""Attention is added up when somebody asks for it, or rows are about to change: until then keys stay where they are.

So the queries of some dozen tokens go through the keys together, which takes a fraction of the time.
"""

from __future__ import annotations

import numpy as np

from edge.backends.onnx.attention import attention_to
from edge.backends.onnx.kv import OnnxKV
from edge.backends.onnx.rope import turn
from edge.backends.onnx.windows import Windows
from edge.model.spec import ModelSpec
from edge.model.tensors import find_recipe
from edge.types import FloatArray


class Observer:
    """Queries of successive tokens that wait: `most` of them at once. votes: as `ObservedEngine.observe` says."""

    def __init__(self, spec: ModelSpec, kv: OnnxKV, windows: Windows, most: int) -> None:
        self._spec, self._recipe, self._kv, self._windows = spec, find_recipe(spec), kv, windows
        self._queries = np.zeros((spec.layers, most, spec.heads, spec.head_dim), np.float32)
        self._count = self._end = 0  # tokens that wait; rows in use when the last of them had run
        self._votes = False

    def observe(self, *, votes: bool) -> None:
        if votes != self._votes:
            self.settle()
            self._votes = votes

    def add(self, queries: FloatArray) -> None:
        """Those of the last tokens that ran, before RoPE: float32 [layers, n, heads · head], n at most `most`."""
        count, length = queries.shape[1], self._kv.length
        if self._count and (self._end != length - count or self._count + count > self._queries.shape[1]):
            self.settle()
        new = slice(self._count, self._count + count)
        self._queries[:, new] = queries.reshape(len(queries), count, *self._queries.shape[2:])
        self._count, self._end = new.stop, length

    def settle(self) -> None:
        """Add up what all that wait pay to each row."""
        count, kv, self._count = self._count, self._kv, 0
        if not count:
            return
        turned = kv.turned_by_slot(0)[:, : self._end]
        hidden = self._windows.added(turned, count)
        tables = [turning.tables(turned[0, -count:]) for turning in kv.ropes.turnings]
        for layer in range(self._spec.layers):
            queries = self._queries[layer, :count].swapaxes(0, 1)
            if tables:
                queries = turn(queries, *tables[kv.ropes.kinds[layer]])
            queries = queries * np.float32(self._recipe.query_scale)
            rows, cap = kv.array[0, layer, :, : self._end], self._recipe.score_cap
            paid = attention_to(rows, kv.scales[0, layer], kv.dtype, queries, self._votes, cap, hidden.get(layer))
            kv.slot_attention[layer, :, : self._end] += paid

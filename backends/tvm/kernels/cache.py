"""Rows of the KV cache in memory, and how a kernel writes and reads them.

Keys lie in tiles of 16 rows, transposed, so that 16 scores come out of 16 lanes without a sum across lanes:
K [rows / 16, head, 16], V [rows, head]; `head` is the head size rounded up to 16, the rest zero. The rows are those of
all heads of all layers, one after the other; each head's begin with a tile. With int8 every row has a float32 scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.kernels.isa import Isa
from edge.backends.tvm.kernels.lanes import (
    Buffer,
    Value,
    floats,
    largest,
    let,
    load,
    prefetch,
    pure,
    spread,
    store,
)

MEMORY_TYPE = {"f32": "float32", "f16": "uint16", "int8": "int8"}


@dataclass(frozen=True)
class Cache:
    """The arrays, and what offsets are made of. starts: the first row of each head, [layers, KV heads]."""

    isa: Isa
    dtype: str  # f32, f16, int8
    keys: Buffer
    values: Buffer
    key_scales: Buffer
    value_scales: Buffer
    starts: Buffer
    kv_heads: int
    head: int  # padded

    def first_row(self, layer: Value, kv_head: Value) -> Value:
        """Rows that lie before those of this head."""
        return T.cast(self.starts[layer * self.kv_heads + kv_head], "int64")

    def load_key(self, first_row: Value, tile: Value, dimension: Value) -> Value:
        """One dimension of 16 rows, float32, not yet scaled."""
        return self._float(load(self.keys, (first_row + tile * 16) * self.head + dimension * 16))

    def load_value(self, first_row: Value, row: Value, dimension: int) -> Value:
        """16 dimensions of one row, float32, not yet scaled."""
        return self._float(load(self.values, (first_row + row) * self.head + dimension))

    def fetch_values(self, first_row: Value, tile: Value, dimension: Value, tiles: int) -> None:
        """Ask for one part in `head` of the values of `tiles` tiles."""
        share = tiles * 16  # values, of head · share
        for line in range(-(-share // self._line)):
            prefetch(self.values, (first_row + tile * 16) * self.head + dimension * share + line * self._line)

    def fetch_keys(self, first_row: Value, tile: Value, row: Value) -> None:
        """Ask for the row-th part, as large as a row, of the keys from `tile` on."""
        for line in range(-(-self.head // self._line)):
            prefetch(self.keys, (first_row + tile * 16 + row) * self.head + line * self._line)

    @property
    def _line(self) -> int:
        """Values in a cache line."""
        return 64 // {"f32": 4, "f16": 2, "int8": 1}[self.dtype]

    def write_key(self, first_row: Value, row: Value, vectors: Sequence[Value]) -> None:
        """`vectors` hold the head's dimensions, 16 by 16."""
        start = let((first_row + (row // 16) * 16) * self.head + row % 16)
        for part, vector in enumerate(self._quantized(self.key_scales, first_row + row, vectors)):
            store(self.keys, start + part * 256, self._stored(vector), stride=16)

    def write_value(self, first_row: Value, row: Value, vectors: Sequence[Value]) -> None:
        for part, vector in enumerate(self._quantized(self.value_scales, first_row + row, vectors)):
            store(self.values, (first_row + row) * self.head + part * 16, self._stored(vector))

    def _quantized(self, scales: Buffer, at: Value, vectors: Sequence[Value]) -> Sequence[Value]:
        """int8: q = round(x · 127 / max|x|) over the whole head."""
        if self.dtype != "int8":
            return vectors
        size: Value = floats(0)
        for vector in vectors:
            size = let(T.max(size, pure("float32x16", "llvm.fabs", vector)))
        most = let(largest(size))
        inverse = let(T.if_then_else(most > T.float32(0), T.float32(127) / most, T.float32(0)))
        T.buffer_store(scales, most * T.float32(1 / 127), [at])
        return [pure("float32x16", "llvm.rint", vector * spread(inverse)) for vector in vectors]

    def _stored(self, values: Value) -> Value:
        if self.dtype == "f16":
            return self.isa.to_f16(values)
        return T.cast(T.cast(values, "int32x16"), "int8x16") if self.dtype == "int8" else values

    def _float(self, stored: Value) -> Value:
        if self.dtype == "f16":
            return self.isa.from_f16(stored)
        return T.cast(T.cast(stored, "int32x16"), "float32x16") if self.dtype == "int8" else stored


def row_scales(cache: Cache, scales: Buffer, first_row: Value, tile: Value) -> Value | None:
    """The scales of 16 rows, if rows have any."""
    return let(load(scales, first_row + tile * 16)) if cache.dtype == "int8" else None

"""Rows of the KV cache in memory, and how a kernel writes and reads them.

Keys lie in tiles of 16 rows, transposed, so that 16 scores come out of 16 lanes without a sum across lanes:
K [rows / 16, width, 16], V [rows, width]; `width` elements hold a head, whose size is rounded up to 16, the rest zero.
The rows are those of all heads of all layers, one after the other; each head's begin with a tile. Quantized rows have
scales: [rows / 16, scales, 16]. What is in an element, and what scales there are: codes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels import codes
from edge.backends.tvm.cpu.kernels.isa import Isa
from edge.backends.tvm.cpu.kernels.lanes import Buffer, Value, let, load, prefetch, quotient, remainder, store
from edge.backends.tvm.kv.row_formats import FORMATS, RowFormat


@dataclass(frozen=True)
class Cache:
    """The arrays, and what offsets are made of. starts: the first row of each head, [layers, KV heads]."""

    isa: Isa
    dtype: str
    keys: Buffer
    values: Buffer
    key_scales: Buffer
    value_scales: Buffer
    starts: Buffer
    kv_heads: int
    head: int  # padded

    @property
    def form(self) -> RowFormat:
        return FORMATS[self.dtype]

    @property
    def width(self) -> int:
        return self.head // self.form.packed

    def first_row(self, layer: Value, kv_head: Value) -> Value:
        """Rows that lie before those of this head."""
        return T.cast(self.starts[layer * self.kv_heads + kv_head], "int64")

    def turn(self, vectors: Sequence[Value]) -> list[Value]:
        """A query, 16 by 16, as rows are stored; attention's output, back from there."""
        return codes.turn(self.dtype, vectors)

    def load_keys(self, first_row: Value, tile: Value, index: Value) -> list[Value]:
        """The dimensions of the index-th element of 16 rows, float32, not yet scaled."""
        return self._decode(load(self.keys, (first_row + tile * 16) * self.width + index * 16))

    def load_values(self, first_row: Value, row: Value, parts: Sequence[int]) -> dict[int, Value]:
        """Parts of 16 dimensions of one row, float32, not yet scaled."""
        at, packed = (first_row + row) * self.width, self.form.packed
        found: dict[int, Value] = {}
        for group in sorted({part // packed for part in parts}):
            if (group + 1) * packed * 16 <= self.head:
                vectors = self._decode(load(self.values, at + group * 16))
            else:
                vectors = [codes.decode_half(load(self.values, at + group * 16, 8))]
            found |= {group * packed + index: vector for index, vector in enumerate(vectors)}
        return {part: found[part] for part in parts}

    def scales(self, scales: Buffer, first_row: Value, tile: Value) -> list[Value]:
        """Those of 16 rows, as `RowFormat` names them."""
        at, count = (first_row + tile * 16) * self.form.scales, self.form.scales
        stored = [load(scales, at + number * 16) for number in range(count)]
        return [let(self.isa.from_f16(each) if self.form.scale == "float16" else each) for each in stored]

    def fetch_values(self, first_row: Value, tile: Value, index: Value, tiles: int) -> None:
        """Ask for one part in `width` of the values of `tiles` tiles."""
        share = tiles * 16  # elements, of width · share
        for line in range(-(-share // self._line)):
            prefetch(self.values, (first_row + tile * 16) * self.width + index * share + line * self._line)

    def fetch_keys(self, first_row: Value, tile: Value, row: Value) -> None:
        """Ask for the row-th part, as large as a row, of the keys from `tile` on."""
        for line in range(-(-self.width // self._line)):
            prefetch(self.keys, (first_row + tile * 16 + row) * self.width + line * self._line)

    @property
    def _line(self) -> int:
        """Elements in a cache line."""
        return 64 // {"float32": 4, "float16": 2, "int8": 1, "uint8": 1}[self.form.memory]

    def write_key(self, first_row: Value, row: Value, vectors: Sequence[Value]) -> None:
        """`vectors` hold the head's dimensions, 16 by 16."""
        start = let((first_row + quotient(row, 16) * 16) * self.width + remainder(row, 16))
        for part, vector in enumerate(self._encode(self.key_scales, first_row + row, vectors)):
            if self.form.packed == 2:
                store(self.keys, start + part * 128, codes.neighbours(vector), 8, stride=16)
            else:
                store(self.keys, start + part * 256, vector, stride=16)

    def write_value(self, first_row: Value, row: Value, vectors: Sequence[Value]) -> None:
        start = let((first_row + row) * self.width)
        elements = self._encode(self.value_scales, first_row + row, vectors)
        if self.form.packed == 2:
            for part in range(0, len(elements) - 1, 2):
                store(self.values, start + part * 8, codes.packed(elements[part], elements[part + 1], 16))
            if len(elements) % 2:
                store(self.values, start + (len(elements) - 1) * 8, codes.halves(elements[-1]), 8)
            return
        for part, vector in enumerate(elements):
            store(self.values, start + part * 16, vector)

    def _encode(self, scales: Buffer, row: Value, vectors: Sequence[Value]) -> list[Value]:
        """Stores the row's scales."""
        elements, numbers = codes.encode(self.isa, self.dtype, vectors)
        for number, value in enumerate(numbers):
            T.buffer_store(scales, value, [scale_at(row, number, len(numbers))])
        return elements

    def _decode(self, elements: Value) -> list[Value]:
        return codes.decode(self.isa, self.dtype, elements)


def scale_at(row: Value, number: int, count: int) -> Value:
    """Where the number-th of `count` scales of a row lies."""
    return (quotient(row, 16) * count + number) * 16 + remainder(row, 16)

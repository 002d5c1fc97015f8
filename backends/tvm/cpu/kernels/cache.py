"""Rows of the KV cache in memory: how kernels write, read and move them.

Keys lie in tiles of 16 rows, transposed, so that 16 scores come out of 16 lanes without a sum across lanes:
K [rows / 16, width, 16], V [rows, width]. `width` elements hold a key or a value, which is padded with zeros to a
multiple of 16 values. The rows of all heads of all layers lie one after the other; those of each head begin with a
tile. Where values are the beginnings of their keys, there is no V: whole keys are mixed, and the rest is dropped.
Quantized rows have scales: [rows / 16, scales, 16]. `row_formats.py` defines elements and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels import row_formats
from edge.backends.tvm.cpu.kernels.isas.generic import Isa
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Value,
    floats,
    i64,
    let,
    load,
    loop,
    prefetch,
    quotient,
    remainder,
    store,
)
from edge.backends.tvm.kv.row_formats import FORMATS, RowFormat
from edge.model.cores import RowShape


@dataclass(frozen=True)
class Cache:
    """The arrays, and the sizes for offsets. starts: the first row of each head, [layers, KV heads].

    middle: subtracted from codes as they are loaded, for formats that store a row's least value, which becomes that of
    code `middle`: smaller numbers lose less where they are rounded again.
    """

    isa: Isa
    dtype: str
    keys: Buffer
    values: Buffer
    key_scales: Buffer
    value_scales: Buffer
    starts: Buffer
    kv_heads: int  # the most of a layer
    key: int  # values of a key, padded
    value: int  # of a value; `key` if values are `shared`
    shared: bool = False  # values are read from keys
    middle: float = 0.0

    @property
    def form(self) -> RowFormat:
        return FORMATS[self.dtype]

    @property
    def key_width(self) -> int:
        return self.key // self.form.packed

    @property
    def value_width(self) -> int:
        return self.value // self.form.packed

    def first_row(self, layer: Value, kv_head: Value) -> Value:
        """The number of rows before those of this head."""
        return T.cast(self.starts[layer * self.kv_heads + kv_head], "int64")

    def transform(self, vectors: Sequence[Value]) -> list[Value]:
        """A query, 16 values a vector, transformed like the stored rows; or attention's output, transformed back."""
        return row_formats.transform(self.dtype, vectors)

    def load_keys(self, first_row: Value, tile: Value, index: Value) -> list[Value]:
        """The dimensions of the index-th element of 16 rows, float32, not yet scaled."""
        return self._decode(load(self.keys, (first_row + tile * 16) * self.key_width + index * 16))

    def load_some_keys(self, first_row: Value, tile: Value, index: Value, lane: Value) -> Value:
        """The index-th element of 4 rows of a tile, from `lane` on; not of packed formats."""
        (keys,) = self._decode(load(self.keys, (first_row + tile * 16) * self.key_width + index * 16 + lane, 4))
        return keys

    def load_some_values(self, first_row: Value, row: Value, dimension: Value) -> Value:
        """4 dimensions of a row, from `dimension` on; not of packed formats."""
        if self.shared:
            (values,) = self._decode(load(self.keys, self._element(first_row + row, dimension), 4, stride=16))
            return values
        (values,) = self._decode(load(self.values, (first_row + row) * self.value_width + dimension, 4))
        return values

    def load_values(self, first_row: Value, row: Value, parts: Sequence[int]) -> dict[int, Value]:
        """Parts of 16 dimensions of one row, float32, not yet scaled."""
        if self.shared:
            return {part: self._load_dimensions(first_row + row, part) for part in parts}
        at, packed = (first_row + row) * self.value_width, self.form.packed
        found: dict[int, Value] = {}
        for group in sorted({part // packed for part in parts}):
            if (group + 1) * packed * 16 <= self.value:
                vectors = self._decode(load(self.values, at + group * 16))
            else:
                vectors = self._moved([row_formats.decode_half(load(self.values, at + group * 16, 8))])
            found |= {group * packed + index: vector for index, vector in enumerate(vectors)}
        return {part: found[part] for part in parts}

    def _load_dimensions(self, row: Value, part: int) -> Value:
        """16 dimensions of a key."""
        count = 16 // self.form.packed
        stored = load(self.keys, self._element(row, i64(part * count)), count, stride=16)
        if self.form.packed == 1:
            (found,) = self._decode(stored)
            return found
        (found,) = self._moved([row_formats.decode_neighbours(stored)])
        return found

    def _element(self, row: Value, element: Value) -> Value:
        """The offset of an element of a key; the next one of its row lies 16 behind."""
        return let((quotient(row, 16) * self.key_width + element) * 16 + remainder(row, 16))

    @property
    def scales_of_values(self) -> Buffer:
        return self.key_scales if self.shared else self.value_scales

    def scales(self, scales: Buffer, first_row: Value, tile: Value) -> list[Value]:
        """The scales of 16 rows, in the order of `RowFormat`."""
        at, count = (first_row + tile * 16) * self.form.scales, self.form.scales
        stored = [load(scales, at + number * 16) for number in range(count)]
        found = [let(self.isa.from_f16(each) if self.form.scale == "float16" else each) for each in stored]
        return [found[0], let(found[1] + found[0] * floats(self.middle))] if self.middle else found

    def fetch_values(self, first_row: Value, tile: Value, index: Value, tiles: int) -> None:
        """Prefetch part `index` of `key_width` parts of the values of `tiles` tiles."""
        if self.shared:
            return
        share = -(-tiles * 16 * self.value_width // self.key_width)  # elements
        for line in range(-(-share // self._line)):
            prefetch(self.values, (first_row + tile * 16) * self.value_width + index * share + line * self._line)

    def fetch_keys(self, first_row: Value, tile: Value, row: Value) -> None:
        """Prefetch part `row`, as large as a key, of the keys from `tile` on."""
        for line in range(-(-self.key_width // self._line)):
            prefetch(self.keys, (first_row + tile * 16 + row) * self.key_width + line * self._line)

    @property
    def _line(self) -> int:
        """Elements in a cache line."""
        return 64 // {"float32": 4, "float16": 2, "int8": 1, "uint8": 1}[self.form.memory]

    def write_key(self, first_row: Value, row: Value, vectors: Sequence[Value]) -> None:
        """vectors: the head's dimensions, 16 in each."""
        start = let((first_row + quotient(row, 16) * 16) * self.key_width + remainder(row, 16))
        for part, vector in enumerate(self._encode(self.key_scales, first_row + row, vectors)):
            if self.form.packed == 2:
                store(self.keys, start + part * 128, row_formats.neighbours(vector), 8, stride=16)
            else:
                store(self.keys, start + part * 256, vector, stride=16)

    def write_value(self, first_row: Value, row: Value, vectors: Sequence[Value]) -> None:
        if self.shared:
            return
        start = let((first_row + row) * self.value_width)
        elements = self._encode(self.value_scales, first_row + row, vectors)
        if self.form.packed == 2:
            for part in range(0, len(elements) - 1, 2):
                store(self.values, start + part * 8, row_formats.packed(elements[part], elements[part + 1], 16))
            if len(elements) % 2:
                store(self.values, start + (len(elements) - 1) * 8, row_formats.halves(elements[-1]), 8)
            return
        for part, vector in enumerate(elements):
            store(self.values, start + part * 16, vector)

    def _encode(self, scales: Buffer, row: Value, vectors: Sequence[Value]) -> list[Value]:
        """Encode a row: store its scales, and return its elements."""
        elements, numbers = row_formats.encode(self.isa, self.dtype, vectors)
        for number, value in enumerate(numbers):
            T.buffer_store(scales, value, [scale_at(row, number, len(numbers))])
        return elements

    def _decode(self, elements: Value) -> list[Value]:
        return self._moved(row_formats.decode(self.isa, self.dtype, elements))

    def _moved(self, vectors: list[Value]) -> list[Value]:
        return [let(each - floats(self.middle)) for each in vectors] if self.middle else vectors


def scale_at(row: Value, number: int, count: int) -> Value:
    """The offset of scale `number` of a row that has `count` scales."""
    return (quotient(row, 16) * count + number) * 16 + remainder(row, 16)


def move_rows(name: str, row: RowShape, kv_dtype: str) -> Any:
    """The function that copies rows: pairs, int32 [count, 2], hold the source and the target of each copy.

    row: padded. Eviction fills its holes with the last rows of each head.
    """
    pointers = row_formats.memory_types(kv_dtype) | {"pairs": "int32"}
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"global_symbol": name, "tirx.noalias": True})
        arguments = {name: T.arg(name, T.ptr(dtype)) for name, dtype in pointers.items()}
        count = T.arg("count", T.int64())
        arrays = {name: T.decl_buffer((1 << 48,), dtype, data=arguments[name]) for name, dtype in pointers.items()}
        pairs = arrays.pop("pairs")
        with loop(i64(0), count) as index:
            source, target = (let(T.cast(pairs[index * 2 + end], "int64")) for end in (0, 1))
            _copy(FORMATS[kv_dtype], row, arrays, source, target)
    return builder.get()


def _copy(form: RowFormat, shape: RowShape, arrays: dict[str, Buffer], source: Value, target: Value) -> None:
    """Row `target` becomes a copy of row `source`; both count from the start of the arrays."""
    keys, values = arrays["keys"], arrays["values"]
    width, value_width = shape.key // form.packed, shape.stored_value // form.packed
    from_key, to_key = (let(quotient(row, 16) * 16 * width + remainder(row, 16)) for row in (source, target))
    both = min(width, value_width)
    for first, last in ((0, both), (both, max(width, value_width))):
        if first == last:
            continue
        with loop(i64(first), i64(last)) as element:
            if last <= width:
                T.buffer_store(keys, keys[from_key + element * 16], [to_key + element * 16])
            if last <= value_width:
                T.buffer_store(values, values[source * value_width + element], [target * value_width + element])
    for number in range(form.scales):
        from_scale, to_scale = (let(scale_at(row, number, form.scales)) for row in (source, target))
        for name, stored in (("key_scales", width), ("value_scales", value_width)):
            if stored:
                T.buffer_store(arrays[name], arrays[name][from_scale], [to_scale])

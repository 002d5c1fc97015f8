"""LoRA adapters, packed for the kernels into memory of their own beside the weights, which is never streamed.

Where activations are quantized anyway, A is packed in Q8_0 and B as int8 with a scale per row: a step is bound by
memory, and an adapter of rank 16 has 5 % of the parameters of a small model. Elsewhere both are floats. Ranks are
zero-padded to whole vectors. TVM is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.tvm.cpu.arguments import Table
from edge.backends.tvm.design import low_rank_blocks
from edge.backends.tvm.packing.blocks import BLOCKS, TILE
from edge.backends.tvm.packing.cores import groups_of, round_up
from edge.backends.tvm.packing.layout import ALIGNMENT, PackedLayout, Place
from edge.backends.tvm.packing.low_rank import padded_rank
from edge.backends.tvm.packing.weights import pad_rows
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import BLOCK, GRIDS, QuantizedMatrix, half
from edge.model.adapters.lora import Lora
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

Offsets = dict[str, int]
"""Bytes from the start of the adapters' memory, by the names of `Table.lora`; 0 stands for no adapter."""


@dataclass(frozen=True)
class Room:
    """Bytes of one matrix's adapter: of A, A's scales and B for each rank of the padded ones, and of all scales of
    B."""

    layer: int
    name: str
    kind: str  # of B, as `low_rank_blocks` names it
    a: int
    a_scales: int
    b: int
    b_scales: int

    def nbytes(self, rank: int) -> int:
        """Bytes of an adapter of this padded rank, with alignment."""
        parts = (self.a * rank, self.a_scales * rank, self.b * rank + self.b_scales)
        return sum(round_up(each, ALIGNMENT) for each in parts)


def adaptable(layout: PackedLayout, *, exact: bool) -> Iterator[Room]:
    """All matrices that may have an adapter."""
    for layer in range(layout.shape.layers):
        for code, names in _groups(layout, layer):
            kind_a, kind_b = low_rank_blocks(layout.variants[code], exact=exact)
            for name in names:
                place = layout.places[f"blk.{layer}.{name}"]
                a, a_scales = (size // TILE for size in BLOCKS[kind_a].packed_bytes(TILE, place.columns))
                if kind_b == "I8":
                    yield Room(layer, name, kind_b, a, a_scales, place.rows, 4 * place.rows)
                else:
                    yield Room(layer, name, kind_b, a, a_scales, BLOCKS[kind_b].packed_bytes(place.rows, 1)[0], 0)


class Adapters:
    """The adapters that an engine holds, each in a part of `memory`. The engine's table has the offsets of those that
    the next pass applies. parts: the number of each sequence's part; None: no adapter."""

    def __init__(
        self, layout: PackedLayout, table: AnyArray, memory: AnyArray, config: EngineConfig, *, exact: bool
    ) -> None:
        """memory: uint8, of all parts."""
        self._layout, self._table, self._exact, self.memory, count = layout, table, exact, memory, config.loras
        self.parts: list[int | None] = [None] * config.sequences
        self._size = memory.size // count
        slots = Table.of(layout.shape)
        layers = range(layout.shape.layers)
        self._slots = [(layer, slot) for layer in layers for slot in slots.lora]
        self._places = np.array([slots.slot("lora_rank"), *(slots.place(*each) for each in self._slots)])
        self._held: list[tuple[str, AnyArray]] = [("", self._none)] * count  # keys, and numbers of the table
        self._used = [0] * count
        self._next: int | None = None

    @property
    def _none(self) -> AnyArray:
        return np.zeros(self._places.size, np.int64)

    def hold(self, lora: Lora | None, sequence: int) -> None:
        """Give a sequence these adapters, or none. Packs them into the least recently used part that no sequence has,
        unless a part has them.

        Raises InputError if sequences have all parts, and the errors of `pack_adapters`: the sequence then has none.
        """
        self.parts[sequence] = None
        if lora is None:
            return
        keys = [key for key, _ in self._held]
        if lora.key in keys:
            number = keys.index(lora.key)
        else:
            free = [number for number in range(len(keys)) if number not in self.parts]
            if not free:
                raise InputError(f"the engine was loaded for {len(keys)} adapters at the same time")
            number = min(free, key=self._used.__getitem__)
            self._held[number] = "", self._none
            self._held[number] = lora.key, self._pack(lora, number * self._size)
            self._next = None if self._next == number else self._next
        self._used[number] = max(self._used) + 1
        self.parts[sequence] = number

    def run(self, sequence: int) -> None:
        """Make the next pass apply the adapters of this sequence."""
        number = self.parts[sequence]
        if number != self._next:
            self._table[self._places] = self._none if number is None else self._held[number][1]
            self._next = number

    def _pack(self, lora: Lora, first: int) -> AnyArray:
        offsets = pack_adapters(lora, self._layout, self.memory[first : first + self._size], exact=self._exact)
        places = [offsets[layer].get(slot, 0) for layer, slot in self._slots]
        return np.array([padded_rank(lora.size.rank), *(first + at if at else 0 for at in places)], np.int64)


def pack_adapters(lora: Lora, layout: PackedLayout, out: AnyArray, *, exact: bool) -> list[Offsets]:
    """Write the adapters of every layer to `out`, uint8; return their offsets.

    Raises UnsupportedError for adapters of convolutions, ModelFormatError for values that are not finite, or beyond
    float16.
    """
    rank, at, found, packed = padded_rank(lora.size.rank), ALIGNMENT, list[Offsets](), set[str]()
    for layer in range(layout.shape.layers):
        parts: list[tuple[str, AnyArray]] = []
        for code, names in _groups(layout, layer):
            kinds = low_rank_blocks(layout.variants[code], exact=exact)
            places = {name: layout.places[f"blk.{layer}.{name}"] for name in names}
            packed |= {each.source.tensor for each in places.values()}
            made = [_pack(lora, name, each, kinds, rank) for name, each in places.items() if lora.changes(each.source)]
            parts += (part for matrices in zip(*made, strict=True) for part in matrices)  # in the order of reading
        offsets: Offsets = {}
        for slot, part in parts:
            out[at : at + part.size] = part
            offsets[slot], at = at, round_up(at + part.size, ALIGNMENT)
        found.append(offsets)
    check_packed(lora, packed)
    return found


def check_packed(lora: Lora, packed: AbstractSet[str]) -> None:
    """Raise UnsupportedError if adapters change other tensors than these."""
    for adapter in lora.adapters:
        for name in sorted(adapter.pairs.keys() - packed):
            raise UnsupportedError(f"{adapter.file.path}: it changes {name}, and edge runs no adapters of convolutions")


def _groups(layout: PackedLayout, layer: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The groups of a layer's matrices, with their codes."""
    shape = layout.shape
    for number in shape.forms[layout.forms[layer]]:
        for group, names in groups_of(shape.blocks[number].core).items():
            yield shape.code(number, group), names


def _pack(lora: Lora, name: str, place: Place, kinds: tuple[str, str], rank: int) -> list[tuple[str, AnyArray]]:
    """Quants and scales of A, and B, with their slots."""
    a, b = lora.matrices(place.source)
    quants, scales = _pack_a(a, kinds[0], rank)
    parts = {"lora_a": quants, "lora_a.scales": scales, "lora_b": _pack_b(b, kinds[1], rank, place)}
    return [(f"{name}.{slot}", part) for slot, part in parts.items()]


def _pack_a(a: FloatArray, kind: str, rank: int) -> tuple[AnyArray, AnyArray]:
    """Quants and scales of A, [rank, columns]."""
    block, padded = BLOCKS[kind], np.zeros((rank, a.shape[1]), np.float32)
    padded[: len(a)] = a
    if kind != "Q8_0":
        data = floats(padded, kind)
    else:
        blocks = padded.reshape(rank, -1, BLOCK)
        scales = half(np.abs(blocks).max(axis=-1) / np.float32(127))
        codes = GRIDS[kind].codes(padded, np.repeat(scales, BLOCK, axis=1))
        data = QuantizedMatrix(GRIDS[kind], codes, _finite(scales)).data
    quants, factors = block.pack(data.reshape(rank, -1, block.raw_bytes))
    return quants.view(np.uint8).reshape(-1), factors.view(np.uint8).reshape(-1)


def _pack_b(b: FloatArray, kind: str, rank: int, place: Place) -> AnyArray:
    """B, [rows, rank], with rows in the matrix's order. In int8, each tile's scales follow its values."""
    padded = np.zeros((len(b), rank), np.float32)
    padded[:, : b.shape[1]] = b
    if kind != "I8":
        rows, block = pad_rows(floats(padded, kind), place.unit, place.interleaved), BLOCKS[kind]
        return block.pack(rows.reshape(len(rows), rank, block.raw_bytes))[0].view(np.uint8).reshape(-1)
    scales = np.abs(padded).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(padded / np.where(scales > 0, scales, np.float32(1))).astype(np.int8)
    parts = [pad_rows(each.view(np.uint8), place.unit, place.interleaved) for each in (codes, _finite(scales))]
    tiles = [each.reshape(-1, TILE, each.shape[1]) for each in parts]
    columns = tiles[0].swapaxes(1, 2).reshape(len(tiles[0]), -1)
    return np.concatenate([columns, tiles[1].reshape(len(columns), -1)], axis=1).reshape(-1)


def floats(values: FloatArray, kind: str) -> AnyArray:
    """Values as bytes, uint8 [rows, bytes of a row]. Raises ModelFormatError if `kind` has no finite value for one."""
    with np.errstate(over="ignore"):
        stored = values if kind == "F32" else values.astype(np.float16)
    return np.ascontiguousarray(_finite(stored)).view(np.uint8)


def _finite(values: AnyArray) -> AnyArray:
    if not np.isfinite(values).all():
        raise ModelFormatError("the adapter's values are too large for float16: lower its scale")
    return values

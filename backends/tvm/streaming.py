"""Weights that are streamed: which pages of the packed file a pass forgets again, and when.

Pages of a mapped file come as they are read; all that has to be done is to let go of those behind. They leave this
process, and stay in the system's page cache as long as it likes. Every layer, and the head, keeps the same share of its
bytes in memory, so that what is read anew is spread evenly over a pass.
"""

from __future__ import annotations

import mmap
import resource
from dataclasses import dataclass

from edge.backends.base import EngineConfig
from edge.backends.tvm.blocks import BLOCKS
from edge.backends.tvm.blocks.base import growth
from edge.backends.tvm.layout import Layout, Place, round_up
from edge.spec import ModelSpec

STEPS = 256  # shares are multiples of 1/256
_AROUND = 64 << 10  # bytes that Linux maps around a page that is missing
_GROUP = 512 << 10  # bytes of the head for each thread that are read, then let go
_TILES = 16  # of the head for each thread, at least

Pages = tuple[int, int]  # the first one, and how many


@dataclass(frozen=True)
class Need:
    """Bytes of weights. least: resident, if all that can be is streamed. kept: 256ths of each layer that stay.
    streamed: what a pass reads anew."""

    least: int
    kept: int
    streamed: int


def streaming_need(spec: ModelSpec, config: EngineConfig) -> Need:
    """What `config.resident` bytes of weights make possible; counted without a file."""
    packed = packed_bytes(spec)
    worst = max(growth(BLOCKS[name]) for name, _ in spec.type_bytes)
    table = 0 if spec.tied_head else int(spec.embedding_bytes * worst)  # rows are looked up: nothing of it stays
    streamable = packed - table

    def resident(kept: int) -> int:
        return streamable * kept // STEPS + _window(spec, config.threads, worst, kept)

    least = resident(0)
    if not config.resident:
        return Need(least, STEPS, 0)
    kept = max((kept for kept in range(STEPS) if resident(kept) <= config.resident), default=0)
    return Need(least, kept, streamable - streamable * kept // STEPS)


def packed_bytes(spec: ModelSpec) -> int:
    """Of all weights."""
    return sum(int(size * growth(BLOCKS[name])) for name, size in spec.type_bytes)


def _window(spec: ModelSpec, threads: int, worst: float, kept: int) -> int:
    """The most that is resident of what is streamed, and what is never let go.

    One layer, and half of the next: while a last thread has yet to let go of its part, the others can be as far as the
    first barrier of the next, behind q, k and v.
    """
    tile = int(16 * spec.hidden * 4)  # bytes of 16 rows, at most
    layer = 1.5 * spec.largest_layer * worst * (STEPS - kept) / STEPS
    head = 2 * threads * max(_GROUP, _TILES * tile)
    looked_up = threads * 2 * (2 * _AROUND + tile)
    groups = spec.layers + spec.embedding_bytes * worst / (threads * _GROUP)
    learned = 4 * spec.context * spec.hidden if spec.recipe and spec.recipe.learned_positions else 0
    return int(max(layer, head, looked_up) + groups * _AROUND) + learned


@dataclass(frozen=True)
class Streams:
    """pieces: pages that are let go together, two ranges each: of every layer, of every group of the head's tiles, and
    those from which embeddings were taken. kept: pages that stay. head_*: tiles that stay, and of each group.
    """

    page: int  # bytes
    pieces: list[tuple[Pages, Pages]]
    kept: list[Pages]
    head_kept: int
    head_step: int

    @property
    def table(self) -> list[int]:
        """Four numbers for each piece."""
        return [number for piece in self.pieces for pages in piece for number in pages]


def make_streams(layout: Layout, kept: int, threads: int, page: int = mmap.PAGESIZE) -> Streams:
    """kept: 256ths of every layer, and of the head, that stay in memory."""
    none = (0, 0)
    pieces: list[tuple[Pages, Pages]] = []
    stay: list[Pages] = []
    layers = [_layer_range(layout, layer) for layer in range(layout.shape.layers)]
    for start, stop in layers:
        cut = min(stop, start + (stop - start) * kept // STEPS)
        pieces.append((_pages(page, cut, stop), none))
        stay.append(_pages(page, start, cut))
    head = layout.places[layout.head]
    tiles, quants, scales = _tiles(head)
    first = tiles * kept // STEPS
    step = threads * max(_TILES, _GROUP // (quants + scales))
    for at in range(first, tiles, step):
        end = min(tiles, at + step)
        pieces.append((_part(page, head.quants, quants, at, end), _part(page, head.scales, scales, at, end)))
    stay += [_part(page, head.quants, quants, 0, first), _part(page, head.scales, scales, 0, first)]
    table = layout.places["token_embd"]
    if table is head:
        looked_up = _part(page, head.quants, quants, first, tiles), _part(page, head.scales, scales, first, tiles)
    else:
        looked_up = _pages(page, table.quants, table.quants + table.nbytes), none
    return Streams(page, [*pieces, looked_up], [each for each in stay if each[1]], first, step)


class Ahead:
    """Whether pages come from a disk, where asking for them ahead pays; from the page cache, that costs a tenth.

    Told by the process's count of pages that had to be waited for: 64 passes after the last one, that is tried again.
    """

    def __init__(self, streams: bool) -> None:
        self._streams, self._faults, self._passes = streams, 0, 0

    def wanted(self) -> int:
        """Before each pass: 1 or 0."""
        if not self._streams:
            return 0
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._passes = 64 if faults > self._faults else max(0, self._passes - 1)
        self._faults = faults
        return int(self._passes > 0)


def _layer_range(layout: Layout, layer: int) -> tuple[int, int]:
    """Bytes; a layer's tensors lie side by side."""
    places = [place for name, place in layout.places.items() if name.startswith(f"blk.{layer}.")]
    return min(place.quants for place in places), max(place.quants + place.nbytes for place in places)


def _tiles(matrix: Place) -> tuple[int, int, int]:
    """How many tiles, and the bytes of quants and scales of each."""
    assert matrix.block is not None
    return matrix.rows // 16, *matrix.block.packed_bytes(16, matrix.columns)


def _part(page: int, start: int, size: int, first: int, stop: int) -> Pages:
    """Of items of `size` bytes each, those from `first` to `stop`."""
    return _pages(page, start + first * size, start + stop * size)


def _pages(page: int, start: int, stop: int) -> Pages:
    """All that bytes start to stop touch, but for a first one that they share with what lies before."""
    first = round_up(start, page) // page
    return (first, max(0, -(-stop // page) - first)) if stop > start else (0, 0)

"""Weights that are streamed: which pages of the packed file a pass forgets again, and when.

Pages of a mapped file come as they are read; all that has to be done is to let go of those behind. They leave this
process, and stay in the system's page cache unless memory is short. (Asking for pages ahead was tried: Linux then reads
them in small pieces, at half the speed.) Every layer, and the head, keeps the same share of its bytes in memory, so
that what is read anew is spread evenly over a pass.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

from edge.backends.base import EngineConfig
from edge.backends.tvm.packing.blocks import BLOCKS, growth
from edge.backends.tvm.packing.layout import Blocks, Layout, Place, Streams
from edge.model.spec import ModelSpec

STEPS = 256  # shares are multiples of 1/256
BLOCK = 2 << 20  # bytes that are let go together: what Linux may map as one page, which costs a hundredth of small ones
_SEVERAL = 8  # pages waited for in one pass; single ones are of libraries
_FIRST_TRIAL, _LONGEST_TRIAL = 4, 64  # passes
_TILES = 16  # of the head for each thread between two barriers, at least


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

    One layer, and a quarter of the next: while a last thread has yet to let go of its part, the others can be as far as
    the first barrier of the next, behind q, k and v. The end of what was read may lie within a block.
    """
    layer = 1.25 * spec.largest_layer * worst * (STEPS - kept) / STEPS
    head = 2 * _head_group(threads, 64 * spec.hidden)
    looked_up = min(2 * threads * BLOCK, spec.embedding_bytes * worst)
    learned = 4 * spec.context * spec.hidden if spec.recipe and spec.recipe.learned_positions else 0
    return int(max(layer, head, looked_up)) + BLOCK + learned


def _head_group(threads: int, tile: int) -> int:
    """Bytes of the head that are read between two barriers."""
    return max(BLOCK, threads * _TILES * tile)


def make_streams(layout: Layout, kept: int, threads: int) -> Streams:
    """kept: 256ths of all layers, and of the head, that stay in memory. A block belongs to what its last byte is of."""
    head, tables = layout.places[layout.head], layout.places["token_embd"]
    pieces: list[tuple[Blocks, Blocks]] = []
    for layer in range(layout.shape.layers):
        first, stop = _layer_blocks(layout, layer)
        streamed = stop * (STEPS - kept) // STEPS - first * (STEPS - kept) // STEPS
        pieces.append(((stop - streamed, streamed), (0, 0)))
    tiles, quants, scales = _tiles(head)
    stays = tiles * kept // STEPS
    step = max(1, _head_group(threads, quants + scales) // (quants + scales))
    for at in [*range(0, tiles, step), tiles]:
        start, stop = (stays, tiles) if at == tiles else (max(stays, at), max(stays, min(tiles, at + step)))
        pieces.append((_part(head.quants, quants, start, stop), _part(head.scales, scales, start, stop)))
    if tables is not head:  # rows are looked up: nothing of it stays
        pieces[-1] = _part(tables.quants, tables.nbytes, 0, 1), (0, 0)
    return Streams(BLOCK, pieces, _rest(pieces, -(-layout.nbytes // BLOCK)), step)


def _layer_blocks(layout: Layout, layer: int) -> tuple[int, int]:
    """The first and the one behind the last; a layer's tensors lie side by side."""
    places = [place for name, place in layout.places.items() if name.startswith(f"blk.{layer}.")]
    return min(place.quants for place in places) // BLOCK, max(place.quants + place.nbytes for place in places) // BLOCK


def _tiles(matrix: Place) -> tuple[int, int, int]:
    """How many tiles, and the bytes of quants and scales of each."""
    assert matrix.block is not None
    return matrix.rows // 16, *matrix.block.packed_bytes(16, matrix.columns)


def _part(start: int, size: int, first: int, stop: int) -> Blocks:
    """Of items of `size` bytes each, those from `first` to `stop`."""
    block = (start + first * size) // BLOCK
    return block, (start + stop * size) // BLOCK - block


def _rest(pieces: list[tuple[Blocks, Blocks]], count: int) -> list[Blocks]:
    """Of `count` blocks, the last of which may be a part of one, those in no piece."""
    rest, at = [], 0
    for first, length in sorted(blocks for piece in pieces for blocks in piece if blocks[1]):
        if first > at:
            rest.append((at, first - at))
        at = max(at, first + length)
    return rest + [(at, count - at)] * (at < count)


class Disk:
    """Whether streamed pages come from a disk, since memory is short: then they leave the page cache behind a pass.

    Told by the process's count of pages that had to be waited for. Pages that we put out ourselves are waited for in
    any case: so every now and then a pass leaves them, and the next one shows whether they stayed.
    """

    def __init__(self, streams: bool) -> None:
        self._streams, self._faults = streams, _waited_for()
        self._left = 0  # passes until it is tried again, and the one that leaves its pages
        self._length = _FIRST_TRIAL

    def wanted(self) -> int:
        """Before each pass: 1 or 0."""
        if not self._streams:
            return 0
        faults = _waited_for()
        waited, self._faults = faults - self._faults >= _SEVERAL, faults
        if self._left:
            self._left -= 1
        elif waited:
            self._left, self._length = self._length + 1, min(2 * self._length, _LONGEST_TRIAL)
        else:
            self._length = _FIRST_TRIAL
        return int(self._left > 1)


def _waited_for() -> int:
    """Pages that this process had to wait for, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt

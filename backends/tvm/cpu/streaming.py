"""Streamed weights: which pages of the packed file a pass evicts, and when.

The system maps pages as they are read, so a pass only evicts pages that it has read. These leave the process and stay
in the system's page cache unless memory is short. (Prefetching pages was tried: Linux then reads them in small pieces,
at half the speed.) Every layer, and the head, keeps the same share of its bytes in memory, so that reading is spread
evenly over a pass.
"""

from __future__ import annotations

from edge.backends.base import EngineConfig
from edge.backends.tvm.cpu.table import Blocks, Streams
from edge.backends.tvm.packing.blocks import BAND, BLOCKS, TILE, growth
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.layout import ALIGNMENT, PackedLayout, Place
from edge.model.cores import Experts
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass

STEPS = 256  # shares are multiples of 1/256
BLOCK = 2 << 20  # bytes that are evicted together: Linux may map them as one page, at a hundredth of the cost
_SEVERAL = 8  # pages waited for in one pass; single ones belong to libraries
_FIRST_TRIAL, _LONGEST_TRIAL = 4, 64  # passes
_TILES = 16  # of the head for each thread between two barriers, at least
_MATRIX_PARTS = 6  # of an expert: quants and scales of three matrices
_SLOT_BOOKKEEPING = 2 << 20  # bytes, with the recorded choices


@dataclass(frozen=True)
class Need:
    """The memory of streamed weights. least: resident bytes if as many as possible are streamed. kept: 256ths of each
    layer that stay, without experts. streamed: bytes that a pass reads again; `of_experts` of them are experts', for
    uniform routing. slots: bytes of the slots of experts; 0: all stay."""

    least: int
    kept: int
    streamed: int
    of_experts: int = 0
    slots: int = 0


def streaming_need(spec: ModelSpec, config: EngineConfig) -> Need:
    """The shares for at most `config.resident` bytes of weights in memory; computed without the packed file.

    Every pass reads all weights but experts, so these stay first.
    """
    worst = max(growth(BLOCKS[name]) for name in _type_bytes(spec))
    table = 0 if spec.tied_head else int(spec.embedding_bytes * worst)  # only looked up: no part of it stays
    experts = _packed(dict(spec.expert_types))
    streamable = packed_bytes(spec) - experts - table
    slot = _largest_slot(spec) if experts else 0
    fewest = spec.experts_used * slot + (_SLOT_BOOKKEEPING if experts else 0)

    def resident(kept: int) -> int:
        return streamable * kept // STEPS + _window(spec, config.threads, worst, kept)

    least = resident(0) + fewest
    if not config.resident:
        return Need(least, STEPS, 0)
    shares = range(STEPS + bool(experts))
    kept = max((kept for kept in shares if resident(kept) + fewest <= config.resident), default=0)
    slots, read = 0, 0
    if experts:
        slots = max(config.resident - resident(kept), fewest) - _SLOT_BOOKKEEPING
        read = int(max(0.0, 1 - slots / experts) * experts * spec.experts_used / spec.experts)
    return Need(least, kept, streamable - streamable * kept // STEPS + read, read, slots)


def _largest_slot(spec: ModelSpec) -> int:
    """An upper bound of a slot's bytes: rows are padded to whole tiles, and matrices to whole cache lines."""
    cores = [core for core in find_network(spec).cores if isinstance(core, Experts)]
    padding = max(round_up(size, TILE) / size for core in cores for size in (core.ffn, spec.hidden))
    worst = max(growth(BLOCKS[name]) for name, _ in spec.expert_types)
    from edge.backends.tvm.cpu.slots import slot_bytes

    return slot_bytes(int(spec.largest_expert * worst * padding) + _MATRIX_PARTS * ALIGNMENT)


def packed_bytes(spec: ModelSpec) -> int:
    """Packed bytes of all weights but tables that stay in the file."""
    return _packed(_type_bytes(spec))


def _packed(sizes: dict[str, int]) -> int:
    return sum(int(size * growth(BLOCKS[name])) for name, size in sizes.items())


def _type_bytes(spec: ModelSpec) -> dict[str, int]:
    """Bytes of each block type that are packed."""
    tables = {spec.table_type: spec.table_bytes}
    left = {name: size - tables.get(name, 0) for name, size in spec.type_bytes}
    return {name: size for name, size in left.items() if size}


def _window(spec: ModelSpec, threads: int, worst: float, kept: int) -> int:
    """Peak resident bytes of streamed weights, and the part that is never evicted.

    The peak is one layer and a quarter of the next: while the last thread has yet to evict its part, the others can be
    as far as the first barrier of the next layer, after q, k and v. Pieces may end within a block.
    """
    layer = 1.25 * spec.largest_layer * worst * (STEPS - kept) / STEPS
    head = 2 * _head_group(threads, 64 * spec.hidden)
    looked_up = min(
        3 * threads * BLOCK,  # the high bits, low bits and scales of a row
        spec.embedding_bytes * worst,
    )
    inputs = 4 * spec.hidden * spec.layers * spec.network.layer_inputs if spec.network else 0
    learned = 4 * spec.context * spec.hidden if spec.network and spec.network.learned_positions else 0
    return int(max(layer, head, looked_up, inputs)) + BLOCK + learned


def _head_group(threads: int, tile: int) -> int:
    """Bytes of the head that a pass reads between two barriers."""
    return max(BLOCK, max(threads * _TILES, BAND) * tile)


def make_streams(layout: PackedLayout, kept: int, threads: int) -> Streams:
    """The blocks that a pass evicts. kept: 256ths of every layer and of the head that stay. A block belongs to the
    piece of its last byte."""
    head = layout.places[layout.network.head]
    pieces: list[tuple[Blocks, Blocks]] = []
    for layer in range(layout.shape.layers):
        first, stop = _layer_blocks(layout, layer)
        streamed = stop * (STEPS - kept) // STEPS - first * (STEPS - kept) // STEPS
        pieces.append(((stop - streamed, streamed), (0, 0)))
    tiles, quants, scales = _tiles(head)
    whole = BAND if head.halved else 1  # tiles whose bytes lie together
    stays = tiles if kept == STEPS else tiles * kept // STEPS // whole * whole
    step = max(1, _head_group(threads, quants + scales) // (quants + scales) // whole) * whole
    for at in [*range(0, tiles, step), tiles]:
        start, stop = (stays, tiles) if at == tiles else (max(stays, at), max(stays, min(tiles, at + step)))
        pieces.append((_part(head.quants, quants, start, stop), _part(head.scales, scales, start, stop)))
    pieces[-1] = _looked_up(layout, stays)
    return Streams(BLOCK, pieces, _rest(pieces, -(-layout.nbytes_without_experts // BLOCK)), step)


def _looked_up(layout: PackedLayout, stays: int) -> tuple[Blocks, Blocks]:
    """The blocks that are read before the first layer. stays: tiles of the head that stay.

    A chunk without logits reads rows of a tied head, and runs no head that would evict them.
    """
    head, table = layout.places[layout.network.head], layout.places["token_embd"]
    inputs = layout.places.get("per_layer_model_proj")
    second = _part(inputs.quants, inputs.nbytes, 0, 1) if inputs else (0, 0)
    if table is not head:
        return _part(table.quants, table.nbytes, 0, 1), second
    tiles, quants, scales = _tiles(head)
    if not inputs:
        return _part(head.quants, quants, stays, tiles), _part(head.scales, scales, stays, tiles)
    first = (head.quants + stays * quants) // BLOCK
    return (first, (head.quants + head.nbytes) // BLOCK - first), second


def _layer_blocks(layout: PackedLayout, layer: int) -> tuple[int, int]:
    """The first block and the one after the last; a layer's tensors lie side by side, but for experts."""
    found = layout.places.items()
    places = [place for name, place in found if name.startswith(f"blk.{layer}.") and not place.stride]
    return min(place.quants for place in places) // BLOCK, max(place.quants + place.nbytes for place in places) // BLOCK


def _tiles(matrix: Place) -> tuple[int, int, int]:
    """The number of tiles, and the bytes of quants and of scales of each."""
    assert matrix.block is not None
    return matrix.rows // 16, *matrix.block.packed_bytes(16, matrix.columns)


def _part(start: int, size: int, first: int, stop: int) -> Blocks:
    """The blocks of items `first` to `stop`, of `size` bytes each."""
    block = (start + first * size) // BLOCK
    return block, (start + stop * size) // BLOCK - block


def _rest(pieces: list[tuple[Blocks, Blocks]], count: int) -> list[Blocks]:
    """The blocks in no piece. The last of the `count` blocks may be shorter."""
    rest, at = [], 0
    for first, length in sorted(blocks for piece in pieces for blocks in piece if blocks[1]):
        if first > at:
            rest.append((at, first - at))
        at = max(at, first + length)
    return rest + [(at, count - at)] * (at < count)


class Disk:
    """Whether streamed pages come from a disk because memory is short: the page cache loses them, too.

    The process's count of major page faults shows it. Pages that we evicted ourselves cause such faults in any case, so
    now and then a pass leaves them in the page cache, and the next one shows whether they stayed.
    """

    def __init__(self) -> None:
        self._faults = _waited_for()
        self._left = 0  # passes until the next trial, a pass that leaves its pages
        self._length = _FIRST_TRIAL

    def wanted(self) -> int:
        """`Job.disk` of the next pass, 1 or 0; called once before each."""
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
    """Major page faults of this process so far."""
    import resource  # of Linux, as is streaming

    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt

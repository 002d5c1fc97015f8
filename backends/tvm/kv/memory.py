"""The memory of KV rows: arenas, and the arrays that say which rows each head has.

    one arena     rings of sequence 0 │ its other rows │ rings of sequence 1 │ its other rows │ … │ spare rows
    or two, if    rows of sequence 0 │ rows of sequence 1 │ … │ spare rows
    rings have    rings of sequence 0 │ rings of sequence 1 │ … │ spare rows
    other sizes

Every head of every layer has a region of whole tiles (regions.py); an encoder's layers share theirs. Policies choose
the rows of layers without rings. Kernels may read, and never use, the spare rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.backends.base import EngineConfig
from edge.backends.ring import LayerKinds
from edge.backends.row_lists import pinned_bytes
from edge.backends.tvm.kv.regions import SPARE_ROWS, TILE, Regions, make_regions
from edge.backends.tvm.kv.row_formats import FORMATS
from edge.backends.tvm.memory import Array
from edge.backends.tvm.packing.cores import LANES, round_up
from edge.backends.tvm.packing.shape import Shape
from edge.model.cores import Attention, RowShape
from edge.records import dataclass

# Of policies that look at rows head by head: bytes for each row of a head, its physical row and position, and scratch;
# and bytes for each value of keys, which are read layer by layer, and rotated head by head.
_BOOKKEEPING, _LOOKED_AT = 12 + 36, 24
RING = "ring_"  # before the names of arrays of an arena of rings alone


@dataclass(frozen=True)
class ArenaSize:
    """The rows of an arena, of one head each. core: of a layer whose rows are here. whole: rows that policies choose.
    ringed: rows of rings."""

    prefix: str  # of the names of its arrays
    core: Attention
    whole: int
    ringed: int

    @property
    def rows(self) -> int:
        return self.whole + self.ringed

    @property
    def row(self) -> RowShape:
        """Padded."""
        return self.core.row.padded(LANES)

    def array(self, width: int, dtype: str) -> Array:
        """An array with `width` elements for each row."""
        spare = SPARE_ROWS * width
        return Array((self.rows, width), dtype, self.whole * width, self.ringed * width, spare=spare)

    def stored(self, kv_dtype: str) -> dict[str, Array]:
        """Keys, values and their scales in main memory (`HostRows`)."""
        form = FORMATS[kv_dtype]
        types = {name: form.scale if name.endswith("scales") else form.memory for name in form.widths(self.row)}
        return {name: self.array(width, types[name]) for name, width in form.widths(self.row).items()}


@dataclass(frozen=True)
class KVMemory:
    """The rows of all sequences. arenas: the first has the rows that policies choose."""

    shape: Shape
    kinds: LayerKinds
    config: EngineConfig
    context: int
    arenas: tuple[ArenaSize, ...]
    longest: int  # the most rows of one head

    @classmethod
    def of(cls, shape: Shape, kinds: LayerKinds, config: EngineConfig, context: int) -> KVMemory:
        whole, ringed = _regions(shape, kinds, config, context, 0)
        in_all, in_rings = config.sequences * whole.size, config.sequences * ringed.size
        arenas = [ArenaSize("", shape.attention, in_all, 0 if shape.apart else in_rings)]
        if shape.apart:
            arenas.append(ArenaSize(RING, shape.ringed, 0, in_rings))
        return cls(shape, kinds, config, context, tuple(arenas), whole.longest)

    @property
    def heads(self) -> int:
        """The heads whose rows policies choose, of one sequence."""
        return len(self.kinds.whole) * self.shape.attention.kv_heads

    def regions(self, sequence: int = 0) -> tuple[Regions, Regions]:
        """The regions of a sequence's rows that policies choose, and of its rings."""
        return _regions(self.shape, self.kinds, self.config, self.context, sequence)

    def bookkeeping(self) -> dict[str, Array]:
        """The arrays that `Arena` has in main memory: the first row and the number of rows of each head; and of each
        row, where needed, the position (for sliding windows), received attention (for policies), bounds of its page."""
        heads = self.config.together * self.shape.layers * self.shape.kv_heads
        found = {name: Array((heads,), "int32") for name in ("starts", "lengths")}
        for arena in self.arenas:
            rows = arena.array(1, "int32")
            used = 0 if self.kinds.ringed else rows.kv  # else nothing reads those of rows that policies choose
            found[f"{arena.prefix}positions"] = replace(rows, kv=used) if arena.core.window else replace(rows, **_NONE)
        main = self.arenas[0]
        paid = main.array(1, "float32")
        found["attention"] = replace(paid, fixed=0) if self.config.observes else replace(paid, **_NONE)
        if self.config.reads:
            pages, bounds = main.rows // TILE, 2 * main.row.key
            found["bounds"] = Array((pages, bounds), "uint16", kv=main.whole // TILE * bounds)
        return found

    def temporaries(self) -> dict[str, int]:
        """Bytes of other memory that caches take: see head_kv.py and row_lists.py."""
        config, head = self.config, self.shape.padded_head
        at_once = 2 if config.observes else max(2, self.shape.attention.kv_heads)
        looked_at = round_up(self.longest, TILE) * (self.heads * _BOOKKEEPING + at_once * head * _LOOKED_AT)
        found = {"policy": looked_at * config.per_head, "pinned keys": pinned_bytes(self.heads, head, config.pinned)}
        return {name: config.sequences * size for name, size in found.items()}


_NONE: dict[str, Any] = {"shape": (0,), "kv": 0, "fixed": 0}


def _regions(
    shape: Shape, kinds: LayerKinds, config: EngineConfig, context: int, sequence: int
) -> tuple[Regions, Regions]:
    apart = shape.ringed.kv_heads if shape.apart else 0
    shared = shape.encoder and not FORMATS[config.kv_dtype].transformed  # normals are chosen by the rows of all layers
    return make_regions(kinds, shape.attention.kv_heads, config, context, apart, sequence, shared=shared)

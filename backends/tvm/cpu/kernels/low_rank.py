"""The product with B of a LoRA adapter: a few columns, added to the sums of a tile of the model's own matrix."""

from __future__ import annotations

from collections.abc import Sequence

from edge.backends.tvm.cpu.kernels.isa import Isa
from edge.backends.tvm.cpu.kernels.matmul import Weights, to_floats
from edge.backends.tvm.cpu.kernels.vectors import Buffer, Register, Value, i64, let, load, loop, quotient, spread
from edge.backends.tvm.packing.blocks import FloatBlock

_COLUMNS = 8  # that are written out; ranks are padded to multiples of 16


def add_low_rank(
    isa: Isa, weights: Weights, block: FloatBlock, tile: Value, rank: Value, floats: Buffer, starts: Sequence[Value],
    sums: Sequence[Register],
) -> None:  # fmt: skip
    """sums += B · A x for each token. tile: the offset of B's tile in bytes, whose `rank` columns hold 16 rows each.
    starts: where `floats` has the token's A x."""
    memory = weights.floats if block.raw_bytes == 4 else weights.halves
    first = let(quotient(tile, block.raw_bytes))
    with loop(i64(0), quotient(rank, _COLUMNS)) as part:
        for index in range(_COLUMNS):
            at = let(part * _COLUMNS + index)
            weight = let(to_floats(block, isa, load(memory, first + at * 16)))
            for each, start in zip(sums, starts, strict=True):
                each.value = each.value + weight * spread(floats[start + at])

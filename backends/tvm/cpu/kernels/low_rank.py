"""The product with B of a LoRA adapter: a few columns, added to the sums of a tile of the model's own matrix."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.isas.generic import Isa
from edge.backends.tvm.cpu.kernels.matmul import Weights, to_floats
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Register,
    Value,
    i64,
    let,
    load,
    loop,
    prefetch,
    quotient,
    spread,
)
from edge.backends.tvm.cpu.kernels.vectors import floats as constant
from edge.backends.tvm.packing.blocks import BLOCKS, FloatBlock

_COLUMNS = 8  # that are written out; ranks are padded to multiples of 16
_CHAINS = 4  # of sums of one token: with a single one, each product would wait for the one before
_AHEAD = 8  # tiles by which B is prefetched


def add_low_rank(
    isa: Isa, weights: Weights, kind: str, start: Value, tile: Value, rank: Value, x: Buffer, rows: Sequence[Value],
    sums: Sequence[Register], *, fetch: bool,
) -> None:  # fmt: skip
    """sums += B · A x for each token, with tile `tile` of B: `rank` columns of 16 rows each.

    kind: as `low_rank_blocks` names it. start: of B, in bytes. rows: where `x` has the tokens' A x. fetch: prefetch B.
    """
    block = BLOCKS[kind] if kind != "I8" else None
    assert block is None or isinstance(block, FloatBlock)
    size = block.raw_bytes if block else 1
    memory = {4: weights.floats, 2: weights.halves, 1: weights.bytes}[size]
    length = let(rank * (16 * size) + (0 if block else 64))  # of a tile, in bytes
    first = let(quotient(start + tile * length, size))
    chains = [Register() for _ in range(max(len(rows), _CHAINS))]
    for each in chains:
        each.value = constant(0)
    with loop(i64(0), quotient(rank, _COLUMNS)) as part:
        if fetch:
            for line in range(0, _COLUMNS * 16 * size, 64):
                prefetch(weights.bytes, start + (tile + _AHEAD) * length + part * (_COLUMNS * 16 * size) + line)
        for index in range(_COLUMNS):
            at = let(part * _COLUMNS + index)
            stored = load(memory, first + at * 16)
            column = let(to_floats(block, isa, stored) if block else T.cast(stored, "float32x16"))
            for number, row in enumerate(rows):
                chain = chains[number if len(rows) > 1 else index % _CHAINS]
                chain.value = chain.value + column * spread(x[row + at])
    scales = None if block else let(load(weights.floats, quotient(first + rank * 16, 4)))
    for number, each in enumerate(sums):
        parts = chains if len(rows) == 1 else [chains[number]]
        found = parts[0].value
        for other in parts[1:]:
            found = found + other.value
        each.value = each.value + (found if scales is None else found * scales)

"""The sizes of LoRA adapters in memory (adapters.py packs them). TVM is not needed."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks import TILE
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.layout import ALIGNMENT, units_of
from edge.model.structure.layers import Network


def padded_rank(rank: int) -> int:
    return round_up(rank, TILE)


def adapter_bytes(network: Network, rank: int, *, exact: bool) -> int:
    """Bytes for adapters of all matrices of all layers. exact: in float32."""
    if not rank:
        return 0
    size, total = 4 if exact else 2, ALIGNMENT
    for name, tensor in network.tensors():
        if name.startswith("blk.") and tensor.columns and not tensor.exact:
            unit, _ = units_of(network, name, tensor)
            rows = -(-tensor.rows // unit) * round_up(unit, TILE)
            total += (rows + tensor.columns) * padded_rank(rank) * size + 3 * ALIGNMENT
    return round_up(total, ALIGNMENT)

"""The two parts of a latent row (`edge.model.cores.Latent`), which share a scale in 8 and 4 bits, in one size.

Rotated keys are multiplied by a power of two, and the ends of queries divided by it: scores stay the same, to the last
bit in float32. DeepSeek's rotated keys are reported to reach 10^3 beside latent vectors of 10 (SnapMLA,
arXiv:2602.10718), whose codes of a common scale would be 0.
"""

from __future__ import annotations

import math

import numpy as np

from edge.backends.tvm.kv.row_formats import BALANCED
from edge.backends.tvm.packing.layout import PackedLayout
from edge.formats.gguf import GGUFFile
from edge.types import FloatArray


def find_balances(file: GGUFFile, layout: PackedLayout, kv_dtype: str) -> list[int]:
    """For each layer, the exponent of the power of two by which rotated keys are multiplied.

    A norm's output is taken for independent values of variance 1 times its weights. int8's scale is that of the largest
    value; int4 transforms rows, which spreads values over blocks of theirs.
    """
    found = [0] * layout.shape.layers
    for layer, core in enumerate(layout.network.attention):
        if core and core.latent and kv_dtype in BALANCED:
            from edge.backends.reference.weights import read_rows, read_weight  # here: for latent rows alone

            def vector(name: str, at: str = f"blk.{layer}.") -> FloatArray:
                return read_weight(file, layout.places[at + name].source.tensor)

            rows = np.arange(core.row.value, core.row.key, dtype=np.int32)
            name = layout.places[f"blk.{layer}.attn_kv_a_mqa"].source.tensor
            keys = np.linalg.norm(read_rows(file, name, rows) * vector("attn_norm"), axis=1)
            sizes = [_size(each, kv_dtype) for each in (vector("attn_kv_a_norm"), keys)]
            if all(0 < size < math.inf for size in sizes):
                found[layer] = max(-60, min(60, round(math.log2(sizes[0] / sizes[1]))))
    return found


def _size(values: FloatArray, kv_dtype: str) -> float:
    return float(np.abs(values).max() if kv_dtype == "int8" else np.sqrt(np.square(values).mean()))

"""LoRA adapters, packed for the kernels: a buffer for each layer, with A and B of every matrix that may have one.

Both are float16, or float32 where the KV cache is: A in the layout of the model's matrices, B row by row. Ranks are
zero-padded to one number, which the kernels are compiled for; matrices without an adapter have zeros. TVM is not
needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge.backends.tvm.adapters import check_packed, floats
from edge.backends.tvm.gpu.weights import LayerLayout, Matrix, Packed, WeightsLayout, pack_floats, pack_rows
from edge.backends.tvm.packing.blocks import BLOCKS, PART
from edge.backends.tvm.packing.cores import round_up
from edge.errors import UnsupportedError
from edge.model.adapters.lora import Lora
from edge.model.structure.layers import Network
from edge.model.tensors import Source
from edge.records import dataclass
from edge.types import FloatArray

_RANKS = 8  # of which padded ranks are multiples: a row of B has whole quads of words

Adapted = frozenset[tuple[int, str]]
"""Matrices that adapters change: their layer and name."""


@dataclass(frozen=True)
class LowRank:
    """The places of the adapter of a matrix in its layer's buffer."""

    name: str  # of the matrix
    a: Matrix  # [rank, columns]
    at: int  # the first word of B, [rows, rank]
    rows: int

    @property
    def rank(self) -> int:
        return self.a.rows

    @property
    def row_words(self) -> int:
        """Words of a row of B."""
        return self.rank * _value_bytes(self.a.kind) // 4

    @property
    def end(self) -> int:
        return self.at + self.rows * self.row_words


@dataclass(frozen=True)
class Adapters:
    """The adapters that a program supports."""

    rank: int = 0  # padded; 0: none
    kind: str = "F16"  # block type of A and B

    @classmethod
    def of(cls, rank: int, kv_dtype: str) -> Adapters:
        return cls(round_up(rank, _RANKS), _kind(kv_dtype)) if rank else cls()

    def layer(self, layout: LayerLayout) -> dict[str, LowRank]:
        """The adapters of a layer's matrices, by their names."""
        found, at = dict[str, LowRank](), 0
        for name, matrix in layout.tensors:
            if self.rank and isinstance(matrix, Matrix):
                a = Matrix(at, self.rank, matrix.columns, self.kind)
                found[name] = LowRank(name, a, at + a.words, matrix.rows)
                at = found[name].end
        return found

    def buffers(self, weights: WeightsLayout) -> dict[str, int]:
        """Bytes by name: lora.0 …"""
        sizes = {f"lora.{number}": self._nbytes(layout) for number, layout in enumerate(weights.layers)}
        return {name: size for name, size in sizes.items() if size}

    def all_of(self, weights: WeightsLayout) -> Adapted:
        return frozenset((number, name) for number, layout in enumerate(weights.layers) for name in self.layer(layout))

    def check(self, weights: WeightsLayout, limit: int) -> None:
        """Raise UnsupportedError if a layer's adapters exceed `limit`, the bytes of a buffer that kernels can read."""
        largest = max(self.buffers(weights).values(), default=0)
        if largest > limit:
            raise UnsupportedError(
                f"a layer has {largest >> 20} MiB of adapters, kernels of this GPU see {limit >> 20}: take a smaller "
                "rank, or run on the CPU"
            )

    def _nbytes(self, layout: LayerLayout) -> int:
        return max((4 * each.end for each in self.layer(layout).values()), default=0)


def adapter_bytes(network: Network, rank: int, kv_dtype: str) -> int:
    """Bytes of `Adapters.buffers`, from the network alone."""
    of, total = Adapters.of(rank, kv_dtype), 0
    for name, tensor in network.tensors():
        if name.startswith("blk.") and tensor.columns and not tensor.exact and not tensor.experts:
            total += of.rank * (tensor.rows + round_up(tensor.columns, PART)) * _value_bytes(of.kind)
    return total


def pack_adapters(
    lora: Lora, tensors: dict[str, Source], weights: WeightsLayout, adapters: Adapters
) -> Iterator[tuple[Packed, Adapted]]:
    """Yield each layer's whole buffer, packed, and the matrices that the adapters change there.

    Raises UnsupportedError for adapters of convolutions, ModelFormatError for values that are not finite, or beyond
    float16.
    """
    packed = set[str]()
    for number, layout in enumerate(weights.layers):
        places = [(tensors[f"blk.{number}.{name}"], each) for name, each in adapters.layer(layout).items()]
        packed |= {source.tensor for source, _ in places}
        changed = [(source, each) for source, each in places if lora.changes(source)]
        words = np.zeros(max((each.end for _, each in places), default=0), np.uint32)
        for source, each in changed:
            a, b = lora.matrices(source)
            width = each.a.columns
            (rows,) = pack_rows(each.a, floats(_padded(a, each.rank, width), each.a.kind))
            words[each.a.at : each.at] = rows.reshape(-1)
            words[each.at : each.end] = pack_floats(
                floats(_padded(b, each.rows, each.rank), each.a.kind), each.row_words, BLOCKS[each.a.kind]
            ).reshape(-1)
        yield (f"lora.{number}", 0, words), frozenset((number, each.name) for _, each in changed)
    check_packed(lora, packed)


def _padded(values: FloatArray, rows: int, columns: int) -> FloatArray:
    found = np.zeros((rows, columns), np.float32)
    found[: values.shape[0], : values.shape[1]] = values
    return found


def _kind(kv_dtype: str) -> str:
    return "F32" if kv_dtype == "f32" else "F16"


def _value_bytes(kind: str) -> int:
    return BLOCKS[kind].raw_bytes

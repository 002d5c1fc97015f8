"""The sketch of a head: what the first of two stages reads of each row, beside the high halves of its weights.

A head in two stages computes the logits that may be among the largest, and no others (`cpu/phases/ranking.py`). A row
w = w' + r of Q8_0 has high halves w' (`HIGH_HALVES`) and a rest r. P has k orthonormal columns: the directions in which
hidden states of random tokens are largest. With c = Pᵀ r and any z, the logit of a hidden state h is

    w · h = w' · h + a · z + (r − P c) · v + c · Pᵀ v + (c − a) · z,    v = h − P z.

The sketch has a, c rounded to 4 bits, and the norms of r − P c and c − a, by which Cauchy and Schwarz bound what it
does not have. The directions only make the bound tight; it holds for any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edge.backends.tvm.packing.blocks import BLOCKS, HALVES, HIGH_HALVES, PART, TILE, Bytes
from edge.types import AnyArray, FloatArray

DIRECTIONS = 64
ROUNDING = 1 / 40  # ‖Pᵀ v‖ / ‖z‖ at most, where z is Pᵀ h in blocks of 32 signed bytes: √32 / 254 and some more
_HEADER = 64  # bytes: the largest norms of `make_sketch`


@dataclass(frozen=True)
class SketchLayout:
    """The places in a sketch, in bytes: norms, P as a packed matrix of float32, and a record for each tile of 16 rows.

    A record has a, packed as Q4_0, its scales, then ‖r − P c‖ and ‖c − a‖ + ‖c‖ · ROUNDING of each row, float16,
    rounded up.
    """

    rows: int
    columns: int

    directions_at = _HEADER
    scales_at = DIRECTIONS // PART * BLOCKS["Q4_0"].packed_bytes(TILE, PART)[0]  # within a record
    norms_at = scales_at + DIRECTIONS // PART * BLOCKS["Q4_0"].packed_bytes(TILE, PART)[1]
    record = norms_at + 2 * 2 * TILE

    @property
    def records_at(self) -> int:
        return _HEADER + 4 * DIRECTIONS * self.columns

    @property
    def nbytes(self) -> int:
        return self.records_at + self.rows // TILE * self.record


def find_directions(states: FloatArray) -> FloatArray:
    """P, float32 [columns, DIRECTIONS], of hidden states [n, columns]."""
    wide = states.astype(np.float64)
    _, vectors = np.linalg.eigh(wide.T @ wide)
    return np.ascontiguousarray(vectors[:, : -DIRECTIONS - 1 : -1], np.float32)


def make_sketch(slices: Iterable[Bytes], directions: FloatArray, rows: int) -> Bytes:
    """The sketch of a matrix, whose rows come in slices of whole tiles, uint8 [rows, blocks, bytes of a Q8_0 block]."""
    columns = len(directions)
    layout = SketchLayout(rows, columns)
    out = np.zeros(layout.nbytes, np.uint8)
    largest = out[:8].view(np.float32)
    packed = BLOCKS["F32"].pack(np.ascontiguousarray(directions.T).view(np.uint8).reshape(DIRECTIONS, columns, 4))[0]
    out[layout.directions_at : layout.records_at] = packed.reshape(-1)
    wide = directions.astype(np.float64)
    records, at = out[layout.records_at :].reshape(-1, layout.record), 0
    with np.errstate(all="ignore"):  # rows that are not finite have norms that are not, and are never left out
        for raw in slices:
            tiles, (first, second) = _records(raw, wide)
            records[at : at + len(tiles)] = tiles
            at += len(tiles)
            largest[:] = np.fmax(largest, np.float32(1.0001) * np.array([first, second], np.float32))
    return out


def _records(raw: Bytes, directions: AnyArray) -> tuple[Bytes, tuple[float, float]]:
    """The records of some rows. Returns also the largest sum of the norms of parts of a row, and the largest ‖c‖."""
    scale = raw[:, :, :2].copy().view(np.float16).astype(np.float64)
    quants = raw[:, :, 2:].view(np.int8)
    high = (quants >> 4) * 16.0 + 8.0
    rest = ((quants - high) * scale).reshape(len(raw), -1)
    c = rest @ directions
    blocks = c.reshape(len(raw), -1, PART)
    steps = (np.abs(blocks).max(axis=-1, keepdims=True) / 7).astype(np.float16)
    codes = np.nan_to_num(np.clip(np.rint(blocks / np.where(steps, steps, 1)), -8, 7), nan=0.0)
    a = (codes * steps.astype(np.float64)).reshape(c.shape)
    nibbles = (codes + 8).astype(np.uint8)
    q4 = np.concatenate([steps.view(np.uint8), nibbles[..., :16] | nibbles[..., 16:] << np.uint8(4)], axis=-1)

    squares = np.square(rest).sum(axis=1)
    outside = squares - 2 * np.square(c).sum(axis=1) + np.einsum("ij,jk,ik->i", c, directions.T @ directions, c)
    of_c = np.linalg.norm(c, axis=1)
    norms = [
        np.sqrt(np.maximum(outside, 0)) + 1e-7 * np.sqrt(squares),
        np.linalg.norm(c - a, axis=1) + of_c * ROUNDING,
    ]
    quarters, scales = BLOCKS["Q4_0"].pack(q4)
    parts = [
        quarters.reshape(len(raw) // TILE, -1), scales.reshape(len(raw) // TILE, -1),
        *(_up(norm).view(np.uint8).reshape(-1, 2 * TILE) for norm in norms),
    ]  # fmt: skip
    of_high = np.linalg.norm((high * scale).reshape(rest.shape), axis=1)
    every = 2 * of_high + np.sqrt(squares) + np.linalg.norm(a, axis=1) + norms[0] + norms[1]
    return np.concatenate(parts, axis=1), (_largest(every), _largest(of_c))


def _up(values: AnyArray) -> AnyArray:
    """Float16, rounded up; NaN stays NaN."""
    found = values.astype(np.float16)
    return np.where(found.astype(np.float64) < values, np.nextafter(found, np.float16(np.inf)), found)


def _largest(norms: AnyArray) -> float:
    return float(norms[np.isfinite(norms)].max(initial=0.0))


assert HIGH_HALVES.values == HALVES.values == PART

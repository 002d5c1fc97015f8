"""Everything that the kernels of a model on a GPU depend on, as data. TVM is not needed."""

from __future__ import annotations

from dataclasses import dataclass

ANGLES_AHEAD = 64  # decode steps for which angles are computed at once
PICKS = 256  # ids that may be picked before the host reads them
ALIGNMENT = 64  # words, between the parts of `Tables`: 256 bytes


class State:
    """Words at the start of `tables`."""

    COUNT = 0  # tokens of this pass
    APPENDED = 1  # rows that passes have appended since lengths were uploaded
    ANGLE = 2  # row of the table of angles for the pass's first token
    POSITION = 3  # of the first token
    WANTED = 4  # last tokens whose logits are wanted
    OBSERVED = 5  # last tokens whose attention is added up
    VOTES = 6  # 1: count instead the tokens that pay a row more than the average
    PICKED = 7  # ids picked since this was uploaded
    WORDS = 64


@dataclass(frozen=True)
class Tables:
    """Offsets in words of the buffer `tables`.

    starts, lengths: [layers, KV heads], a head's first row in the arena, and its rows in use. angles: float32
    [kinds, angle_rows, 2, pairs], cosines, then sines, for consecutive positions. positions: [rows of the arena],
    behind everything else, since their number is not known here.
    """

    starts: int
    lengths: int
    angles: int
    positions: int
    angle_rows: int
    pairs: int

    @classmethod
    def of(cls, layers: int, kv_heads: int, kinds: int, chunk: int, pairs: int) -> Tables:
        """pairs: values of a head that are rotated, by two."""
        starts = State.WORDS
        lengths = starts + _aligned(layers * kv_heads)
        angles = lengths + _aligned(layers * kv_heads)
        rows = chunk + ANGLES_AHEAD
        return cls(starts, lengths, angles, angles + _aligned(kinds * rows * 2 * pairs), rows, pairs)

    def angle_row(self, kind: int) -> int:
        """Where the first row of one kind of rope is."""
        return self.angles + kind * self.angle_rows * 2 * self.pairs


@dataclass(frozen=True)
class Tuning:
    """How work is divided, which suits one device better than another: what `edge tune` races.

    rows: of a matrix that a thread multiplies at once in a step. split: threads that share a row's columns.
    workgroup: threads of a product. gemm_tokens, gemm_rows: tile of a workgroup in a chunk. attend: threads that attend
    for one KV head. dot4: products of packed bytes, with activations quantized to 8 bits.
    """

    rows: int = 2
    split: int = 16
    workgroup: int = 64
    gemm_tokens: int = 32
    gemm_rows: int = 32
    attend: int = 128
    dot4: int = 0


def _aligned(words: int) -> int:
    return -(-words // ALIGNMENT) * ALIGNMENT

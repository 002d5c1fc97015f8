"""Blocks of streamed weights: let go when they have been read. `streaming.py` has chosen them."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.lanes import Value, i64, let, when
from edge.backends.tvm.cpu.phases.frame import Frame

_DONTNEED, _PAGEOUT = 4, 21  # of Linux's madvise, on all machines


def let_go(f: Frame, piece: Value) -> None:
    """The thread's share of the blocks of a piece that all threads have read.

    From a disk, they leave the page cache, too: where memory is short, the system would make room by weights that
    stay, as all are read equally often.
    """
    with when(f.disk > 0):
        _advise(f, piece, _PAGEOUT)
    _advise(f, piece, _DONTNEED)


def let_go_of_rows(f: Frame) -> None:
    """All blocks from which embeddings were taken: another thread that still reads there has them back at once."""
    piece = last_piece(f)
    for half in (0, 2):
        _advise_blocks(f, f.piece_at(piece, half), i64(0), f.piece_at(piece, half + 1), _DONTNEED)


def last_piece(f: Frame) -> Value:
    """That of the embeddings, behind those of the layers and of the head's groups."""
    return let(f.at("head_parts") + f.shape.layers)


def _advise(f: Frame, piece: Value, advice: int) -> None:
    for half in (0, 2):
        count = let(f.piece_at(piece, half + 1))
        with when(count > 0):
            _advise_blocks(f, f.piece_at(piece, half), *f.range(count), advice)


def _advise_blocks(f: Frame, first: Value, start: Value, stop: Value, advice: int) -> None:
    with when(stop > start):
        size = let(f.at("block"))
        address = T.address_of(f.weights.bytes[let((first + start) * size)])
        T.evaluate(T.call_extern("int32", "madvise", address, (stop - start) * size, T.int32(advice)))

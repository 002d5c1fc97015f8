"""Evicting blocks of streamed weights after a pass has read them; `cpu/streaming.py` chooses them."""

from __future__ import annotations

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.vectors import Value, i64, let, when
from edge.backends.tvm.cpu.phases.builder import PassBuilder

_DONTNEED, _PAGEOUT = 4, 21  # of Linux's madvise, on all machines


def evict_piece(b: PassBuilder, piece: Value) -> None:
    """Evict the thread's share of a piece that all threads have read.

    Blocks that come from a disk leave the page cache, too: the system would otherwise make room by evicting weights
    that stay, since all are read equally often.
    """
    if not b.design.streams:
        return
    with when(b.disk > 0):
        _advise(b, piece, _PAGEOUT)
    _advise(b, piece, _DONTNEED)


def evict_embeddings(b: PassBuilder) -> None:
    """Evict all blocks of embeddings. A thread that still reads one maps it again."""
    if not b.design.streams:
        return
    piece = last_piece(b)
    for half in (0, 2):
        _advise_blocks(b, b.piece_at(piece, half), i64(0), b.piece_at(piece, half + 1), _DONTNEED)


def last_piece(b: PassBuilder) -> Value:
    """The piece of the embeddings, after those of the layers and of the head's groups."""
    return let(b.at("head_parts") + b.shape.layers)


def _advise(b: PassBuilder, piece: Value, advice: int) -> None:
    for half in (0, 2):
        count = let(b.piece_at(piece, half + 1))
        with when(count > 0):
            _advise_blocks(b, b.piece_at(piece, half), *b.range(count), advice)


def _advise_blocks(b: PassBuilder, first: Value, start: Value, stop: Value, advice: int) -> None:
    with when(stop > start):
        size = let(b.at("block"))
        address = T.address_of(b.weights.bytes[let((first + start) * size)])
        T.evaluate(T.call_extern("int32", "madvise", address, (stop - start) * size, T.int32(advice)))

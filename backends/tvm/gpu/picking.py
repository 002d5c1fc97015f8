"""Token selection on the device: the dispatches of `kernels/pick.py`, and the host's reading of their results."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.gpu.program import Dispatch, Slice
from edge.types import FloatArray, IntArray

TOP = 64  # candidates of `top`
THREADS = 256
SORTED = 1024  # pairs that a workgroup sorts: 8 KiB of its memory
MOST_PARTS = 256  # workgroups of the first stage of an argmax: as many as the second has threads


def found_bytes(vocab: int) -> int:
    """Bytes of the buffer `found` for a row of logits, uint32: pairs of a key and an id."""
    pairs, total = vocab, 0
    while pairs > TOP:
        pairs = _groups(pairs) * TOP
        total += pairs
    return 8 * max(total, TOP, MOST_PARTS)


def argmax(vocab: int, chunk: int, logits: Slice) -> tuple[Dispatch, ...]:
    """Dispatches after a step: tokens[0] becomes the likeliest token except banned ones, its id is appended to those
    picked before, and the state advances to the next step. The id is −1 − id if the logits have a NaN, which argmax
    finds first.

    logits: float32 [vocab]. chunk: words of `tokens` before the ids.
    """
    parts = min(MOST_PARTS, -(-vocab // (4 * THREADS)))
    return (
        Dispatch("edge_likeliest", (Slice("found"), logits, Slice("tables")), (vocab, parts), (parts, 1), "head"),
        Dispatch("edge_pick", (Slice("tables"), Slice("tokens"), Slice("found")), (parts, chunk), (1, 1), "head"),
    )


def top(vocab: int, logits: Slice, rows: int = 1) -> tuple[Dispatch, ...]:
    """Dispatches that find the `TOP` largest logits (all, if there are fewer) of each row, for `candidates`. logits:
    float32 [rows, vocab]. rows: the most; if several, a run says how many."""
    stride, per = found_bytes(vocab) // 4, int(rows > 1)
    groups = _groups(vocab), rows
    passes = [Dispatch("edge_top_logits", (Slice("found"), logits), (vocab, stride), groups, "head", per=per)]
    pairs, at = _groups(vocab) * TOP, 0
    while pairs > TOP:
        source, at = at, at + 2 * pairs
        groups, scalars = (_groups(pairs), rows), (pairs, stride, source, at)
        passes.append(Dispatch("edge_top_pairs", (Slice("found"),), scalars, groups, "head", per=per))
        pairs = groups[0] * TOP
    return tuple(passes)


def top_offset(vocab: int) -> int:
    """The byte offset of `top`'s result in a row's part of `found`."""
    last = top(vocab, Slice("logits"))[-1]
    return 4 * last.scalars[-1] if last.kernel == "edge_top_pairs" else 0


def candidates(found: IntArray, k: int) -> tuple[IntArray, FloatArray]:
    """Ids, int32 [k], and logits, float32 [k], from the result of `top`: uint32 [2 · TOP], k ≤ TOP."""
    keys, ids = found[0 : 2 * k : 2], found[1 : 2 * k : 2]
    words = np.where(keys >> 31, keys ^ np.uint32(1 << 31), ~keys)
    return ids.astype(np.int32), words.astype(np.uint32).view(np.float32)


def _groups(pairs: int) -> int:
    return -(-pairs // SORTED)

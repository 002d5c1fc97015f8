"""What a timed pass notes, and where: each thread the time that went by since its last mark. No TVM is needed."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.packing.layout import round_up
from edge.types import IntArray

MARKS = {  # what a pass does, in its order, and the phase of `backends.base.PHASES` that it belongs to
    "idle": "",  # until the pass begins: nobody asks for it
    "embed": "embed",
    "attn_norm": "norm",
    "qkv": "qkv",
    "attend": "attend",
    "merge": "attend",  # a step's parts of what heads give
    "quantize_mixed": "output",
    "output": "output",
    "post_attention_norm": "norm",
    "ffn_norm": "norm",
    "gate_up": "gate-up",
    "quantize_ffn": "down",
    "down": "down",
    "post_ffw_norm": "norm",
    "output_norm": "norm",
    "head": "head",
}
WORK, WAIT = 0, 1  # what went by before a barrier, and in it
NANOSECONDS, CALLS = 0, 1
_LAST = 16  # int64 words before a thread's counters, whose first is its last mark: two cache lines, as everywhere


def stride(layers: int) -> int:
    """int64 words of one thread: for each layer, and behind them for what is outside of layers, all marks."""
    return round_up(_LAST + (layers + 1) * len(MARKS) * 4, _LAST)


def offset(name: str, kind: int) -> int:
    """Of a mark's counters from the start of its layer's, in words."""
    return list(MARKS).index(name) * 4 + kind * 2


def first(layer: int) -> int:
    """Of a layer's counters from the start of the thread's, in words. It takes an expression of TVM as well."""
    return _LAST + layer * (len(MARKS) * 4)


def read(times: IntArray, layers: int) -> IntArray:
    """A copy of the counters, int64 [threads, layers + 1, marks, WORK or WAIT, NANOSECONDS or CALLS]."""
    threads = times.reshape(-1, stride(layers))
    counters = threads[:, first(0) : first(layers + 1)]
    return np.array(counters.reshape(len(threads), layers + 1, len(MARKS), 2, 2))

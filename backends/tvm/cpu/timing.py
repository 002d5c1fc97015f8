"""Times of the phases of a pass that is compiled with timestamps (`kernels/timing.py`). TVM is not needed.

At each mark, a thread adds the time since its last mark to the counters of the mark's name and layer. A phase lasts
from one barrier to the next, so its time is that of the slowest thread; where a step does two things between barriers
(norm and product), the marks of thread 0 separate them. A mark takes about 30 ns: a few hundred of them are at most 1 %
of the smallest model's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from edge.backends.base import Engine, EngineConfig, Operator
from edge.backends.operators import Piece, attention_flops, pieces, repeat_pass
from edge.backends.tvm.kv.row_formats import row_bytes
from edge.backends.tvm.packing.cores import KINDS, kind_of, round_up
from edge.backends.tvm.packing.layout import PackedLayout, Place
from edge.model.cores import Experts
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.types import AnyArray, IntArray

_NORMS = (
    "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm", "attn_output_norm",
    "layer_output_norm", "output_norm", "post_ffw_norm_1", "ffn_gate_inp.scale", "pre_ffw_norm_2", "post_ffw_norm_2",
)  # fmt: skip
MARKS = {  # the parts of a pass, and the phase of `backends.base.PHASES` that each belongs to
    "idle": "",  # before the pass begins; not reported
    "embed": "embed",
    "layer_inputs": "embed",
    "deepstack": "other",
    "adapt": "other",
    **dict.fromkeys(_NORMS, "norm"),
    **{name: phase for kind in KINDS.values() for name, phase in kind.marks.items()},
    "head": "head",
}
WORK, WAIT = 0, 1  # the time before a barrier, and the time in it
NANOSECONDS, CALLS = 0, 1
_LAST = 16  # int64 words before a thread's counters, the first of which is its last timestamp: two cache lines


def thread_words(layers: int) -> int:
    """int64 words of one thread: all counters of each layer, then those of the marks outside of layers."""
    return round_up(_LAST + (layers + 1) * len(MARKS) * 4, _LAST)


def mark_offset(name: str, kind: int) -> int:
    """Words from the first counter of a layer to those of a mark."""
    return list(MARKS).index(name) * 4 + kind * 2


def layer_offset(layer: int) -> int:
    """Words from a thread's first word to the counters of a layer. It takes an expression of TVM, too."""
    return _LAST + layer * (len(MARKS) * 4)


def read_counters(times: IntArray, layers: int) -> IntArray:
    """A copy of the counters, int64 [threads, layers + 1, marks, WORK or WAIT, NANOSECONDS or CALLS]."""
    threads = times.reshape(-1, thread_words(layers))
    counters = threads[:, layer_offset(0) : layer_offset(layers + 1)]
    return np.array(counters.reshape(len(threads), layers + 1, len(MARKS), 2, 2))


class TimedEngine(Engine, Protocol):
    """An engine that is compiled with timestamps. times: the counters of its threads."""

    config: EngineConfig
    times: IntArray


def time_operators(
    engine: TimedEngine, layout: PackedLayout, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    """See `Backend.operators`. bytes: of the packed weights, padding included, and of KV rows that queries see."""
    spec, config = engine.spec, engine.config

    def run(ids: IntArray) -> AnyArray:
        engine.times[:] = 0
        engine.forward(ids)
        return read_counters(engine.times, spec.layers)

    counted = repeat_pass(engine, tokens, context, passes, run, progress)
    counts = Counts(layout, spec, config.kv_dtype, list(pieces(tokens, context, config.chunk)))
    return list(_operators(counted, counts))


def _operators(counted: Sequence[AnyArray], counts: Counts) -> Iterable[Operator]:
    """The operators of the counted passes, in the order of a pass."""
    layers = counts.spec.layers
    times = np.stack(counted).astype(np.float64)  # [passes, threads, layers + 1, marks, work or wait, ns or calls]
    spent = times[..., NANOSECONDS]
    seconds = np.median(spent[:, 0].sum(axis=-1), axis=0) / 1e9  # thread 0's [layers + 1, marks]
    waiting, all_threads = spent[..., WAIT].sum(axis=(0, 1)), spent.sum(axis=(0, 1, 4))
    calls = counted[0][0, :, :, WORK, CALLS]
    before = [(layers, 1)]
    names = list(MARKS)
    inside = [(layer, names.index(name)) for layer in range(layers) for name in counts.marks(layer)]
    after = [(layers, mark) for mark in range(2, len(MARKS))]
    for at, mark in before + inside + after:
        if calls[at, mark]:
            name, layer = names[mark], None if at == layers else at
            yield Operator(
                name.replace("_", " "), MARKS[name], layer, int(calls[at, mark]), float(seconds[at, mark]),
                counts.bytes(name, layer), counts.flops(name, layer),
                float(waiting[at, mark] / max(1.0, all_threads[at, mark])),
            )  # fmt: skip


def is_experts(place: Place) -> bool:
    """Whether a token needs only a part of the tensor."""
    return "_exps." in place.source.tensor


class Counts:
    """Bytes that each mark reads and its floating-point operations, in a pass of these pieces; counted from shapes.
    Experts are counted for uniform routing."""

    def __init__(self, layout: PackedLayout, spec: ModelSpec, kv_dtype: str, parts: Sequence[Piece]) -> None:
        self.spec = spec
        self._layout, self._parts = layout, parts
        self._tokens = sum(part.count for part in parts)
        self._attention, self._kv_dtype = find_network(spec).attention, kv_dtype

    def marks(self, layer: int) -> Iterable[str]:
        """The marks of a layer, in the order of the pass."""
        found = []
        for block in self._layout.network.layers[layer]:
            own = block.core.norms if isinstance(block.core, Experts) else ()
            found += [block.norm, *own, "adapt", *kind_of(block.core).marks, block.post_norm, block.joint_norm]
        return dict.fromkeys(filter(None, found))

    def bytes(self, name: str, layer: int | None) -> int | None:
        """Bytes of weights and rows that a mark reads; None for marks that only move activations."""
        if name == "attend" and layer is not None:
            core = self._attention[layer]
            rows = sum(part.rows(core.window) for part in self._parts) if core else 0
            return rows * row_bytes(core, self._kv_dtype) if core else None
        if name == "embed":
            tables = (self._layout.places.get(table) for table in ("token_embd", "position_embd"))
            return sum(self._tokens * (place.nbytes // place.rows) for place in tables if place)
        times = 1.0 if name == "head" else len(self._parts)  # only the last token's logits are computed
        of_experts = sum(self.spec.experts_read(part.count) for part in self._parts)
        read = self._read(name, layer)
        return round(sum(place.nbytes * (of_experts if is_experts(place) else times) for place in read)) or None

    def flops(self, name: str, layer: int | None) -> int | None:
        """Floating-point operations of a mark; None for all but products and attention."""
        if name == "attend" and layer is not None:
            core = self._attention[layer]
            return attention_flops(core.width, core.window, self._parts) if core else None
        if name == "embed":
            return None
        tokens = 1 if name == "head" else self._tokens
        used = self.spec.experts_used / max(1, self.spec.experts)
        matrices = [place for place in self._read(name, layer) if place.block]
        values = sum(place.source.rows * place.columns * (used if is_experts(place) else 1.0) for place in matrices)
        return round(2 * tokens * values) or None

    def _read(self, name: str, layer: int | None) -> list[Place]:
        """The matrices or the norm of a mark, and their biases."""
        places, start = self._layout.places, "" if layer is None else f"blk.{layer}."
        tensors = (self._layout.network.head,) if name == "head" else self._layout.shape.groups.get(name, (name,))
        read = (places.get(f"{start}{tensor}{suffix}") for tensor in tensors for suffix in ("", ".bias"))
        return [place for place in read if place]

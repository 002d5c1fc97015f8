"""Times of a pass's phases: those that every thread notes in a pass compiled for it (`marks.py`).

A phase lasts from one barrier to the next, so its time is that of the slowest thread; where a step does two things
between barriers (norm and product), thread 0 tells them apart. A mark takes some 30 ns, a few hundred of them 1 % of
the smallest model's step at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from edge.backends.base import EngineConfig, Operator
from edge.backends.operators import Piece, attention_flops, check_pass, pieces, repeat_pass
from edge.backends.tvm.cpu import marks
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.kv.rows import row_bytes
from edge.backends.tvm.packing.layout import Layout, Place, make_layout
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.model.tensors import find_recipe
from edge.types import AnyArray, IntArray

_LOADING = 0.5  # of progress


def time_operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    """See `Backend.operators`. bytes: of the packed weights, padding included, and of KV rows that queries see."""
    check_pass(config, tokens, context, passes)

    def on_load(part: float, _doing: str = "") -> None:
        if progress:
            progress(_LOADING * part)

    engine = NativeEngine(file, spec, config, on_load, timed=True)

    def run(ids: IntArray) -> AnyArray:
        engine.times[:] = 0
        engine.forward(ids)
        return marks.read(engine.times, spec.layers)

    try:
        rest = progress and (lambda part: progress(_LOADING + (1 - _LOADING) * part))
        counted = repeat_pass(engine, tokens, context, passes, run, rest)
    finally:
        engine.close()
    counts = Counts(make_layout(file, spec), spec, config.kv_dtype, list(pieces(tokens, context, config.chunk)))
    return list(_operators(counted, counts))


def _operators(counted: Sequence[AnyArray], counts: Counts) -> Iterable[Operator]:
    """Layers in their order, with what comes before and after them."""
    layers = counts.spec.layers
    times = np.stack(counted).astype(np.float64)  # [passes, threads, layers + 1, marks, work or wait, ns or calls]
    spent = times[..., marks.NANOSECONDS]
    seconds = np.median(spent[:, 0].sum(axis=-1), axis=0) / 1e9  # thread 0's [layers + 1, marks]
    waiting, all_threads = spent[..., marks.WAIT].sum(axis=(0, 1)), spent.sum(axis=(0, 1, 4))
    calls = counted[0][0, :, :, marks.WORK, marks.CALLS]
    before = [(layers, 1)]
    inside = [(layer, mark) for layer in range(layers) for mark in range(1, len(marks.MARKS))]
    after = [(layers, mark) for mark in range(2, len(marks.MARKS))]
    names = list(marks.MARKS)
    for at, mark in before + inside + after:
        if calls[at, mark]:
            name, layer = names[mark], None if at == layers else at
            yield Operator(
                name.replace("_", " "), marks.MARKS[name], layer, int(calls[at, mark]), float(seconds[at, mark]),
                counts.bytes(name, layer), counts.flops(name, layer),
                float(waiting[at, mark] / max(1.0, all_threads[at, mark])),
            )  # fmt: skip


class Counts:
    """What each mark reads and multiplies in a pass of these pieces, counted from shapes."""

    def __init__(self, layout: Layout, spec: ModelSpec, kv_dtype: str, parts: Sequence[Piece]) -> None:
        self.spec = spec
        self._layout, self._parts = layout, parts
        self._tokens = sum(part.count for part in parts)
        self._row_bytes = row_bytes(layout.shape, kv_dtype) // spec.layers
        self._windows = find_recipe(spec).windows

    def bytes(self, name: str, layer: int | None) -> int | None:
        """None for what only moves activations."""
        if name == "attend" and layer is not None:
            return sum(self._row_bytes * part.rows(self._windows[layer]) for part in self._parts)
        if name == "embed":
            tables = (self._layout.places.get(table) for table in ("token_embd", "position_embd"))
            return sum(self._tokens * (place.nbytes // place.rows) for place in tables if place)
        times = 1 if name == "head" else len(self._parts)  # logits are wanted of the last token only
        return times * sum(place.nbytes for place in self._read(name, layer)) or None

    def flops(self, name: str, layer: int | None) -> int | None:
        """None for what is neither a product nor attention."""
        if name == "attend" and layer is not None:
            return attention_flops(self.spec, self._windows[layer], self._parts)
        if name == "embed":
            return None
        tokens = 1 if name == "head" else self._tokens
        matrices = [place for place in self._read(name, layer) if place.block]
        return 2 * tokens * sum(place.source.rows * place.columns for place in matrices) or None

    def _read(self, name: str, layer: int | None) -> list[Place]:
        """The matrices or the norm of a mark, and their biases."""
        places, start = self._layout.places, "" if layer is None else f"blk.{layer}."
        tensors = (self._layout.head,) if name == "head" else self._layout.shape.groups.get(name, (name,))
        read = (places.get(f"{start}{tensor}{suffix}") for tensor in tensors for suffix in ("", ".bias"))
        return [place for place in read if place]

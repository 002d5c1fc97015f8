"""Times of a pass's dispatches, by the device's timestamps where it has them, else by separate submission."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge.backends.base import EngineConfig, Operator
from edge.backends.operators import Piece, attention_flops, check_pass, pieces, repeat_pass
from edge.backends.tvm.gpu.design import Design, partial_words
from edge.backends.tvm.gpu.engine import GPUEngine
from edge.backends.tvm.gpu.program import Dispatch
from edge.backends.tvm.gpu.weights import Matrix
from edge.backends.tvm.kv.row_formats import row_bytes
from edge.backends.tvm.packing.cores import groups_of
from edge.formats.gguf import GGUFFile
from edge.model.cores import Attention, Experts
from edge.model.structure.spec import ModelSpec
from edge.types import IntArray

_LOADING = 0.5  # of the progress
_ATTENDING = ("attend", "attend step", "attend part", "attend step part")
_OF_EXPERTS = ("experts in", "experts out")


def time_operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    """See `Backend.operators`. One operator for all dispatches of a kernel in a layer."""
    check_pass(config, tokens, context, passes)

    def loading(part: float, _doing: str = "") -> None:
        if progress:
            progress(_LOADING * part)

    rest = progress and (lambda part: progress(_LOADING + (1 - _LOADING) * part))
    engine = GPUEngine(file, spec, config, loading)
    try:

        def run(ids: IntArray) -> list[tuple[Dispatch, float]]:
            return engine.time_pass(ids)

        timed = repeat_pass(engine, tokens, context, passes, run, rest)
        counts = _Counts(engine.design, spec, list(pieces(tokens, context, config.chunk)))
    finally:
        engine.close()
    seconds = np.median([[each for _, each in found] for found in timed], axis=0)
    operators: dict[tuple[str, int | None], Operator] = {}
    for (dispatch, _), each in zip(timed[0], seconds, strict=True):
        name = _name(dispatch.kernel)
        before = operators.get((name, dispatch.layer))
        calls, spent = (before.calls, before.seconds) if before else (0, 0.0)
        operators[name, dispatch.layer] = Operator(
            name, dispatch.phase, dispatch.layer, calls + 1, spent + float(each),
            counts.bytes(name, dispatch.phase, dispatch.layer), counts.flops(name, dispatch.phase, dispatch.layer),
        )  # fmt: skip
    return list(operators.values())


def _name(kernel: str) -> str:
    """A kernel's name without the number of its variant."""
    return kernel.removeprefix("edge_").replace("_chunk", "").rstrip("_0123456789").replace("_", " ")


@dataclass(frozen=True)
class _Counts:
    """Bytes read and floating-point operations of an operator, counted from shapes, in a pass of these pieces."""

    design: Design
    spec: ModelSpec
    parts: list[Piece]

    def bytes(self, name: str, phase: str, layer: int | None) -> int | None:
        if name in _ATTENDING and layer is not None:
            each = row_bytes(self.design.shape.attention, self.design.kv_dtype)
            return sum(each * part.rows(self.design.windows[layer]) for part in self.parts)
        if name == "join" and layer is not None:
            cores = (block.core for block in self.design.blocks(layer) if isinstance(block.core, Attention))
            words = sum(core.heads * partial_words(self.design.row_form(core)) for core in cores)
            return 4 * len(self.parts) * self.design.tuning.row_splits * words
        if phase == "head":
            parts = 1  # only the last token's logits are computed
        elif layer is not None and name in _OF_EXPERTS:
            parts = sum(part.count for part in self.parts)  # each token's experts are read anew
        else:
            parts = len(self.parts)
        return parts * sum(4 * matrix.words for matrix in self._read(name, layer)) or None

    def flops(self, name: str, phase: str, layer: int | None) -> int | None:
        """Operations of products and attention; None for others."""
        if name in _ATTENDING and layer is not None:
            return attention_flops(self.spec.heads * self.spec.head_dim, self.design.windows[layer], self.parts)
        tokens = 1 if phase == "head" else sum(part.count for part in self.parts)
        return 2 * tokens * sum(matrix.rows * matrix.columns for matrix in self._read(name, layer)) or None

    def _read(self, name: str, layer: int | None) -> list[Matrix]:
        """The matrices that an operator multiplies by a token's activations."""
        weights, found = self.design.weights, list[Matrix]()
        if name == "head":
            return [piece.matrix for piece in weights.head]
        if layer is None:
            return found
        for core in (block.core for block in self.design.blocks(layer)):
            groups, layout, times = dict(groups_of(core)), weights.layers[layer], 1
            if isinstance(core, Experts):
                groups |= {"experts_in": core.inputs[:2], "experts_out": (core.output,)}
                groups |= {"shared_in": core.inputs[2:], "shared_out": core.outputs[1:]}
                if name in _OF_EXPERTS:
                    layout, times = weights.experts[layer][0].layout, core.used
            for each in groups.get(name.replace(" ", "_"), ()):
                found += [layout.matrix(each)] * times
        return found

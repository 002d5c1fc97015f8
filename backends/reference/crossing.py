"""Cross attention of a decoder's pass, to be looked at: weights are read when they are used, and not kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edge.backends.base import EngineConfig
from edge.backends.reference.attention import paid
from edge.backends.reference.context import At
from edge.backends.reference.engine import ReferenceEngine
from edge.backends.reference.weights import UNWARNED, read_rows, read_weight
from edge.formats.gguf import GGUFFile
from edge.model.cores import Attention
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.types import FloatArray, IntArray

Crossed = Callable[[int], tuple[FloatArray, FloatArray]]


@UNWARNED
def attention_across(
    file: GGUFFile, spec: ModelSpec, tokens: IntArray, crossed: Crossed,
    heads: Mapping[int, Sequence[int]],
) -> dict[int, FloatArray]:  # fmt: skip
    """The attention that tokens, int [n], pay to the rows that they see across, in a pass of their own: of these heads
    by layer, float32 [heads, n, rows]. crossed: see CrossEngine. Raises IndexError for more tokens than the model
    knows positions."""
    names = {name: source.tensor for name, source in find_tensors(file, spec).items()}
    engine = ReferenceEngine(file, spec, EngineConfig(len(tokens), len(tokens), "f32", 1), _Weights(file, names))
    places, found = Places.after(0, len(tokens)), dict[int, FloatArray]()
    rows = engine.kv.reserve(places)
    x = engine.weights["position_embd"][places.positions]
    x = x + read_rows(file, names["token_embd"], tokens)
    for layer, blocks in enumerate(engine.network.layers[: max(heads) + 1]):
        at = At(layer, rows, places.positions, places.sees)
        for block in blocks:
            normed = engine.norm(x, at.name(block.norm))
            if isinstance(block.core, Attention) and block.core.across:
                engine.across = {layer: crossed(layer)}  # the last layer's go
                if layer in heads:
                    weights, _ = paid(engine, block.core, at, normed)
                    found[layer] = weights.reshape(block.core.heads, len(tokens), -1)[list(heads[layer])]
                    del weights
            x = engine.add(x, block, at, engine.run_core(block, at, normed))
    return found


class _Weights(dict[str, FloatArray]):
    """Weights that are read each time. names: of tensors in the file."""

    def __init__(self, file: GGUFFile, names: dict[str, str]) -> None:
        super().__init__()
        self._file, self._names = file, names

    def __missing__(self, name: str) -> FloatArray:
        return read_weight(self._file, self._names[name])

    def get(self, name: str, default: FloatArray | None = None) -> FloatArray | None:  # type: ignore[override]
        return self[name] if name in self._names else default

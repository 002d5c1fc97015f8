"""Fit a model's linear models of row importance, from a text that the model repeats.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", arXiv:2601.07891. The target is KVzip+'s: of
a row i, ln max a_ji ‖W_O v_i‖ / ‖h_j‖ over the queries j of the repeated text and the query heads of a group, with h_j
the input of attention. Layers that read the rows of another count as its query heads. The paper predicts it from
h_i. Here the features are the row's own key before RoPE and two norms: they are in the cache at any time, and a tenth
as many weights need a thousandth of the paper's text.
"""

from __future__ import annotations

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.importance import features, ranked_cores
from edge.backends.reference.attention import paid
from edge.backends.reference.context import At
from edge.backends.reference.engine import ReferenceEngine
from edge.backends.reference.per_layer_input import make_inputs
from edge.backends.reference.weights import UNWARNED, read_rows, read_weights
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.cores import Attention
from edge.model.parts.places import Places
from edge.model.structure.layers import TABLE
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.types import AnyArray, FloatArray, IntArray

MOST_TOKENS = 800  # of the text
_AT_ONCE = 128  # tokens of the text that run at once in a layer
_FIRST = 4  # rows, which policies keep anyway
_CONSTANT = 1e-4  # spread of a feature that says nothing, such as the norm of values that are normalised
_RIDGE = 0.01  # × the number of rows, for standardised features


def check_importance(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model whose rows cannot be ranked."""
    if not any(True for _ in ranked_cores(find_network(spec))):
        raise UnsupportedError("KV policy kvzap needs layers without a sliding window: use streaming")


def fitting_bytes(file: GGUFFile, spec: ModelSpec) -> int:
    """Peak bytes of `fit`, estimated as `queries.measuring_bytes` is."""
    network, tokens = find_network(spec), 2 * MOST_TOKENS
    rows = sum(network.row_values) + network.layer_inputs * (len(network.layers) + 1)  # the table's, and one layer's
    scores = max((core.heads for core in network.attention if core), default=0) * _AT_ONCE
    return 4 * (
        3 * _largest_matrix(file, spec) + tokens * (rows + 4 * spec.hidden + 4 * scores) + 4 * _AT_ONCE * spec.ffn
    )


def _largest_matrix(file: GGUFFile, spec: ModelSpec) -> int:
    """Elements of the largest matrix of a layer."""
    return max(
        file.tensors[each.tensor].elements for name, each in find_tensors(file, spec).items() if name.startswith("blk.")
    )


@UNWARNED
def fit(file: GGUFFile, spec: ModelSpec, tokens: IntArray) -> list[FloatArray]:
    """Fit the arrays of `RowImportance.layers`, in order. tokens: a text, int32 [n]; at most `MOST_TOKENS` run, twice.

    Raises ModelFormatError if scores are not finite.
    """
    text = tokens[: min(MOST_TOKENS, spec.context // 2)]
    network, twice = find_network(spec), np.concatenate([text, text])
    weights = _TokenWeights(file, find_tensors(file, spec), twice)
    engine = ReferenceEngine(file, spec, EngineConfig(twice.size, twice.size, "f32", 1), weights)
    engine.kv.announce(twice.size)
    places = Places.after(0, twice.size)
    engine.kv.reserve(places)
    positions = places.positions
    x, ranked, targets = engine.embed(weights.places, positions), dict(ranked_cores(network)), dict[int, FloatArray]()
    embedded = x.copy()
    for layer, blocks in enumerate(network.layers):
        most, core = None, network.attention[layer]
        source = core.source(layer) if core else layer
        inputs = make_inputs(engine, network, weights.places, embedded, slice(layer, layer + 1))[:, 0]
        for start in range(0, twice.size, _AT_ONCE):
            rows = slice(start, min(start + _AT_ONCE, twice.size))
            at, part = At(layer, rows, positions[rows], places.sees[rows], inputs[rows]), x[rows]
            for block in blocks:
                if not block.beside:
                    normed = engine.norm(part, at.name(block.norm)) if block.norm else part
                if isinstance(block.core, Attention) and source in ranked and rows.stop > text.size:
                    attention, _ = paid(engine, block.core, at, normed)
                    own = max(0, text.size - start)  # the text's end is no query
                    each = attention[:, :, own:, : text.size] / np.linalg.norm(normed[own:], axis=-1)[:, None]
                    most = each.max(axis=2) if most is None else np.maximum(most, each.max(axis=2))
                part = engine.add(part, block, at, engine.run_core(block, at, normed))
            x[rows] = part
        if most is not None and core is not None:
            added = _written(engine, core, layer, source, most)
            targets[source] = np.maximum(targets[source], added) if source in targets else added
    found = [_fit_layer(engine, layer, positions[: text.size], targets[layer]) for layer in ranked]
    if not all(np.isfinite(each).all() for each in found):
        raise ModelFormatError(f"{file.path}: attention is no number: its weights are damaged or overflow")
    return found


def _written(engine: ReferenceEngine, core: Attention, layer: int, source: int, most: FloatArray) -> FloatArray:
    """The most that a query adds of each row, [KV heads, rows]. source: the layer of the rows. most: attention of one
    query to each row, [KV heads, group, rows]."""
    output = engine.weights[f"blk.{layer}.attn_output"]
    output = output.reshape(len(output), core.kv_heads, -1, core.row.value).transpose(1, 2, 3, 0)
    values = engine.kv.values[source][:, : most.shape[-1]]
    written = np.linalg.norm(values[:, None] @ output, axis=-1)  # [KV heads, group, rows]
    return np.asarray((most * written).max(axis=1))


def _fit_layer(engine: ReferenceEngine, layer: int, positions: IntArray, most: FloatArray) -> FloatArray:
    """The weights and bias of each KV head. most: what one query adds of each row, [KV heads, rows]."""
    rows, rotation = positions.size, engine.kv.rope.rotation
    keys = rotation.rotate_cached(engine.kv.keys[layer][:, :rows], -positions, layer)
    values = engine.kv.values[layer][:, :rows]
    targets = np.log(np.maximum(most, 1e-12)).astype(np.float64)
    inputs = features(keys, np.linalg.norm(values, axis=-1)).astype(np.float64)
    first = min(_FIRST, rows - 1)
    return np.stack([_ridge(*each) for each in zip(inputs[:, first:], targets[:, first:], strict=True)])


def _ridge(inputs: AnyArray, targets: AnyArray) -> FloatArray:
    """Weights, then the bias, of inputs [n, features]."""
    mean, spread, base = inputs.mean(axis=0), inputs.std(axis=0), targets.mean()
    spread = np.where(spread < _CONSTANT, np.inf, spread + 1e-3)
    standard = (inputs - mean) / spread
    squares = standard.T @ standard + _RIDGE * len(inputs) * np.eye(inputs.shape[1])
    weights = np.linalg.solve(squares, standard.T @ (targets - base)) / spread
    return np.append(weights, base - mean @ weights).astype(np.float32)


class _TokenWeights(dict[str, FloatArray]):
    """A model's weights for one pass of given tokens. Matrices are read at every use. The embedding, and a table of
    per-layer embeddings, hold only the rows of these tokens; `places` has the row of each token."""

    def __init__(self, file: GGUFFile, sources: dict[str, Source], tokens: IntArray) -> None:
        self._file, self._sources = file, sources
        vectors = {name: each for name, each in sources.items() if len(file.tensors[each.tensor].shape) == 1}
        super().__init__(read_weights(file, vectors))
        used, places = np.unique(tokens, return_inverse=True)
        self.places: IntArray = places.astype(np.int32)
        for name in {"token_embd", TABLE} & sources.keys():
            self[name] = read_rows(file, sources[name].tensor, used)

    def __missing__(self, name: str) -> FloatArray:
        return read_weights(self._file, {name: self._sources[name]})[name]

"""Measure a model's queries: their mean and covariance over a text, before RoPE.

Memory holds the hidden states and rows of the text, and one matrix at a time.
"""

from __future__ import annotations

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.reference.attention import heads_of
from edge.backends.reference.context import At
from edge.backends.reference.engine import ReferenceEngine
from edge.backends.reference.weights import UNWARNED, read_weights
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.model.cores import Attention, PerLayerInput
from edge.model.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.types import FloatArray, IntArray

MOST_TOKENS = 384  # of the text
_FIRST = 4  # tokens, whose queries are like no others
_LARGEST = np.finfo(np.float16).max


def check_queries(spec: ModelSpec) -> None:
    """Raise UnsupportedError for a model whose queries cannot be measured."""
    if any(isinstance(core, PerLayerInput) for core in find_network(spec).cores):
        raise UnsupportedError("KV policy expected does not know the queries of models with per-layer embeddings yet")


def measuring_bytes(file: GGUFFile, spec: ModelSpec) -> int:
    """Peak bytes of `measure`, estimated: rows, some hidden states, scores of a layer, and its largest matrix, which is
    read as it is stored and becomes float32."""
    network = find_network(spec)
    rows = sum(core.row_values for core in network.attention if core)
    scores = max((core.heads for core in network.attention if core), default=0) * MOST_TOKENS
    return 4 * (3 * largest_matrix(file, spec) + MOST_TOKENS * (rows + 8 * spec.hidden + 4 * spec.ffn + 4 * scores))


def largest_matrix(file: GGUFFile, spec: ModelSpec) -> int:
    """Elements of the largest matrix of a layer."""
    return max(
        file.tensors[each.tensor].elements for name, each in find_tensors(file, spec).items() if name.startswith("blk.")
    )


@UNWARNED
def measure(file: GGUFFile, spec: ModelSpec, tokens: IntArray) -> list[FloatArray]:
    """`QueryMoments.layers`, in their order. tokens: int32 [n], of which `MOST_TOKENS` are run.

    Raises ModelFormatError if queries are not finite.
    """
    network, tokens = find_network(spec), tokens[: min(MOST_TOKENS, spec.context)]
    weights = TokenWeights(file, find_tensors(file, spec), tokens)
    engine = ReferenceEngine(file, spec, EngineConfig(tokens.size, tokens.size, "f32", 1), weights)
    engine.kv.announce(tokens.size)
    rows, positions = engine.kv.reserve(tokens.size)
    x, found = engine.embed(weights.places, positions), []
    for layer, blocks in enumerate(network.layers):
        at = At(layer, rows, positions)
        for block in blocks:
            if not block.beside:
                normed = engine.norm(x, at.name(block.norm)) if block.norm else x
            if isinstance(block.core, Attention) and block.core.row_values:
                queries = heads_of(engine, block.core, at, normed, "attn_q")
                if not np.isfinite(queries).all():
                    raise ModelFormatError(f"{file.path}: queries are no numbers: its weights are damaged or overflow")
                found.append(moments(queries * np.float32(block.core.scale), block.core.kv_heads))
            x = engine.add(x, block, at, engine.run_core(block, at, normed))
    return found


def moments(queries: FloatArray, kv_heads: int) -> FloatArray:
    """The mean, and the covariance behind it, of queries [heads, n, head]: [KV heads, 1 + head, head]."""
    first = min(_FIRST, queries.shape[1] - 1)
    own = queries[:, first:].reshape(kv_heads, -1, queries.shape[-1])
    mean = own.mean(axis=1, keepdims=True)
    away = own - mean
    both = np.concatenate([mean, away.swapaxes(1, 2) @ away / np.float32(own.shape[1])], axis=1)
    return np.asarray(np.clip(both, -_LARGEST, _LARGEST), np.float32)


class TokenWeights(dict[str, FloatArray]):
    """Weights of a model for one pass of some tokens: matrices are read whenever they are used, but of the embedding
    only the tokens' rows, of which each token's has the number in `places`."""

    def __init__(self, file: GGUFFile, sources: dict[str, Source], tokens: IntArray) -> None:
        self._file, self._sources = file, sources
        vectors = {name: each for name, each in sources.items() if len(file.tensors[each.tensor].shape) == 1}
        super().__init__(read_weights(file, vectors))
        info = file.tensors[sources["token_embd"].tensor]
        used, places = np.unique(tokens, return_inverse=True)
        self.places: IntArray = places.astype(np.int32)
        data = file.tensor_bytes(info).reshape(info.rows, -1)[used]
        self["token_embd"] = dequantize(data, info.type).reshape(used.size, -1)

    def __missing__(self, name: str) -> FloatArray:
        return read_weights(self._file, {name: self._sources[name]})[name]

"""Gemma 4's assistants (`edge.model.drafters.assistant`), in NumPy: quick enough to draft beside a model.

An assistant of E2B reads 12 million weights for a token, and 4,096 of the 262,144 rows of its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_whole
from edge.backends.reference.attention import heads_of
from edge.backends.reference.context import At
from edge.backends.reference.engine import ReferenceEngine
from edge.backends.reference.functions import softmax
from edge.backends.reference.kv import SharedRows
from edge.backends.reference.weights import UNWARNED, read_weights
from edge.backends.token_table import DEQUANTIZE_BYTES
from edge.formats.arrays import read_array
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.model.cores import Attention
from edge.model.drafters.assistant import plain_file, token_order
from edge.model.structure.layers import Assists, Block
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network, find_tensors
from edge.types import AnyArray, FloatArray, IntArray

HEAD = "token_embd"
_ALONE = 8192  # values of a matrix that BLAS multiplies by one thread
_HEAD_ROWS = 8192  # of a head without centroids, dequantized at once


class Assistant(ReferenceEngine):
    """Drafts one token at a time. The rows and the position of the query are the same for all tokens of a draft."""

    def __init__(self, file: GGUFFile, spec: ModelSpec, *, layers: bool = True) -> None:
        """layers: read their weights, too."""
        plain = plain_file(file)
        sources = find_tensors(plain, spec)
        head = sources.pop(HEAD)
        read = {name: each for name, each in sources.items() if layers or not name.startswith("blk.")}
        super().__init__(plain, spec, EngineConfig(1, 1, "f32", threads=1), read_weights(plain, read), sources)
        network = find_network(spec)
        assert network.assists is not None
        info = file.tensors[head.tensor]
        self._assists: Assists = network.assists
        self._rows: Mapping[bool, SharedRows] = {}
        self._type, self._order = info.type, token_order(file, spec)
        self._head: AnyArray = _rows_in_order(file, info, self._order)

    def step(self, embedding: FloatArray, state: FloatArray, rows: Mapping[bool, SharedRows]) -> tuple[int, FloatArray]:
        """The likeliest next token, and the model's state that comes with it, [hidden of the model]. embedding, state:
        the model's of the last token, and after the token before. rows: of layers without and with a window."""
        return self.finish(self.normed(embedding, state, rows))

    def finish(self, normed: FloatArray) -> tuple[int, FloatArray]:
        """As `step`, from the normalised state after the last layer."""
        tokens, logits = self.logits_of(normed)
        return int(tokens[logits.argmax()]), product(self.weights["nextn.post_projection"], normed)

    def start(self, embedding: FloatArray, state: FloatArray) -> FloatArray:
        """The hidden states before the first layer, [hidden]."""
        return product(self.weights["nextn.pre_projection"], np.concatenate([embedding, state]))

    @UNWARNED
    def normed(self, embedding: FloatArray, state: FloatArray, rows: Mapping[bool, SharedRows]) -> FloatArray:
        """The normalised state after the last layer, [hidden]."""
        x = self.start(embedding, state)[None]
        self._rows = rows
        for layer, blocks in enumerate(self.network.layers):
            at = At(layer)
            for block in blocks:
                x = self.add(x, block, at, self.run_core(block, at, self.norm(x, at.name(block.norm))))
        return np.asarray(self.norm(x, "output_norm")[0])

    def run_core(self, block: Block, at: At, x: FloatArray) -> FloatArray:
        core = block.core
        return self._attend(core, at, x) if isinstance(core, Attention) else super().run_core(block, at, x)

    def _attend(self, core: Attention, at: At, x: FloatArray) -> FloatArray:
        """As `attention` of one token, which sees all rows."""
        rows = self._rows[core.window > 0]
        position = np.array([rows.next_position])
        rotated = self.kv.rope.rotation.rotate(heads_of(self, core, at, x, "attn_q"), at.layer, position)[:, 0]
        out = []
        for head, query in enumerate(rotated[:, rows.order] * np.float32(core.scale)):
            paid = softmax(product(rows.keys[head // core.group], query))
            out.append(weighted_sum(paid, rows.values[head // core.group]))
        return np.concatenate(out)[None]

    def project(self, x: FloatArray, at: At, name: str) -> FloatArray:
        return product(self.weights[at.name(name)], x[0])[None]

    def logits_of(self, normed: FloatArray) -> tuple[IntArray, FloatArray]:
        """Some tokens that are likely, or all, int32 [n], and their logits."""
        parts = [(tokens, product(values, normed)) for tokens, values in self._head_rows(normed)]
        tokens, logits = (np.concatenate(each) for each in zip(*parts, strict=True))
        return tokens, logits

    def _head_rows(self, normed: FloatArray) -> Iterator[tuple[IntArray, FloatArray]]:
        """Rows of the head with their tokens, in parts."""
        if not self._order.size:
            for at in range(0, self.spec.vocab, _HEAD_ROWS):
                rows = self._head[at : at + _HEAD_ROWS]
                yield np.arange(at, at + len(rows), dtype=np.int32), dequantize(rows, self._type)
            return
        scores, count = product(self.weights["masked_embd_centroids"], normed), self._assists.used
        best = np.argpartition(-scores, count - 1)[:count]
        rows = self._head.reshape(self._assists.centroids, -1, self._head.shape[1])[best]
        yield self._order.reshape(scores.size, -1)[best].reshape(-1), dequantize(np.concatenate(rows), self._type)


def _rows_in_order(file: GGUFFile, info: TensorInfo, order: IntArray) -> AnyArray:
    """The rows of a matrix as stored, uint8 [rows, bytes], in this order, or in the file's if it is empty. Memory holds
    them once."""
    if not order.size:
        return file.tensor_bytes(info).reshape(info.rows, -1)
    found, places = np.empty((info.rows, info.nbytes // info.rows), np.uint8), np.argsort(order)
    with open(file.path, "rb") as source:
        source.seek(info.offset)
        for at in range(0, info.rows, _HEAD_ROWS):
            part = places[at : at + _HEAD_ROWS]
            data = read_array(source, np.uint8, part.size * found.shape[1])
            check_whole(file.path, data.size, part.size * found.shape[1])
            found[part] = data.reshape(part.size, -1)
    return found


def product(matrix: FloatArray, x: FloatArray) -> FloatArray:
    """matrix · x, by one thread: BLAS's own compete with the engine's for cores, which took seven times as long. BLAS
    shares out larger products than these parts."""
    parts, rest = _parts(matrix)
    return np.concatenate([(parts @ x).reshape(-1), rest @ x])


def weighted_sum(weights: FloatArray, rows: FloatArray) -> FloatArray:
    """Σ weights · rows, likewise."""
    parts, rest = _parts(rows)
    each = weights[: len(weights) - len(rest)].reshape(len(parts), 1, parts.shape[1])
    return np.asarray((each @ parts).sum(axis=(0, 1)) + weights[len(weights) - len(rest) :] @ rest)


def _parts(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Views of its rows, [parts, rows, columns], and of the rest."""
    size = max(1, _ALONE // matrix.shape[1])
    whole = len(matrix) // size * size
    return matrix[:whole].reshape(-1, size, matrix.shape[1]), matrix[whole:]


def step_bytes(spec: ModelSpec) -> float:
    """Bytes of weights that a step reads."""
    return 4 * _in_floats(spec) + spec.embedding_bytes * _head_share(spec)


def around_bytes(spec: ModelSpec) -> int:
    """Bytes of an assistant without its layers, or of the look-up of embeddings for an EAGLE-3 head."""
    assists = find_network(spec).assists
    if assists is None:
        return DEQUANTIZE_BYTES
    matrices = spec.hidden * (3 * assists.hidden + assists.centroids)
    at_once = spec.vocab * _head_share(spec) if assists.centroids else _HEAD_ROWS
    scratch = 3 * int(at_once) * spec.hidden
    return 4 * (matrices + spec.vocab + scratch) + spec.embedding_bytes + DEQUANTIZE_BYTES


def _in_floats(spec: ModelSpec) -> int:
    return spec.parameters - spec.vocab * spec.hidden


def _head_share(spec: ModelSpec) -> float:
    """The share of the head's rows that a step reads."""
    assists = find_network(spec).assists
    return assists.used / assists.centroids if assists and assists.centroids else 1.0

"""Passes of static graphs: the graphs read KV rows from our memory and output new rows, which are copied in.

Differences from `dynamic.py` follow from fixed sizes. A pass has as many tokens as a graph: shorter chunks are padded
in front with tokens that the masks hide. Unused rows are hidden likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.head_kv import HeadKV
from edge.backends.onnx.graph.context import heads_of_ropes, mask_name, table_names
from edge.backends.onnx.graph.static import HIDDEN, Part, parts_of, residual_factor
from edge.backends.onnx.inputs import ANGLES_AHEAD, AngleTables, known
from edge.backends.onnx.kv import OnnxStore
from edge.backends.onnx.model_files import ModelFiles
from edge.backends.onnx.providers import explained
from edge.backends.onnx.rows import NUMPY_TYPE
from edge.backends.onnx.session import bind
from edge.errors import UnsupportedError
from edge.formats.compiled import StaticForm
from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import temperatures
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray


class StaticPasses:
    """The Passes protocol over the sessions of a form, given to `open`.

    It holds two sets of arrays for inputs and outputs: of a chunk and of a step.
    """

    most_logits = 1  # a graph has no others

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, network: Network, form: StaticForm, kv: HeadKV[OnnxStore],
        files: ModelFiles,
    ) -> None:  # fmt: skip
        self.most = form.chunk
        self.logits = np.zeros((1, spec.vocab), np.float32)
        self._spec, self._network, self._form, self._kv = spec, network, form, kv
        self._embedding = Embedding(file, network, files)
        self._table = LookedUp(file, files, "per_layer_token_embd") if network.layer_inputs else None
        self._angles = AngleTables(kv, network, max(form.chunk, ANGLES_AHEAD), "float32")
        self._sizes = {tokens: _Arrays(spec, network, form, tokens) for tokens in (form.chunk, 1)}
        self._last = self._sizes[1]
        self._spans = {core.window: core.spans for core in network.attention if core}
        self._sessions: Mapping[Part, Any] = {}
        self._bindings: dict[int, list[tuple[Any, Any]]] = {}

    def open(self, sessions: Mapping[Part, Any]) -> None:
        """Set the sessions, by the parts of `parts_of`."""
        self._sessions = sessions
        for tokens, arrays in self._sizes.items():
            parts = parts_of(self._spec, self._form, tokens)
            self._bindings[tokens] = [(sessions[part], self._binding(part, arrays)) for part in parts]

    def run(
        self, tokens: IntArray, wanted: int, shown: int, given: GivenRows | None = None, places: Places | None = None
    ) -> None:
        """See Passes. wanted is at most 1; shown is any number. Raises UnsupportedError for rows with more parts."""
        kv, count = self._kv, tokens.size
        arrays = self._last = self._sizes[1 if count == 1 else self._form.chunk]
        new = slice(arrays.tokens - count, None)
        rows, beyond = given.parts(tokens) if given else None, tokens >= self._spec.vocab
        tokens = known(tokens, self._spec)
        arrays.x[0, new] = self._embedding.look_up(tokens, kv.next_position)
        if rows is not None:
            if rows[1:].any():
                raise UnsupportedError("static graphs add no parts of pictures behind layers: use --backend=cpu")
            arrays.x[0, new][beyond] = rows[0] * np.float32(residual_factor(self._network))
        if self._table:
            arrays.embedded[:] = arrays.x
            arrays.table_rows[0, new] = self._table.look_up(tokens)
        if not self._network.learned_positions:
            first = self._angles.place(count, places)
            for inputs, tables in zip(arrays.angles, self._angles.tables, strict=True):
                inputs[:, 0, new] = tables[:, first : first + count]
        if temperature := self._network.temperature:
            positions = np.arange(kv.next_position, kv.next_position + count)
            arrays.temperatures[0, new, 0] = temperatures(temperature, positions)
        for window, mask in arrays.masks.items():
            length = kv.ring.length if window and kv.ring else kv.length
            spans = places is not None and self._spans.get(window)
            fill_mask(
                mask[0, 0], length, count, window, kv.window_positions(count)[0] if window else None,
                places.sees if places and spans else None,
            )  # fmt: skip
        with explained("ONNX Runtime failed"):
            for session, binding in self._bindings[arrays.tokens]:
                session.run_with_iobinding(binding)
        for store in kv.stores:
            length = int(store.lengths[0])
            for own, layer in enumerate(store.layers):
                store.array[:, own, :, length : length + count] = arrays.rows[layer][:, :, new]

    def queries(self, count: int) -> Mapping[int, FloatArray]:
        found = enumerate(self._last.queries[:, self._last.tokens - count :])
        widths = [core.width if core else 0 for core in self._network.attention]
        return {layer: queries[:, : widths[layer]] for layer, queries in found}

    def close(self) -> None:
        self._sessions, self._bindings = {}, {}
        self._embedding.close()
        self._table = None

    def _binding(self, part: Part, arrays: _Arrays) -> Any:
        session, kinds = self._sessions[part], self._network
        binding = session.io_binding()
        bind(binding, "x", arrays.x)
        for kind in {kinds.rope_of(layer) for layer in part.layers if kinds.rotates(layer)}:
            for name, table in zip(table_names(kind), arrays.angles[kind], strict=True):
                bind(binding, name, table)
        if kinds.temperature:
            bind(binding, "temperatures", arrays.temperatures)
        if kinds.layer_inputs:
            bind(binding, "table_rows", arrays.table_rows)
            if part.layers.start:
                bind(binding, "embedded", arrays.embedded)
        for window in {kinds.windows[layer] for layer in part.layers}:
            bind(binding, mask_name(window), arrays.masks[window])
        cores = [(layer, kinds.attention[layer]) for layer in part.layers]
        read = {core.source(layer) for layer, core in cores if core}
        for store in self._kv.stores:
            for own, layer in enumerate(store.layers):
                for index, name in enumerate((f"key.{layer}", f"value.{layer}")):
                    if layer in read:
                        past, new = store.array[index, own], arrays.rows[layer][index]
                        here = layer in part.layers
                        bind(binding, f"past_{name}", past, shape=(1, *past.shape))
                        bind(binding, name if here else f"new_{name}", new, output=here, shape=(1, *new.shape))
        queries = arrays.queries[part.layers.start : part.layers.stop]
        bind(binding, "queries", queries, output=True, shape=(1, *queries.shape))
        if not part.last:
            bind(binding, "y", arrays.x, output=True)
        else:
            bind(binding, "logits", self.logits, output=True, shape=(1, *self.logits.shape))
        return binding


class _Arrays:
    """Inputs and outputs of a graph of n tokens. rows: new ones by layer, [2, KV heads, n, head]."""

    def __init__(self, spec: ModelSpec, network: Network, form: StaticForm, tokens: int) -> None:
        self.tokens = tokens
        self.x = np.zeros((1, tokens, spec.hidden), np.float32)
        vectors = spec.layers * network.layer_inputs
        self.embedded = np.zeros((1, tokens, spec.hidden if vectors else 0), np.float32)  # x before the first shard
        self.table_rows = np.zeros((1, tokens, vectors), np.float32)
        self.angles = [np.zeros((2, 1, tokens, head // 2), np.float32) for head in heads_of_ropes(network)]
        self.temperatures = np.ones((1, tokens, 1), np.float32)
        rows = {window: form.ring_rows if window and form.ring_rows else form.rows for window in set(network.windows)}
        self.masks = {each: np.full((1, 1, tokens, count + tokens), HIDDEN, np.float32) for each, count in rows.items()}
        self.rows: dict[int, AnyArray] = {
            layer: np.zeros((2, row.heads, tokens, row.key), NUMPY_TYPE[form.kv_dtype])
            for layer, row in enumerate(network.rows) if row
        }  # fmt: skip
        widest = max(core.width for core in network.attention if core)
        self.queries = np.zeros((spec.layers, tokens, widest), np.float32)


def fill_mask(
    mask: FloatArray, length: int, count: int, window: int, positions: AnyArray | None, sees: IntArray | None = None
) -> None:
    """Write the mask of a graph's last `count` tokens, over `length` rows in use and each other; the padding tokens
    before them see only themselves.

    mask: float32 [n, rows + n]. window: positions that a token sees, 0: all; positions: of the rows in use, then of the
    tokens. sees: `Places.sees`; None: each token sees those before it.
    """
    tokens = len(mask)
    rows, filled = mask.shape[1] - tokens, tokens - count
    mask[:] = HIDDEN
    mask[range(filled), range(rows, rows + filled)] = 0
    own = np.arange(count)
    seen = (own if sees is None else sees)[:, None] >= own
    if positions is not None and window:
        near = positions[length:, None] - positions < window
        mask[filled:, :length][near[:, :length]] = 0
        seen &= near[:, length:]
    else:
        mask[filled:, :length] = 0
    mask[filled:, rows + filled :][seen] = 0


class LookedUp:
    """A matrix in the mapped weights file, whose rows are looked up."""

    def __init__(self, file: GGUFFile, files: ModelFiles, name: str) -> None:
        path, layout = files.folder / files.data, files.layout
        self._matrix = layout.matrices[name]
        arrays = self._matrix.form.arrays(self._matrix.rows, self._matrix.columns)
        self._arrays = {each: _mapped(path, layout.places[f"{name}.{each}"]) for each in arrays}
        self._kind = file.tensors[self._matrix.parts[0].source.tensor].type

    def look_up(self, tokens: IntArray) -> FloatArray:
        """The rows of these tokens, float32 [n, columns]."""
        stored = {name: np.array(array[tokens]) for name, array in self._arrays.items()}
        found, _ = self._matrix.form.restored(stored, self._kind)
        return found


class Embedding:
    """The token embedding, and learned positions, in the mapped weights file."""

    def __init__(self, file: GGUFFile, network: Network, files: ModelFiles) -> None:
        self._table: LookedUp | None = LookedUp(file, files, "token_embd")
        self._scale = np.float32(network.embedding_scale * residual_factor(network))
        places = files.layout.places
        learned = network.learned_positions
        self._positions = _mapped(files.folder / files.data, places["position_embd"]) if learned else None

    def look_up(self, tokens: IntArray, position: int) -> FloatArray:
        """Embeddings, float32 [n, hidden], of tokens from this position on."""
        assert self._table
        found = np.asarray(self._table.look_up(tokens) * self._scale)
        if self._positions is not None:
            found += self._positions[position : position + tokens.size]
        return found

    def close(self) -> None:
        self._table = self._positions = None


def _mapped(path: Path, place: Any) -> AnyArray:
    return np.memmap(path, place.array.numpy, "r", place.offset, place.array.shape)

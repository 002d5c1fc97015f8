"""Encoders of pictures and sounds on ONNX Runtime: rows in, states out, one run for texts of equal length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.counts import Footprint
from edge.backends.onnx.graph.context import heads_of_ropes, table_names
from edge.backends.onnx.graph.encoder import make_encoder_graph
from edge.backends.onnx.memory import LAYER_BYTES, LIBRARY_BYTES, weights_of
from edge.backends.onnx.model_files import find_model_files
from edge.backends.onnx.providers import CPU, explained, find_provider, is_static, warn_emulated
from edge.backends.onnx.session import open_session
from edge.backends.rope import find_rotation
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.types import FloatArray, IntArray

_NO_FALLBACK = {"session.disable_cpu_ep_fallback": "1"}


class OnnxEncoder:
    """The method of HiddenEngine by which `edge.run.senses.sight` encodes.

    On an NPU, a graph has a fixed number of tokens: it is compiled when the first text of that length comes.
    """

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> None:
        self.spec, self.config, self._network = spec, config, find_network(spec)
        self._files = find_model_files(file, spec, progress)
        self._provider = find_provider(config.provider).compiling_for(None)
        network = self._network
        self._heads = {kind: head for kind, head in enumerate(heads_of_ropes(network)) if network.ropes[kind].dim}
        head = max(self._heads.values(), default=0)
        self._rotation = find_rotation(file, network, halves=True, head=head) if head else None
        self._sessions = dict[int, Any]()  # by the number of tokens; 0: any
        self._closed = False
        if self._provider.emulated:
            warn_emulated(spec, self._provider, "a patch")

    def hidden(self, tokens: IntArray, places: Places, given: GivenRows) -> FloatArray:
        """The states behind the last layer, float32 [n, hidden], of rows that are all given."""
        if self._closed:
            raise EngineError("the engine is closed")
        rows, begins = given.rows(tokens), places.begins
        assert begins is not None
        states, first = np.empty_like(rows), np.flatnonzero(np.diff(begins, prepend=-1))
        sizes = np.diff([*first, tokens.size])
        for size in np.unique(sizes).tolist():
            texts = first[sizes == size][:, None] + np.arange(size)
            for part in np.split(texts, len(texts)) if self._provider.static else [texts]:
                states[part] = self._run(rows[part], places.positions[part])
        return states

    def _run(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """The states of texts of equal length, [texts, n, hidden]."""
        count, feeds = x.shape[1], {"x": x}
        for kind, head in self._heads.items():
            assert self._rotation
            tables = self._rotation.tables(kind, positions.reshape(-1, *positions.shape[2:]))
            for name, table in zip(table_names(kind), tables, strict=True):
                feeds[name] = np.ascontiguousarray(table[:, : head // 2]).reshape(*x.shape[:2], -1)
        with explained("ONNX Runtime failed"):
            (states,) = self._session(count).run(["y"], feeds)
        return np.asarray(states)

    def _session(self, count: int) -> Any:
        count = count if self._provider.static else 0
        if count not in self._sessions:
            graph = make_encoder_graph(self._files.layout, self.spec, self._files.data, count)
            entries = {} if self._provider.ort_name == CPU.ort_name else _NO_FALLBACK
            self._sessions[count] = open_session(
                graph, self._files.folder, self._provider, self.config.threads, entries=entries
            )
        return self._sessions[count]

    def rest(self) -> None:
        """See CrossEngine."""

    def close(self) -> None:
        self._closed = True
        self._sessions.clear()


def count_encoder(spec: ModelSpec, config: EngineConfig) -> Footprint:
    """Bytes for passes of a chunk's tokens."""
    network = find_network(spec)
    width = max(core.queries for core in network.attention if core)
    # Measured with ONNX Runtime 1.32 on 1,024 to 6,400 patches of three encoders: 0.79 to 0.95 of the need.
    per_token = 6 * spec.hidden + 6 * max(spec.ffn, 3 * width)
    scores = 2 * spec.heads * config.chunk if is_static(config.provider) else 0
    scratch = 4 * config.chunk * (per_token + scores)
    return Footprint(
        weights=weights_of(spec), kv=0, scratch=scratch, runtime=LIBRARY_BYTES + LAYER_BYTES * spec.layers, fixed_kv=0
    )

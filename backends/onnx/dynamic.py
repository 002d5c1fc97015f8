"""Passes of the graph of `graph/builder.py`, whose sizes are variable: all arrays lie in our memory, bound by
pointer."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.head_kv import HeadKV
from edge.backends.onnx.graph.attention.attention import observed_width
from edge.backends.onnx.graph.context import table_names
from edge.backends.onnx.graph.state import state_shapes
from edge.backends.onnx.inputs import ANGLES_AHEAD, AngleTables, Windows, known
from edge.backends.onnx.kv import OnnxStore
from edge.backends.onnx.memory import MOST_AT_ONCE, MOST_OBSERVED
from edge.backends.onnx.providers import explained
from edge.backends.onnx.rows import LARGEST
from edge.backends.onnx.session import bind
from edge.model.architectures.angles import temperatures
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray


class DynamicPasses:
    """The Passes protocol over one session, given to `open`."""

    def __init__(
        self, spec: ModelSpec, network: Network, config: EngineConfig, kv: HeadKV[OnnxStore], windows: Windows
    ) -> None:
        self.spec, self._network, self._kv, self._windows = spec, network, kv, windows
        self.most, self.most_logits = MOST_AT_ONCE, config.logits_rows
        self.logits = np.zeros((max(config.logits_rows, 1), spec.vocab), np.float32)
        self._shows = config.observes or config.kv_dtype in LARGEST  # the graph has `observed`
        self._hidden: dict[int, FloatArray] = {}  # masks of sliding windows for the pass in progress
        self._float_type = "float16" if config.kv_dtype == "f16" else "float32"  # of tables, and of windows' masks
        table_rows = max(config.capacity, config.chunk, ANGLES_AHEAD)  # ONNX Runtime requires one for each row
        self._angles = AngleTables(kv, network, table_rows, self._float_type)
        self._temperatures = np.zeros((1, config.chunk if network.temperature else 0, 1), np.float32)
        self._tokens = np.zeros((1, config.chunk), np.int64)
        self._positions, self._counting = np.zeros((1, config.chunk), np.int64), np.arange(config.chunk)
        self._wanted = np.zeros(max(config.logits_rows, 1), np.int64)
        self._last, self._rows = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._ring_last, self._ring_rows = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._which = np.zeros(MOST_OBSERVED, np.int64)
        most = MOST_OBSERVED if self._shows else 0
        self._cores = {layer: core for layer, core in enumerate(network.attention) if core and not core.across}
        self.across: dict[str, FloatArray] = {}  # keys and values of an encoder's states
        self._qkv = {at: np.zeros((most, observed_width(core)), np.float32) for at, core in self._cores.items()}
        self._state = np.zeros_like(kv.state.values) if kv.state else None  # after a pass
        self._step_binding: tuple[tuple[int, int, int, int], Any] = ((0, 0, 0, 0), None)
        self._session: Any = None
        parts = 1 + network.deepstack  # of a row in place of an embedding
        self._no_rows: tuple[AnyArray, AnyArray] = np.zeros((parts, 0, spec.hidden), np.float32), np.zeros((0, 2), int)
        self._given = self._no_rows

    def open(self, session: Any) -> None:
        self._session = session

    def run(
        self, tokens: IntArray, wanted: int, shown: int, given: GivenRows | None = None, places: Places | None = None
    ) -> None:
        kv, count = self._kv, tokens.size
        beyond = np.flatnonzero(tokens >= self.spec.vocab)
        self._tokens[0, :count] = known(tokens, self.spec)
        self._given = self._no_rows
        if given is not None and beyond.size:
            self._given = given.parts(tokens), np.stack([np.zeros_like(beyond), beyond], axis=1)
        learned = self._network.learned_positions
        first = kv.next_position if learned else self._angles.place(count, places)
        self._positions[0, :count] = first + self._counting[:count]
        if temperature := self._network.temperature:
            self._temperatures[0, :count, 0] = temperatures(temperature, kv.next_position + self._counting[:count])
        self._wanted[:wanted] = self._counting[count - wanted : count]
        self._which[:shown] = self._counting[count - shown : count]
        self._rows[()], self._last[0] = kv.length + count, kv.length + count - 1
        if kv.ring:
            self._ring_rows[()], self._ring_last[0] = kv.ring.length + count, kv.ring.length + count - 1
        if self._windows.layers:
            self._hidden = self._windows.added(kv.window_positions(count), count, self._float_type)
        if self._network.whole_pictures:
            self._hidden = self._all_masks(self._hidden if self._windows.layers else {}, count, places)
        with explained("ONNX Runtime failed"):
            self._session.run_with_iobinding(self._binding(count, wanted, shown))
        if kv.state and self._state is not None:
            kv.state.values[:] = self._state

    def _all_masks(self, windows: dict[int, FloatArray], count: int, places: Places | None) -> dict[int, FloatArray]:
        """Masks of all layers, windows among them, by which tokens see others up to the ends of their spans."""
        whole = np.zeros((1, 1, count, self._kv.length + count), self._float_type)
        sees = self._counting[:count] if places is None else places.sees
        later = self._counting[:count] > sees[:, None]
        for mask in [whole, *{id(each): each for each in windows.values()}.values()]:
            mask[..., -count:][..., later] = -np.inf
        return {layer: windows.get(layer, whole) for layer in self._cores}

    def queries(self, count: int) -> Mapping[int, FloatArray]:
        return {layer: qkv[:count, : self._cores[layer].queries] for layer, qkv in self._qkv.items()}

    def shown(self, count: int) -> Mapping[int, FloatArray]:
        """Queries, keys and values before RoPE of the last pass by layer, float32 [count, all heads]."""
        return {layer: qkv[:count] for layer, qkv in self._qkv.items()}

    def close(self) -> None:
        self._session, self._step_binding = None, ((0, 0, 0, 0), None)

    def _binding(self, count: int, wanted: int, shown: int) -> Any:
        """The binding of a pass's arrays. The last one is cached: in decode, shapes repeat."""
        shape = (count, wanted, shown)
        if self._step_binding[0] != (*shape, self._kv.capacity):
            self._step_binding = ((*shape, self._kv.capacity), self._make_binding(*shape))
        binding = self._step_binding[1]
        for name, array in zip(("given", "given_at"), self._given, strict=True):
            bind(binding, name, array)
        for layer, hidden in self._hidden.items():
            bind(binding, f"window.{layer}", hidden)
        for name, rows in self.across.items():
            bind(binding, name, rows)
        return binding

    def _make_binding(self, count: int, wanted: int, shown: int) -> Any:
        binding = self._session.io_binding()
        bind(binding, "tokens", self._tokens, shape=(1, count))
        bind(binding, "positions", self._positions, shape=(1, count))
        bind(binding, "wanted", self._wanted, shape=(wanted,))
        bind(binding, "last", self._last)
        bind(binding, "rows", self._rows)
        if self._kv.ring:
            bind(binding, "ring_last", self._ring_last)
            bind(binding, "ring_rows", self._ring_rows)
        for kind, tables in enumerate(self._angles.tables):
            for name, table in zip(table_names(kind), tables, strict=True):
                if self._network.ropes[kind].dim:
                    bind(binding, name, table)
        if self._network.temperature:
            bind(binding, "temperatures", self._temperatures, shape=(1, count, 1))
        bind(binding, "logits", self.logits, output=True, shape=(1, wanted, self.spec.vocab))
        if self._shows:
            bind(binding, "observed", self._which, shape=(shown,))
        places = {layer: (store, own) for store in self._kv.stores for own, layer in enumerate(store.layers)}
        for layer, core in self._cores.items():
            source = core.source(layer)
            store, own = places[source]
            for index, name in ((0, "key"), (-1, "value")):  # the same memory, if values are a part of keys
                stored = store.array[index, own]
                bind(binding, f"{name}.{layer}", stored, shape=(1, *stored.shape), output=True)
                if source != layer:
                    continue
                bind(binding, f"past_{name}.{layer}", stored, shape=(1, *stored.shape))
                if store.dtype in LARGEST:
                    scales = store.scales[index, own]
                    bind(binding, f"{name}_scales.{layer}", scales, shape=(1, *scales.shape))
            if self._shows:
                qkv = self._qkv[layer]
                bind(binding, f"qkv.{layer}", qkv, shape=(1, shown, qkv.shape[-1]), output=True)
        if self._kv.state and self._state is not None:
            for values, prefix in ((self._kv.state.values, "past_"), (self._state, "")):
                self._bind_state(binding, values, prefix)
        return binding

    def _bind_state(self, binding: Any, values: FloatArray, prefix: str) -> None:
        """Bind all layers' states, before or after a pass, to the memory of `values`."""
        first = 0
        for name, shape in state_shapes(self._network):
            end = first + prod(shape)
            bind(binding, prefix + name, values[first:end], output=not prefix, shape=shape)
            first = end

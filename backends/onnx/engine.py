"""The ONNX engine: tokens in, logits out, one run of ONNX Runtime per chunk."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_positions, check_tokens
from edge.backends.head_kv import HeadKV
from edge.backends.onnx import CAPABILITIES, NAME
from edge.backends.onnx.calibrate import calibration_tokens, find_scales, stored_scales
from edge.backends.onnx.graph.builder import table_names
from edge.backends.onnx.kv import OnnxStore
from edge.backends.onnx.memory import MOST_AT_ONCE, MOST_OBSERVED
from edge.backends.onnx.model_files import find_model_files
from edge.backends.onnx.observer import Observer
from edge.backends.onnx.rows import LARGEST
from edge.backends.onnx.session import bind, explained, find_provider, open_session
from edge.backends.onnx.windows import Windows
from edge.backends.ring import LayerKinds, Ring
from edge.backends.rope import CacheRope
from edge.errors import EngineError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import temperatures
from edge.model.spec import ModelSpec
from edge.model.tensors import find_recipe
from edge.types import FloatArray, IntArray

_ANGLES_AHEAD = 64  # decode steps whose angles are computed at once


class OnnxEngine:
    """Engine protocol over one session. The KV cache, tokens and logits lie in NumPy arrays that it works on."""

    capabilities = CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None,
        *, trace: Path | None = None,
    ) -> None:  # fmt: skip
        """trace: see `open_session`; `end_trace` must be called, then."""
        self.spec, self.config = spec, config
        provider = find_provider(config.provider)
        files = find_model_files(file, spec, config.kv_dtype, config.observes, progress)
        self._recipe = recipe = find_recipe(spec)
        positions = spec.context if config.per_head else config.capacity  # gaps stay open while the context allows
        # ONNX Runtime pairs value i of a head with value i + head / 2.
        rope = CacheRope(file, recipe, positions, halves=True, head=spec.head_dim)
        kinds, scales_shape = LayerKinds.of(recipe.windows), (2, spec.layers, spec.kv_heads, 1, spec.head_dim)
        self._scales, ring = np.ones(scales_shape, np.float32), None
        if kinds.ringed:
            rows = kinds.ring_rows(config.capacity, config.chunk)
            ringed = OnnxStore(spec, config.kv_dtype, rows, kinds.ringed, self._scales, observes=False)
            ring = Ring(ringed, kinds.ringed, kinds.window)
        store = OnnxStore(spec, config.kv_dtype, config.capacity, kinds.whole, self._scales, observes=config.observes)
        key = f"{NAME}:{files.key}:{config.kv_dtype}"
        self._kv = HeadKV(store, kinds.whole, spec.kv_heads, rope, key, config.pinned, ring)
        self._rotation = rope.rotation  # that the tables of angles were made by
        self._windows = Windows(recipe.windows, spec.heads, spec.kv_heads)
        self._hidden: dict[int, FloatArray] = {}  # masks of sliding windows for the pass in progress
        self._shows = config.observes or config.kv_dtype in LARGEST  # the graph has `observed`
        self._observed = 0
        self._observer: Observer | None = None
        if config.observes:
            self._observer = Observer(spec, self._kv, self._windows, MOST_OBSERVED)
            self._kv.settle = self._observer.settle

        self._float_type = "float16" if config.kv_dtype == "f16" else "float32"  # of tables, and of windows' masks
        table_rows = max(config.capacity, config.chunk, _ANGLES_AHEAD)  # ONNX Runtime requires one for each row
        table_shape = (2, table_rows, spec.head_dim // 2)
        self._tables = [np.zeros(table_shape, self._float_type) for _ in recipe.ropes]  # cosines, sines
        self._angles_from = self._angles_known = 0
        self._temperatures = np.zeros((1, config.chunk if recipe.temperature else 0, 1), np.float32)
        self._tokens = np.zeros((1, config.chunk), np.int64)
        self._positions, self._counting = np.zeros((1, config.chunk), np.int64), np.arange(config.chunk)
        self._wanted = np.zeros(max(config.logits_rows, 1), np.int64)
        self._logits = np.zeros((max(config.logits_rows, 1), spec.vocab), np.float32)
        self._last, self._rows = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._ring_last, self._ring_rows = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._which = np.zeros(MOST_OBSERVED, np.int64)
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._qkv = np.zeros((spec.layers, MOST_OBSERVED if self._shows else 0, width), np.float32)
        self._step_binding: tuple[tuple[int, int, int, int], Any] = ((0, 0, 0, 0), None)

        quantized = config.kv_dtype in LARGEST
        scales = stored_scales(store, files.key) if quantized else None
        tokens = calibration_tokens(file, spec.vocab) if quantized and scales is None else None
        self._session: Any = open_session(files.graph, files.folder, provider, config.threads, trace)
        if quantized:
            self._scales[:] = find_scales(self, files.key, tokens) if tokens is not None else scales
            self._kv.settings += f":{zlib.crc32(self._scales.tobytes())}"

    @property
    def kv(self) -> HeadKV[OnnxStore]:
        return self._kv

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See `ObservedEngine`; the last `queries` tokens of every chunk are observed, in `kv.attention`.

        Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`.
        """
        if self._observer:
            self._observer.observe(votes=votes)
        elif queries:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self._observed = queries

    def forward(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        self._kv.expect(tokens.size)
        for part, shown in self._pieces(tokens, self.config.chunk):
            self._run(part, wanted=1, shown=shown)
        return np.asarray(self._logits[0])

    def forward_all(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        self._kv.expect(tokens.size)
        logits, done = np.empty((tokens.size, self.spec.vocab), np.float32), 0
        for part, shown in self._pieces(tokens, min(self.config.logits_rows, self.config.chunk)):
            self._run(part, wanted=part.size, shown=shown)
            logits[done : done + part.size] = self._logits[: part.size]
            done += part.size
        return logits

    def end_trace(self) -> Path:
        """The file with the times of all nodes so far; nothing more is written to it."""
        return Path(self._session.end_profiling())

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._session, self._step_binding = None, ((0, 0, 0, 0), None)
        self._kv.closed, self._kv.settle, self._observer = True, lambda: None, None
        for store in self._kv.stores:
            store.close()

    def run_shown(self, tokens: IntArray) -> FloatArray:
        """Run at most MOST_OBSERVED tokens; queries, keys and values before RoPE, float32 [layers, n, all heads]."""
        self._run(tokens, wanted=1, shown=tokens.size)
        return self._qkv[:, : tokens.size]

    def _pieces(self, tokens: IntArray, step: int) -> Iterator[tuple[IntArray, int]]:
        """Pieces that run at once, with the number of observed tokens at the end of each, which is bounded."""
        # Once heads keep different rows, each needs a window's mask of its own, which takes memory.
        alike = self._kv.alike or self._kv.ring or not self._windows.layers
        step = min(step, MOST_AT_ONCE if alike else MOST_OBSERVED)
        for start in range(0, tokens.size, step):
            part = tokens[start : start + step]
            shown = min(self._observed, part.size)
            if shown <= MOST_OBSERVED:
                yield part, shown
                continue
            if before := part.size - shown:
                yield part[:before], 0
            for first in range(before, part.size, MOST_OBSERVED):
                piece = part[first : first + MOST_OBSERVED]
                yield piece, piece.size

    def _run(self, tokens: IntArray, *, wanted: int, shown: int) -> None:
        if self._session is None:
            raise EngineError("the engine is closed")
        kv, count = self._kv, tokens.size
        check_positions(self.spec, kv.next_position + count)
        self._tokens[0, :count] = tokens
        self._positions[0, :count] = self._angle_row(count) + self._counting[:count]
        if self._recipe.temperature:
            factors = temperatures(self._recipe.temperature, kv.next_position + self._counting[:count])
            self._temperatures[0, :count, 0] = factors
        self._wanted[:wanted] = self._counting[count - wanted : count]
        self._which[:shown] = self._counting[count - shown : count]
        kv.prepare(count)
        self._rows[()], self._last[0] = kv.length + count, kv.length + count - 1
        if kv.ring:
            self._ring_rows[()], self._ring_last[0] = kv.ring.length + count, kv.ring.length + count - 1
        if self._windows.layers:
            self._hidden = self._windows.added(kv.window_positions(count), count, self._float_type)
        with explained("ONNX Runtime failed"):
            self._session.run_with_iobinding(self._binding(count, wanted, shown))
        kv.appended(count)
        if shown and self._observer:
            self._observer.add(self._qkv[:, :shown, : self.spec.heads * self.spec.head_dim])

    def _angle_row(self, count: int) -> int:
        """The row at which the tables of rotary angles, or of learned positions, have the next `count` positions."""
        if self._recipe.learned_positions:
            return self._kv.next_position
        first = self._kv.next_rope_position
        if self._rotation is not self._kv.rope.rotation:
            self._rotation, self._angles_known = self._kv.rope.rotation, 0
        if not self._angles_from <= first <= first + count <= self._angles_from + self._angles_known:
            self._angles_from, self._angles_known = first, max(count, _ANGLES_AHEAD)
            positions = np.arange(first, first + self._angles_known)
            for kind, table in enumerate(self._tables):
                table[:, : positions.size] = self._rotation.tables(kind, positions)
        return first - self._angles_from

    def _binding(self, count: int, wanted: int, shown: int) -> Any:
        """The binding of a pass's arrays. The last one is kept: in decode, the shape is always the same."""
        shape = (count, wanted, shown)
        if self._step_binding[0] != (*shape, self._kv.capacity):
            self._step_binding = ((*shape, self._kv.capacity), self._make_binding(*shape))
        binding = self._step_binding[1]
        for layer, hidden in self._hidden.items():
            bind(binding, f"window.{layer}", hidden)
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
        for kind, tables in enumerate(self._tables):
            for name, table in zip(table_names(kind), tables, strict=True):
                if self._recipe.ropes[kind].dim:
                    bind(binding, name, table)
        if self._recipe.temperature:
            bind(binding, "temperatures", self._temperatures, shape=(1, count, 1))
        bind(binding, "logits", self._logits, output=True, shape=(1, wanted, self.spec.vocab))
        if self._shows:
            bind(binding, "observed", self._which, shape=(shown,))
        places = ((store, own, layer) for store in self._kv.stores for own, layer in enumerate(store.layers))
        for store, own, layer in places:
            for index, name in enumerate(("key", "value")):
                stored = store.array[index, own]
                bind(binding, f"past_{name}.{layer}", stored, shape=(1, *stored.shape))
                bind(binding, f"{name}.{layer}", stored, shape=(1, *stored.shape), output=True)
                if store.dtype in LARGEST:
                    scales = store.scales[index, layer]
                    bind(binding, f"{name}_scales.{layer}", scales, shape=(1, *scales.shape))
            if self._shows:
                bind(binding, f"qkv.{layer}", self._qkv[layer], shape=(1, shown, self._qkv.shape[-1]), output=True)
        return binding

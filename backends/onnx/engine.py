"""The ONNX engine: tokens in, logits out, one run of ONNX Runtime per chunk."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edge.architectures.angles import find_angles
from edge.backends.base import EngineConfig, check_tokens
from edge.backends.onnx import CAPABILITIES, NAME
from edge.backends.onnx.attention import attention_to
from edge.backends.onnx.calibrate import calibration_tokens, find_scales, stored_scales
from edge.backends.onnx.kv import OnnxKV
from edge.backends.onnx.memory import MOST_AT_ONCE, MOST_OBSERVED
from edge.backends.onnx.model_files import find_model_files
from edge.backends.onnx.rope import tables, turn
from edge.backends.onnx.rows import LARGEST
from edge.backends.onnx.session import bind, explained, find_provider, open_session
from edge.backends.tensors import find_recipe
from edge.errors import EngineError, UnsupportedError
from edge.gguf_file import GGUFFile
from edge.spec import ModelSpec
from edge.types import FloatArray, IntArray

_ANGLES_AHEAD = 64  # decode steps whose angles are computed at once


class OnnxEngine:
    """Engine protocol over one session. The KV cache, tokens and logits lie in NumPy arrays that it works on."""

    capabilities = CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> None:
        self.spec, self.config = spec, config
        provider = find_provider(config.provider)
        files = find_model_files(file, spec, config.kv_dtype, config.observes, progress)
        recipe = find_recipe(spec)
        self._query_scale = recipe.query_scale
        # Gaps stay open while the context allows: factors are those of all of it.
        self._angles = find_angles(file, recipe.ropes[0], spec.context if config.per_head else config.capacity)
        key = f"{NAME}:{files.key}:{config.kv_dtype}"
        self._kv = OnnxKV(spec, config.kv_dtype, config.capacity, self._angles, key, config.observes)
        self._shows = config.observes or config.kv_dtype in LARGEST  # the graph has `observed`
        self._observed, self._votes = 0, False

        halves = np.float16 if config.kv_dtype == "f16" else np.float32
        table_rows = max(config.capacity, config.chunk, _ANGLES_AHEAD)  # ONNX Runtime wants as many as there are rows
        self._cos, self._sin = (np.zeros((table_rows, spec.head_dim // 2), halves) for _ in range(2))
        self._angles_from = self._angles_known = 0
        self._tokens = np.zeros((1, config.chunk), np.int64)
        self._positions = np.zeros((1, config.chunk), np.int64)
        self._wanted = np.zeros(max(config.logits_rows, 1), np.int64)
        self._logits = np.zeros((max(config.logits_rows, 1), spec.vocab), np.float32)
        self._last, self._rows = np.zeros(1, np.int32), np.zeros((), np.int32)
        self._which = np.zeros(MOST_OBSERVED, np.int64)
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._qkv = np.zeros((spec.layers, MOST_OBSERVED if self._shows else 0, width), np.float32)
        self._step_binding: tuple[tuple[int, int, int], Any] = ((0, 0, 0), None)

        quantized = config.kv_dtype in LARGEST
        scales = stored_scales(self._kv, files.key) if quantized else None
        tokens = calibration_tokens(file, spec.vocab) if quantized and scales is None else None
        self._session: Any = open_session(files.graph, provider, config.threads)
        if quantized:
            self._kv.scales[:] = find_scales(self, files.key, tokens) if tokens is not None else scales
            self._kv.key += f":{zlib.crc32(self._kv.scales.tobytes())}"

    @property
    def kv(self) -> OnnxKV:
        return self._kv

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """As `ObservedEngine` says; the last `queries` tokens of every chunk are observed, in `kv.attention`.

        Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`.
        """
        if queries and not self.config.observes:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self._observed, self._votes = queries, votes

    def forward(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        for part, shown in self._pieces(tokens, self.config.chunk):
            self._run(part, wanted=1, shown=shown)
        return np.asarray(self._logits[0])

    def forward_all(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        logits, done = np.empty((tokens.size, self.spec.vocab), np.float32), 0
        for part, shown in self._pieces(tokens, min(self.config.logits_rows, self.config.chunk)):
            self._run(part, wanted=part.size, shown=shown)
            logits[done : done + part.size] = self._logits[: part.size]
            done += part.size
        return logits

    def close(self) -> None:
        """Free everything; safe to call twice."""
        self._session, self._step_binding = None, ((0, 0, 0), None)
        self._kv.closed = True
        self._kv.array = self._kv.array[:, :, :, :0].copy()

    def run_shown(self, tokens: IntArray) -> FloatArray:
        """Run at most MOST_OBSERVED tokens; queries, keys and values before RoPE, float32 [layers, n, all heads]."""
        self._run(tokens, wanted=1, shown=tokens.size)
        return self._qkv[:, : tokens.size]

    def _pieces(self, tokens: IntArray, step: int) -> Iterator[tuple[IntArray, int]]:
        """What runs at once, and how many tokens at its end are observed: of those, not too many at a time."""
        step = min(step, MOST_AT_ONCE)
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
        self._tokens[0, :count] = tokens
        self._positions[0, :count] = self._angle_row(count) + np.arange(count)
        self._wanted[:wanted] = np.arange(count - wanted, count)
        self._which[:shown] = np.arange(count - shown, count)
        self._rows[()], self._last[0] = kv.length + count, kv.length + count - 1
        with explained("ONNX Runtime failed"):
            self._session.run_with_iobinding(self._binding(count, wanted, shown))
        kv.appended(count)
        if shown and self.config.observes:
            self._add_attention(shown)

    def _add_attention(self, count: int) -> None:
        """Of the last `count` tokens, which have just run."""
        kv, spec = self._kv, self.spec
        first = kv.next_turn - count
        cos, sin = tables(np.arange(first, first + count), self._angles)
        width = spec.heads * spec.head_dim
        for layer in range(spec.layers):
            queries = self._qkv[layer, :count, :width].reshape(count, spec.heads, spec.head_dim).swapaxes(0, 1)
            queries = turn(queries, cos, sin) * np.float32(self._query_scale)
            rows = kv.array[0, layer, :, : kv.length]
            paid = attention_to(rows, kv.scales[0, layer], kv.dtype, queries, self._votes)
            kv.slot_attention[layer, :, : kv.length] += paid

    def _angle_row(self, count: int) -> int:
        """The row at which the table of rotary angles has the next `count` positions."""
        first = self._kv.next_turn
        if not self._angles_from <= first <= first + count <= self._angles_from + self._angles_known:
            self._angles_from, self._angles_known = first, max(count, _ANGLES_AHEAD)
            cos, sin = tables(np.arange(first, first + self._angles_known), self._angles)
            self._cos[: len(cos)], self._sin[: len(sin)] = cos, sin
        return first - self._angles_from

    def _binding(self, count: int, wanted: int, shown: int) -> Any:
        """Where a pass finds and leaves its arrays. That of the last shape is kept: in decode it is always the same."""
        shape = (count, wanted, shown)
        if self._step_binding[0] != shape:
            self._step_binding = (shape, self._make_binding(*shape))
        return self._step_binding[1]

    def _make_binding(self, count: int, wanted: int, shown: int) -> Any:
        kv, binding = self._kv, self._session.io_binding()
        bind(binding, "tokens", self._tokens, shape=(1, count))
        bind(binding, "positions", self._positions, shape=(1, count))
        bind(binding, "wanted", self._wanted, shape=(wanted,))
        bind(binding, "last", self._last)
        bind(binding, "rows", self._rows)
        bind(binding, "cos", self._cos)
        bind(binding, "sin", self._sin)
        bind(binding, "logits", self._logits, output=True, shape=(1, wanted, self.spec.vocab))
        if self._shows:
            bind(binding, "observed", self._which, shape=(shown,))
        for layer in range(self.spec.layers):
            for index, name in enumerate(("key", "value")):
                stored = kv.array[index, layer]
                bind(binding, f"past_{name}.{layer}", stored, shape=(1, *stored.shape))
                bind(binding, f"{name}.{layer}", stored, shape=(1, *stored.shape), output=True)
                if kv.dtype in LARGEST:
                    scales = kv.scales[index, layer]
                    bind(binding, f"{name}_scales.{layer}", scales, shape=(1, *scales.shape))
            if self._shows:
                bind(binding, f"qkv.{layer}", self._qkv[layer], shape=(1, shown, self._qkv.shape[-1]), output=True)
        return binding

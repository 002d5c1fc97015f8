"""The llama.cpp engine: tokens in, logits out, rows kept or forgotten.

Nothing here may let llama.cpp abort the process: it asserts on more outputs than it reserved, tokens outside the
vocabulary, and full caches, so all of that is checked before every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from edge.backends.base import (
    EngineConfig,
    KVState,
    check_range,
    check_rows,
    check_state,
    check_tokens,
    state_key,
)
from edge.backends.llamacpp import CAPABILITIES, KV_VALUE_BYTES, NAME, allocated_rows
from edge.backends.llamacpp.library import LOG, library
from edge.errors import EngineError, InputError, UnsupportedError
from edge.gguf_file import GGUFFile
from edge.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

_GGML_TYPE = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_LOAD_PRIVATE, _LOAD_MAPPED = 0, 1  # llama_load_mode: read into memory, or map the file
_SEQUENCE, _SPARE = 0, 1  # the second is in use only while rows are saved or come back


def _magnified(file: GGUFFile) -> bool:
    """RoPE that multiplies keys as it turns them: llama.cpp would do so again whenever it shifts them."""
    scaling = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type")
    return scaling in ("yarn", "longrope") or "rope_factors_long.weight" in file.tensors


class LlamaCppKV:
    """KVCache protocol over llama.cpp's unified cache; rows are counted in order of their positions."""

    def __init__(
        self,
        low_level: Any,
        context: Any,
        file: GGUFFile,
        spec: ModelSpec,
        config: EngineConfig,
        settle: Callable[[], None],
    ):
        self._lib, self._context = low_level, context
        self._memory = low_level.llama_get_memory(context)
        self._can_shift = bool(low_level.llama_memory_can_shift(self._memory)) and not _magnified(file)
        self._settle = settle
        self.key = state_key(NAME, file, spec, config)
        self.capacity = config.capacity
        self.nbytes = int(allocated_rows(config.capacity) * spec.kv_values_per_row * KV_VALUE_BYTES[config.kv_dtype])
        self._positions = np.zeros(config.capacity + 1, np.int32)  # one more for `_settle`
        self._length = 0
        self.next_position = 0
        self._shift_pending = False
        self.closed = False

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")

    @property
    def length(self) -> int:
        return self._length

    @property
    def free(self) -> int:
        return self.capacity - self.length

    @property
    def positions(self) -> IntArray:
        return self._positions[: self._length]

    def appended(self, count: int) -> None:
        """Book rows that the engine has just run."""
        self._positions[self._length : self._length + count] = range(self.next_position, self.next_position + count)
        self._length += count
        self.next_position += count
        self._shift_pending = False

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self._check_open()
        rows = check_rows(rows, self._length)
        if not close_gaps and self._length and (rows.size == 0 or rows[-1] != self._length - 1):
            raise UnsupportedError("llama.cpp cannot leave a gap before the next token: keep the newest row")
        if close_gaps and not self._can_shift:
            raise UnsupportedError("llama.cpp cannot shift the positions of this model: use --kv-policy full")
        evicted = np.ones(self._length, bool)
        evicted[rows] = False
        for first, last in _runs(np.flatnonzero(evicted), np.diff(np.flatnonzero(evicted)) != 1):
            self._lib.llama_memory_seq_rm(
                self._memory, _SEQUENCE, int(self._positions[first]), int(self._positions[last]) + 1
            )
        self._positions[: rows.size] = self._positions[rows]
        self._length = rows.size
        if close_gaps:
            self._renumber()

    def _renumber(self) -> None:
        """Give the rows positions 0…n-1. llama.cpp turns the whole cache whatever is moved, so the window moves
        down and positions stay small: its RoPE is float32, which loses position 10^7."""
        positions = self._positions[: self._length]
        moved = positions - np.arange(self._length, dtype=np.int32)
        for first, last in _runs(np.arange(self._length), np.diff(moved) != 0):
            if moved[first]:
                start, end = int(positions[first]), int(positions[last]) + 1
                self._lib.llama_memory_seq_add(self._memory, _SEQUENCE, start, end, -int(moved[first]))
                self._shift_pending = True
        self._positions[: self._length] = np.arange(self._length)
        self.next_position = self._length

    def truncate(self, length: int) -> None:
        self._check_open()
        if not 0 <= length <= self._length:
            raise InputError(f"cannot truncate {self._length} rows to {length}")
        if length == 0:
            self._lib.llama_memory_clear(self._memory, False)
            self._shift_pending = False
        elif length < self._length:
            self._lib.llama_memory_seq_rm(self._memory, _SEQUENCE, int(self._positions[length]), -1)
        self._length = length
        self.next_position = int(self._positions[length - 1]) + 1 if length else 0

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        self._check_open()
        last = check_range(first, last, self._length)
        if self._shift_pending:  # llama.cpp saves moved positions, but keys that it has not turned yet
            self._settle()
        positions = self._positions[first:last].copy()
        next_position = int(self._positions[last]) if last < self._length else self.next_position
        if first == last:
            return KVState(self.key, positions, next_position, b"")
        # It saves whole sequences only: for a moment, the rows are in a second one as well.
        self._lib.llama_memory_seq_cp(self._memory, _SEQUENCE, _SPARE, int(positions[0]), int(positions[-1]) + 1)
        try:
            size = self._lib.llama_state_seq_get_size(self._context, _SPARE)
            data = np.empty(size, np.uint8)
            if self._lib.llama_state_seq_get_data(self._context, _bytes_of(data), size, _SPARE) != size:
                raise EngineError(f"llama.cpp could not save its state: {LOG.reason()}")
        finally:
            self._lib.llama_memory_seq_rm(self._memory, _SPARE, -1, -1)
        return KVState(self.key, positions, next_position, data.data)

    def append(self, state: KVState) -> None:
        self._check_open()
        check_state(state, self, self.next_position)
        if state.positions.size == 0:
            return
        if self._shift_pending:
            self._settle()  # it would turn the new rows as well
        first, last = self._length, self._length + state.positions.size
        data = np.frombuffer(state.data, np.uint8)
        try:
            taken = self._lib.llama_state_seq_set_data(self._context, _bytes_of(data), data.size, _SPARE)
            if taken != data.size or not taken:
                raise InputError("the saved KV rows are damaged")
            self._lib.llama_memory_seq_cp(self._memory, _SPARE, _SEQUENCE, -1, -1)
        finally:
            self._lib.llama_memory_seq_rm(self._memory, _SPARE, -1, -1)
        self._positions[first:last] = state.positions
        self._length, self.next_position = last, state.next_position


class LlamaCppEngine:
    """Engine protocol over llama.cpp's low-level API. Raises ModelFormatError or UnsupportedError at load."""

    capabilities = CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> None:
        self.spec, self.config = spec, config
        if config.kv_dtype.startswith("q") and spec.head_dim % 64:  # llama.cpp crashes when it shifts smaller heads
            raise UnsupportedError(f"{config.kv_dtype} KV rows need a head size divisible by 64, not {spec.head_dim}")
        self._lib: Any = library()
        self._model = self._context = self._batch = None
        try:
            self._model = self._load_model(file, progress)
            self._context = self._make_context()
        except BaseException:
            self.close()
            raise
        self._batch = self._lib.llama_batch_init(config.chunk, 0, 1)
        self._tokens, self._batch_positions, self._wanted = self._batch_arrays()
        self._views: dict[int, FloatArray] = {}
        self._kv = LlamaCppKV(self._lib, self._context, file, spec, config, self._settle)

    @property
    def kv(self) -> LlamaCppKV:
        return self._kv

    def forward(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        chunk = self.config.chunk
        for start in range(0, tokens.size, chunk):
            self._decode(tokens[start : start + chunk], every=False)
        return self._logits(1).reshape(-1)

    def forward_all(self, tokens: IntArray) -> FloatArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free)
        logits = np.empty((tokens.size, self.spec.vocab), np.float32)
        step = min(self.config.logits_rows, self.config.chunk)
        for start in range(0, tokens.size, step):
            part = tokens[start : start + step]
            self._decode(part, every=True)
            logits[start : start + part.size] = self._logits(part.size)
        return logits

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if hasattr(self, "_kv"):
            self._kv.closed = True
        if self._batch is not None:
            self._lib.llama_batch_free(self._batch)
        if self._context is not None:
            self._lib.llama_free(self._context)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        self._batch = self._context = self._model = None

    def __del__(self) -> None:
        if getattr(self, "_lib", None) is not None:
            self.close()

    def _load_model(self, file: GGUFFile, progress: Callable[[float], None] | None) -> Any:
        def report(fraction: float, _user_data: Any) -> bool:
            try:
                if progress:
                    progress(fraction)
            except KeyboardInterrupt:
                LOG.interrupted = True
            return not LOG.interrupted  # False makes llama.cpp stop loading

        lib, parameters = self._lib, self._lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = self.config.repack
        # Repacked from a mapping, the weights would be resident twice; read privately, each tensor is there once.
        parameters.load_mode = _LOAD_PRIVATE if self.config.repack else _LOAD_MAPPED
        callback = lib.llama_progress_callback(report)
        parameters.progress_callback = callback
        LOG.lines.clear()
        LOG.interrupted = False
        model = lib.llama_model_load_from_file(str(file.path).encode(), parameters)
        if LOG.interrupted:
            if model:
                lib.llama_model_free(model)
            raise KeyboardInterrupt
        if not model:
            raise UnsupportedError(f"{file.path}: llama.cpp cannot load it ({LOG.reason()})")
        return model

    def _make_context(self) -> Any:
        lib, config = self._lib, self.config
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = allocated_rows(config.capacity)
        parameters.n_batch = parameters.n_ubatch = config.chunk
        parameters.n_seq_max, parameters.kv_unified = 2, True
        parameters.n_outputs_max = max(2, config.logits_rows)  # one per sequence; more outputs than this would abort
        parameters.n_threads = parameters.n_threads_batch = config.threads
        parameters.type_k = parameters.type_v = _GGML_TYPE[config.kv_dtype]
        parameters.flash_attn_type = int(config.kv_dtype != "f32")
        parameters.no_perf = True
        parameters.offload_kqv = parameters.op_offload = False
        context = lib.llama_init_from_model(self._model, parameters)
        if not context:
            raise UnsupportedError(f"llama.cpp cannot make a context for this model ({LOG.reason()})")
        return context

    def _batch_arrays(self) -> tuple[IntArray, IntArray, Any]:
        """NumPy views of the batch's C arrays; the sequence fields never change."""
        batch, size = self._batch, self.config.chunk
        assert batch is not None
        for index in range(size):
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = _SEQUENCE
        view = np.ctypeslib.as_array
        return view(batch.token, (size,)), view(batch.pos, (size,)), view(batch.logits, (size,))

    def _decode(self, tokens: IntArray, *, every: bool) -> None:
        if self._batch is None:
            raise EngineError("the engine is closed")
        count, position = tokens.size, self._kv.next_position
        self._tokens[:count] = tokens
        self._batch_positions[:count] = range(position, position + count)
        self._wanted[:count] = every
        self._wanted[count - 1] = True
        self._batch.n_tokens = count
        status = self._lib.llama_decode(self._context, self._batch)
        if status != 0:
            raise EngineError(f"llama.cpp could not run {count} tokens (status {status}): {LOG.reason()}")
        self._kv.appended(count)

    def _logits(self, rows: int) -> FloatArray:
        """The last outputs, float32 [rows, vocab]: a view of llama.cpp's own buffer."""
        address = ctypes.addressof(self._lib.llama_get_logits(self._context).contents)
        if address not in self._views:
            buffer = (ctypes.c_float * (self.config.logits_rows * self.spec.vocab)).from_address(address)
            self._views = {address: np.ctypeslib.as_array(buffer).reshape(-1, self.spec.vocab)}
        return self._views[address][:rows]

    def _settle(self) -> None:
        """Make llama.cpp apply a pending shift: it does so only when it runs a token."""
        if self._kv.length == 0:
            return
        try:
            self._decode(np.zeros(1, np.int32), every=False)
        except EngineError:
            if self._kv.length < allocated_rows(self._kv.capacity):
                raise
            return  # no cell was free for the token, but llama.cpp turns the keys before it looks for one
        self._kv.truncate(self._kv.length - 1)


def _bytes_of(array: AnyArray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _runs(values: AnyArray, breaks: AnyArray) -> list[tuple[int, int]]:
    """First and last of each unbroken run of `values`; breaks[i] says that a run ends between i and i+1."""
    if values.size == 0:
        return []
    ends = np.flatnonzero(breaks)
    firsts, lasts = np.r_[0, ends + 1], np.r_[ends, values.size - 1]
    return [(int(values[first]), int(values[last])) for first, last in zip(firsts, lasts, strict=True)]

"""The llama.cpp engine: tokens in, logits out, rows kept or evicted.

llama.cpp aborts the process on more outputs than it reserved, on tokens outside the vocabulary, and on full caches, so
all of these are checked before every call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_lora, check_positions, check_tokens, check_whole, divide
from edge.backends.interrupts import interrupts_wait
from edge.backends.llamacpp import ENGINE, allocated_rows, check_observed, ignored_window
from edge.backends.llamacpp.batches import Batches, Run, runs_of
from edge.backends.llamacpp.kv import LlamaCppKV
from edge.backends.llamacpp.library import LOG, library
from edge.backends.llamacpp.parameters import context_parameters, model_parameters
from edge.backends.llamacpp.scores import Scores
from edge.devices.memory import release_free_memory
from edge.errors import EngineError, InputError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.adapters.lora import Lora
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.types import FloatArray, IntArray


class LlamaCppEngine:
    """The Engine protocol over llama.cpp's low-level API. Raises ModelFormatError or UnsupportedError at load."""

    capabilities = ENGINE.CAPABILITIES

    def __init__(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> None:
        self.spec, self.config = spec, config
        check_observed(config)
        if config.kv_dtype.startswith("q") and spec.head_dim % 64:  # llama.cpp crashes when it shifts smaller heads
            raise UnsupportedError(f"{config.kv_dtype} KV rows need a head size divisible by 64, not {spec.head_dim}")
        self._lib: Any = library()
        self._model: Any = None
        self._context: Any = None
        self._batches: Batches | None = None
        self._scores: Scores | None = None
        self._queries, self._votes = 0, False
        self._lora: list[tuple[Any, float]] = []  # adapters of the model, with their scales
        self._file = open(file.path, "rb")  # noqa: SIM115 (it stays open: llama.cpp has mapped it)
        self._file_size = os.fstat(self._file.fileno()).st_size
        try:
            self._load_model(file, progress)
            if 0 < spec.window < config.capacity and not self._lib.llama_model_n_swa(self._model):
                raise UnsupportedError(f"{config.capacity} KV rows are too many: {ignored_window(spec)}")
            if config.observes:
                self._scores = self._make_scores()
            self._make_context(config.capacity)
        except BaseException:
            self.close()
            raise
        self._batches = Batches(self._lib, self._model, config.chunk)
        self._views: dict[int, FloatArray] = {}
        self._kv = LlamaCppKV(
            self._lib, self._context, file, spec, config, self._settle, self._replace_context, self._scores
        )

    @property
    def kv(self) -> LlamaCppKV:
        return self._kv

    def observe(self, queries: int, *, votes: bool = False) -> None:
        """See ObservedEngine. Raises UnsupportedError if the engine was loaded without `EngineConfig.observes`."""
        if queries and self._scores is None:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self._queries, self._votes = queries, votes

    def forward(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        for run, _ in self._runs(tokens, self.config.chunk, given, places):
            self._decode(run, every=False)
        return self._logits(1).reshape(-1)

    def forward_all(self, tokens: IntArray, given: GivenRows | None = None, places: Places | None = None) -> FloatArray:
        logits = np.empty((len(tokens), self.spec.vocab), np.float32)
        for run, part in self._runs(tokens, min(self.config.logits_rows, self.config.chunk), given, places):
            self._decode(run, every=True)
            logits[part] = self._logits(run.tokens.size)
        return logits

    def _runs(
        self, tokens: IntArray, most: int, given: GivenRows | None, places: Places | None
    ) -> Iterator[tuple[Run, slice]]:
        """The batches of checked tokens, each made once those before it have run, and their parts of the tokens."""
        tokens = self._check(tokens, given)
        for start, stop, own in self._divide(tokens.size, most, places):
            for run in runs_of(tokens[start:stop], self._kv.next_position, given, own):
                yield run, slice(start + run.part.start, start + run.part.stop)

    def _divide(self, count: int, most: int, places: Places | None) -> Iterator[tuple[int, int, Places | None]]:
        if self.spec.network is None or places is None:
            if places is not None:
                raise UnsupportedError(f"edge does not know the positions of {self.spec.architecture}'s pictures")
            yield from ((start, min(start + most, count), None) for start in range(0, count, most))
            return
        for part, own in divide("llamacpp", self._kv, self.spec.network, count, most, places):
            yield part.start, part.stop, own

    def set_lora(self, lora: Lora | None) -> None:
        """See AdaptedEngine. Creates a new context, since llama.cpp reserves the adapters' graph at construction."""
        check_lora(lora, self.config)
        if self._batches is None:
            raise EngineError("the engine is closed")
        try:
            loaded = self._load_lora(lora) if lora else []
        except Exception:
            self.set_lora(None)
            raise
        before, self._lora = self._lora, loaded
        self._kv.replace_context()
        self._kv.lora = f" {lora.key}" if lora else ""
        for adapter, _ in before:
            self._lib.llama_adapter_lora_free(adapter)

    def _load_lora(self, lora: Lora) -> list[tuple[Any, float]]:
        loaded: list[tuple[Any, float]] = []
        for adapter, scale in zip(lora.adapters, lora.scales, strict=True):
            for pair in adapter.pairs.values():  # checks their values
                adapter.read(pair.a), adapter.read(pair.b)
            LOG.clear()
            with interrupts_wait():
                made = self._lib.llama_adapter_lora_init(self._model, os.fsencode(adapter.file.path))
            if not made:
                for each, _ in loaded:
                    self._lib.llama_adapter_lora_free(each)
                raise UnsupportedError(f"{adapter.file.path}: llama.cpp cannot load it ({LOG.reason()})")
            loaded.append((made, scale))
        return loaded

    def _check(self, tokens: IntArray, given: GivenRows | None) -> IntArray:
        tokens = check_tokens(tokens, self.spec.vocab, self._kv.free, given)
        check_positions(self.spec, self._kv.next_position + tokens.size)
        if self._kv.earliest > self._kv.length:
            raise InputError("the recurrent state of the appended rows is missing: append it first")
        return tokens

    def close(self) -> None:
        """Free everything; safe to call twice."""
        if hasattr(self, "_kv"):
            self._kv.closed = True
        if self._batches is not None:
            self._batches.close()
        if self._context is not None:
            self._lib.llama_free(self._context)
        if self._model is not None:
            self._lib.llama_model_free(self._model)
        if hasattr(self, "_file"):
            self._file.close()
        self._batches = self._context = self._model = None

    def __del__(self) -> None:
        if getattr(self, "_lib", None) is not None:
            self.close()

    def _load_model(self, file: GGUFFile, progress: Callable[[float], None] | None) -> None:
        failed: list[BaseException] = []

        def report(fraction: float, _user_data: Any) -> bool:
            try:
                if progress:
                    progress(fraction)
            except BaseException as error:  # it cannot pass through C code: it is raised below
                failed.append(error)
            return not failed and not arrived  # False makes llama.cpp stop loading

        lib, parameters = self._lib, model_parameters(self._lib, self.config)
        callback = lib.llama_progress_callback(report)
        parameters.progress_callback = callback
        while self._model is None:
            LOG.clear()
            with interrupts_wait() as arrived:
                self._model = lib.llama_model_load_from_file(os.fsencode(file.path), parameters)
            if failed:
                raise failed[0]
            if self._model is None and not arrived:  # otherwise a signal stopped it whose handler raised nothing
                raise UnsupportedError(f"{file.path}: llama.cpp cannot load it ({LOG.reason()})")

    def _make_scores(self) -> Scores:
        if self._lib.llama_model_n_swa(self._model) > 0:
            raise UnsupportedError(
                "llama.cpp keeps the rows of sliding windows in a cache of its own, where no policy can look: "
                "use --kv-policy=streaming"
            )
        return Scores(self._lib, self.spec.layers, allocated_rows(self.config.capacity))

    def _make_context(self, capacity: int) -> None:
        lib, parameters = self._lib, context_parameters(self._lib, self.config, capacity)
        if self._scores:
            parameters.cb_eval = self._scores.callback
        with interrupts_wait():  # its log calls Python
            self._context = lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise UnsupportedError(f"llama.cpp cannot make a context for this model ({LOG.reason()})")
        if self._lora:
            adapters = (lib.llama_adapter_lora_p_ctypes * len(self._lora))(*(each for each, _ in self._lora))
            scales = (ctypes.c_float * len(self._lora))(*(scale for _, scale in self._lora))
            if lib.llama_set_adapters_lora(self._context, adapters, len(self._lora), scales):
                raise UnsupportedError(f"llama.cpp cannot apply the adapters ({LOG.reason()})")

    def _replace_context(self, capacity: int) -> Any:
        """Replace the context by an empty one. The old one is freed first, so that the two never coexist."""
        self._views.clear()
        self._lib.llama_free(self._context)
        self._context = None
        release_free_memory()
        try:
            self._make_context(capacity)
        except BaseException:
            self.close()
            raise
        return self._context

    def _decode(self, run: Run, *, every: bool) -> None:
        """Run a batch and record its rows, or leave no rows if that fails."""
        if self._batches is None:
            raise EngineError("the engine is closed")
        if not self.config.repack:
            check_whole(self._file.name, os.fstat(self._file.fileno()).st_size, self._file_size)
        batch = self._batches.fill(run, every=every)
        with interrupts_wait():  # otherwise llama.cpp could hold rows that `_kv` does not count
            if run.whole:
                self._lib.llama_set_causal_attn(self._context, False)
            try:
                self._run_batch(batch, run)
            finally:
                if run.whole:
                    self._lib.llama_set_causal_attn(self._context, True)

    def _run_batch(self, batch: Any, run: Run) -> None:
        count, scores = run.tokens.size, self._scores
        if scores:
            scores.begin(min(self._queries, count), votes=self._votes, visible=self._kv.length + count)
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise EngineError(f"llama.cpp could not run {count} tokens (status {status}): {LOG.reason()}")
        try:
            cells = scores.finish() if scores else None
        except BaseException:
            self._kv.forget_last(int(run.numbers[0]))
            raise
        self._kv.appended(run.positions, cells)

    def _logits(self, rows: int) -> FloatArray:
        """The last outputs, float32 [rows, vocab]: a view of llama.cpp's own buffer."""
        address = ctypes.addressof(self._lib.llama_get_logits(self._context).contents)
        if address not in self._views:
            buffer = (ctypes.c_float * (self.config.logits_rows * self.spec.vocab)).from_address(address)
            self._views = {address: np.ctypeslib.as_array(buffer).reshape(-1, self.spec.vocab)}
        return self._views[address][:rows]

    def _settle(self) -> None:
        """Make llama.cpp apply a pending shift, by running a token that is then truncated."""
        network = self.spec.network
        if self._kv.length == 0 or (network and network.learned_positions):  # nothing is rotated
            return
        queries, self._queries = self._queries, 0
        try:
            (run,) = runs_of(np.zeros(1, np.int32), self._kv.next_position, None, None)
            self._decode(run, every=False)
        except EngineError:
            if self._kv.length < allocated_rows(self._kv.capacity):
                raise
            return  # no cell was free for the token, but llama.cpp rotates the keys before it looks for one
        finally:
            self._queries = queries
        self._kv.truncate(self._kv.length - 1)

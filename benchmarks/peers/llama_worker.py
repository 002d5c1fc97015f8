"""llama.cpp for `peers.py`: its C API through `llama_cpp`'s low-level module, without edge.

llama_worker.py serve  FILE THREADS CELLS [SEQUENCES]  with as many cells each
llama_worker.py start  FILE THREADS CELLS TUNED       one token after a 16-token text
llama_worker.py memory FILE THREADS CELLS TUNED N     N random tokens, the last 32 of them generated

Flash attention, f16 KV, repacked weights. TUNED=1 reads the file instead of mapping it (a mapped file and its repacked
copy are both resident) and reserves one row of logits; TUNED=0 leaves both as they are by default.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
from protocol import ANSWER_TOKENS, START_TEXT, Steps, Tokens, peak_memory, random_tokens, serve

_BATCH = 2048  # llama.cpp's own default
_READ = 0  # llama_load_mode: read the file instead of mapping it


def low_level() -> Any:
    """`llama_cpp.llama_cpp` without the package's `__init__`, which would cost llama.cpp 0.1 s and 11 MB."""
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.submodule_search_locations is not None
    parent = types.ModuleType("llama_cpp")
    parent.__path__ = list(found.submodule_search_locations)
    sys.modules["llama_cpp"] = parent
    library: Any = importlib.import_module("llama_cpp.llama_cpp")
    library.quiet = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(library.quiet, None)
    library.llama_backend_init()
    return library


class LlamaSteps(Steps):
    def __init__(self, path: str, threads: int, cells: int, tuned: bool = False, sequences: int = 1) -> None:
        lib = self._lib = low_level()
        model_parameters = lib.llama_model_default_params()
        parameters = lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = cells * sequences, sequences
        parameters.n_batch = _BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = 1
        parameters.no_perf = True
        if tuned:
            model_parameters.load_mode = _READ
            parameters.n_batch = 512
            parameters.n_outputs_max = 1
        self._batch, self._rows = int(parameters.n_batch), 0
        self._model = lib.llama_model_load_from_file(path.encode(), model_parameters)
        self._context = lib.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._memory = lib.llama_get_memory(self._context)
        self.vocabulary = lib.llama_model_get_vocab(self._model)
        self.vocab = lib.llama_vocab_n_tokens(self.vocabulary)
        self.version = f"llama-cpp-python {metadata.version('llama-cpp-python')}"

    def run(self, tokens: Tokens) -> npt.NDArray[Any]:
        for start in range(0, tokens.size, self._batch):
            part = tokens[start : start + self._batch]
            array = (ctypes.c_int32 * part.size)(*part.tolist())
            status = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(array, part.size))
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}")
        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, -1), (self.vocab,))

    def run_batch(self, tokens: Tokens) -> npt.NDArray[Any]:
        count = tokens.size
        self._decode(tokens, [self._rows] * count, range(count))
        self._rows += 1
        return np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (count, self.vocab))

    def fill_sequences(self, count: int, tokens: Tokens) -> None:
        self._lib.llama_memory_clear(self._memory, False)
        for number in range(count):
            self._decode(tokens, range(tokens.size), [number] * tokens.size)
        self._rows = tokens.size

    def _decode(self, tokens: Tokens, positions: Sequence[int], sequences: Sequence[int]) -> None:
        """One pass, at most a batch; logits after all of its tokens."""
        batch = self._lib.llama_batch_init(tokens.size, 0, 1)
        batch.n_tokens = tokens.size
        for index, (position, sequence) in enumerate(zip(positions, sequences, strict=True)):
            batch.token[index], batch.pos[index] = int(tokens[index]), position
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, 1
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def truncate(self, rows: int) -> None:
        if rows == 0:
            self._lib.llama_memory_clear(self._memory, False)
        else:
            self._lib.llama_memory_seq_rm(self._memory, 0, rows, -1)

    def encode(self, text: str) -> Tokens:
        data, ids = text.encode(), (ctypes.c_int32 * 256)()
        count = self._lib.llama_tokenize(self.vocabulary, data, len(data), ids, 256, True, True)
        return np.array(ids[:count], np.int32)

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = self._lib.llama_token_to_piece(self.vocabulary, token, buffer, 256, 0, True)
        return buffer.raw[:size]


def start(path: str, threads: int, cells: int, tuned: int) -> None:
    engine = LlamaSteps(path, threads, cells, bool(tuned))
    token = int(engine.run(engine.encode(START_TEXT)).argmax())
    print("TOKEN", repr(engine.piece(token).decode(errors="replace")), flush=True)


def memory(path: str, threads: int, cells: int, tuned: int, count: int) -> None:
    engine = LlamaSteps(path, threads, cells, bool(tuned))
    logits = engine.run(random_tokens(count - ANSWER_TOKENS, 1, engine.vocab))
    for _ in range(ANSWER_TOKENS):
        logits = engine.run(np.array([logits.argmax()], np.int32))
    print("PEAK", peak_memory(), flush=True)


def main(mode: str, path: str, threads: int, cells: int, *rest: int) -> None:
    if mode == "serve":
        serve(lambda: LlamaSteps(path, threads, cells, False, *rest))
    elif mode == "start":
        start(path, threads, cells, *rest)
    else:
        memory(path, threads, cells, *rest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))

"""The child process in which llama.cpp tries a header, since it may abort."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.llamacpp import KV_VALUE_BYTES
from edge.backends.llamacpp.engine import LlamaCppEngine
from edge.backends.llamacpp.library import LOG, library
from edge.backends.llamacpp.parameters import context_parameters, trial_parameters
from edge.backends.llamacpp.trial import CHUNKS, ROWS, try_header
from edge.devices.child import serve
from edge.devices.host import usable_cores
from edge.devices.memory import memory_use, release_free_memory
from edge.errors import UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.reader import read_spec

# Lines of llama.cpp's log; sizes are rounded to 0.01 MiB.
_CACHE = re.compile(r"llama_kv_cache: size = .*K \(\w+\): +([\d.]+) MiB, V \(\w+\): +([\d.]+) MiB")
_STATE = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB \( *(\d+) cells")
_COMPUTE = re.compile(r"compute buffer size = +([\d.]+) MiB")
_NO_DECODER = "llama.cpp runs it, but not to generate text token by token"
_BLOCK, _GAP = 16 << 20, 256 << 20  # bytes: below the size that is always mapped, and more than a context takes
_MIB, _ROUNDING = 1 << 20, 0.005 * (1 << 20)


class Listener:
    """Collects the log, and forwards it."""

    def __init__(self) -> None:
        self.text = ""

    def receive(self, level: int, text: bytes, user_data: Any) -> None:
        LOG.receive(level, text, user_data)
        self.text += text.decode(errors="replace")


def try_file(path: str) -> dict[str, Any]:
    """The fields of Trial. Raises UnsupportedError."""
    lib = library()
    with _listening(lib) as listener, _model(lib, path) as model:
        if lib.llama_model_has_encoder(model) or lib.llama_model_is_diffusion(model):
            raise UnsupportedError(f"{path}: {_NO_DECODER}")
        graph = [_bookkeeping(lib, model, chunk, path) for chunk in CHUNKS]
        flash, said = _count(lib, listener, model, "f16", path)
        plain, _ = _count(lib, listener, model, "f32", path)
        states = [(float(size) * _MIB + _ROUNDING) / int(cells) for size, cells in _STATE.findall(said)]
        return {
            "recurrent": bool(lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)),
            "can_shift": _can_shift(lib, model, path),
            "window": int(lib.llama_model_n_swa(model)),
            "state_bytes": sum(ceil(size) for size in states),
            "graph": graph,
            "flash": flash,
            "plain": plain,
        }


def run_passes(path: str) -> dict[str, Any]:
    """Run a chunk and a step. Raises EdgeError."""
    file = read_gguf(Path(path))
    spec = read_spec(file)
    try_header(file, spec)
    engine = LlamaCppEngine(file, spec, EngineConfig(ROWS[0], CHUNKS[1], "f16", usable_cores()))
    engine.forward(np.arange(CHUNKS[1], dtype=np.int32) % spec.vocab)
    engine.forward(np.zeros(1, np.int32))
    engine.close()
    return {}


@contextmanager
def _listening(lib: Any) -> Iterator[Listener]:
    listener = Listener()
    callback = lib.llama_log_callback(listener.receive)
    lib.llama_log_set(callback, None)
    try:
        yield listener
    finally:
        lib.llama_log_set(lib.edge_log_callback, None)


@contextmanager
def _model(lib: Any, path: str) -> Iterator[Any]:
    LOG.clear()
    model = lib.llama_model_load_from_file(os.fsencode(path), trial_parameters(lib, EngineConfig(1, 1, "f16", 1)))
    if not model:
        raise UnsupportedError(f"{path}: llama.cpp cannot load it ({LOG.reason()})")
    try:
        yield model
    finally:
        lib.llama_model_free(model)


def _bookkeeping(lib: Any, model: Any, chunk: int, path: str) -> int:
    """Bytes besides the buffers, for the graph of a pass. Each later pass may allocate it a second time."""
    _leave_gap()
    release_free_memory()
    before = memory_use().rss
    with _context(lib, model, EngineConfig(ROWS[0], chunk, "f16", 1), path):
        return 2 * max(0, memory_use().rss - before)


def _leave_gap() -> None:
    """Leave a gap in the heap, so that memory comes from there, as it may in the run: `calloc` clears memory from a
    gap, which makes it resident, unlike fresh memory from the system. Which of the two happens depends on all earlier
    frees."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    *gap, _ = [libc.malloc(ctypes.c_size_t(_BLOCK)) for _ in range(_GAP // _BLOCK + 1)]  # the last one closes it
    for block in gap:
        libc.free(ctypes.c_void_p(block))


def _count(lib: Any, listener: Listener, model: Any, kv_dtype: str, path: str) -> tuple[dict[str, Any], str]:
    """The fields of Counted, and the log of the largest context."""
    compute = []
    for rows in ROWS:
        sizes = []
        for chunk in CHUNKS:
            listener.text = ""
            with _context(lib, model, EngineConfig(rows, chunk, kv_dtype, 1), path):
                sizes.append(ceil(sum(float(size) * _MIB + _ROUNDING for size in _COMPUTE.findall(listener.text))))
        compute.append(sizes)
    row = sum(float(size) for both in _CACHE.findall(listener.text) for size in both) * _MIB / ROWS[-1]
    return {"row_values": round(row / KV_VALUE_BYTES[kv_dtype]), "compute": compute}, listener.text


def _can_shift(lib: Any, model: Any, path: str) -> bool:
    with _context(lib, model, EngineConfig(ROWS[0], 1, "f16", 1), path) as context:
        memory = lib.llama_get_memory(context)
        if not memory:
            raise UnsupportedError(f"{path}: {_NO_DECODER}")
        return bool(lib.llama_memory_can_shift(memory))


@contextmanager
def _context(lib: Any, model: Any, config: EngineConfig, path: str) -> Iterator[Any]:
    LOG.clear()
    context = lib.llama_init_from_model(model, context_parameters(lib, config, config.capacity))
    if not context:
        raise UnsupportedError(f"{path}: llama.cpp cannot make a context for this model ({LOG.reason()})")
    try:
        yield context
    finally:
        lib.llama_free(context)


if __name__ == "__main__":
    TRIALS = {"header": try_file, "passes": run_passes}
    serve(lambda request, say: TRIALS[request[0]](request[1]))

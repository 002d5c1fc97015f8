"""The child process that runs `llama_model_quantize`. It reports each tensor's type once written, and finally all of
them."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

import numpy as np

from edge.backends.llamacpp.library import LOG, library
from edge.converters.gguf.ggml import Request
from edge.devices.child import Say, serve
from edge.errors import EngineError

_TENSOR = re.compile(r"\[ *\d+/ *\d+\] (?P<name>.+?) +- \[.*?\], type = +(?P<old>\w+), ")
_NEW = re.compile(r"converting to (\w+) \.\.|MiB \((\w+)\)$")
_REASON = 200  # characters of llama.cpp's last words


class Listener:
    """Parser of llama.cpp's log, which arrives in pieces: a tensor, its type, its new type, its sizes."""

    def __init__(self, say: Say) -> None:
        self._say, self._name, self._type = say, "", ""
        self.types: dict[str, str] = {}

    def receive(self, level: int, text: bytes, user_data: Any) -> None:
        LOG.receive(level, text, user_data)
        said = text.decode(errors="replace").strip("\n")
        if tensor := _TENSOR.match(said + " "):
            self.finish()
            self._name, self._type = tensor["name"], tensor["old"]
        elif new := _NEW.search(said.strip()):
            self._type = new[1] or new[2]

    def finish(self) -> None:
        """Report the current tensor, which is complete when the next one or the end arrives."""
        if self._name:
            self.types[self._name] = self._type.upper()
            self._say({"name": self._name})
        self._name = ""


def quantize(request: Request, say: Say) -> dict[str, str]:
    """Quantize the file; return types by tensor name, in the order of writing. Raises EngineError with llama.cpp's
    reason."""
    lib, listener = library(), Listener(say)
    callback = lib.llama_log_callback(listener.receive)
    lib.llama_log_set(callback, None)
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype, parameters.pure = request.ftype, request.pure
    parameters.allow_requantize, parameters.dry_run = request.allow_requantize, request.dry_run
    parameters.nthread, parameters.max_buf_size = request.threads, request.slab
    if request.embedding is not None:
        parameters.token_embedding_type = request.embedding
    if request.head is not None:
        parameters.output_tensor_type = request.head
    kept = []
    if request.importance is not None:
        kept = list(np.load(request.importance).items())
        entries = (lib.llama_model_imatrix_data * (len(kept) + 1))()  # the last one, empty, ends the list
        for entry, (name, each) in zip(entries, kept, strict=False):
            entry.name, entry.size = name.encode(), each.size
            entry.data = each.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        parameters.imatrix = entries
    LOG.lines.clear()
    names = os.fsencode(request.source), os.fsencode(request.target)
    if lib.llama_model_quantize(*names, ctypes.byref(parameters)) != 0:
        reason = LOG.lines[-1] if LOG.lines else LOG.reason()
        raise EngineError(f"llama.cpp could not quantize {request.source}: {reason[:_REASON]}")
    listener.finish()
    return listener.types


if __name__ == "__main__":
    serve(lambda request, say: quantize(Request(**request), say))

"""ONNX Runtime's sessions: options for speed and size, and memory bound by pointer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.backends.onnx.providers import Provider, explained
from edge.errors import EngineError
from edge.model.parts.text import utf8_path
from edge.types import AnyArray


def open_session(
    graph: bytes | Path, folder: Path | None, provider: Provider, threads: int, *,
    entries: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Open a session.

    graph: a serialized model, whose weights lie in files of `folder`, or its file, beside which they lie. entries: of
    the session's configuration.

    Raises EngineError if it cannot load the model, InputError if the folder's path is not Unicode.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_mem_pattern = False  # it assumes one length of the input, and ours changes
    options.log_severity_level = 4
    # Where products of unsigned inputs and signed weights saturate (x86 without VNNI), use slower ones that do not.
    options.add_session_config_entry("session.x64quantprecision", "1")
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", utf8_path(folder))
    for name, value in (entries or {}).items():
        options.add_session_config_entry(name, value)
    given = utf8_path(graph) if isinstance(graph, Path) else graph
    with explained(f"{folder or provider.name}: ONNX Runtime cannot load it"), _without_output(provider):
        if provider.devices:
            options.add_provider_for_devices(list(provider.devices), dict(provider.options))
            session = onnxruntime.InferenceSession(given, options)
        else:
            session = onnxruntime.InferenceSession(given, options, providers=[provider.ort_name])
    if session.get_providers()[0] != provider.ort_name:  # ONNX Runtime falls back to the CPU silently
        raise EngineError(f"--provider={provider.name}: ONNX Runtime cannot use it here")
    return session


@contextmanager
def _without_output(provider: Provider) -> Iterator[None]:
    """Suppress a line that QNN's emulator writes to standard output on first use."""
    if not provider.emulated:
        yield
        return
    libc, kept = ctypes.CDLL(None), os.dup(1)
    libc.fflush(None)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
        libc.fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def bind(
    binding: Any, name: str, array: AnyArray, *, output: bool = False, shape: tuple[int, ...] | None = None
) -> None:
    """Bind an input or output of a session to the memory of an array, which must outlive the binding."""
    to = binding.bind_output if output else binding.bind_input
    to(name, "cpu", 0, array.dtype.type, list(array.shape if shape is None else shape), array.ctypes.data)

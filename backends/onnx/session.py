"""ONNX Runtime's sessions: options for speed and size, memory bound by pointer, errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.errors import EngineError, InputError
from edge.model.text import utf8_path
from edge.types import AnyArray

_PROVIDER = "ExecutionProvider"


def find_provider(name: str) -> str:
    """ONNX Runtime's name of an execution provider: `cpu` is CPUExecutionProvider. Raises InputError."""
    import onnxruntime

    available = {each.removesuffix(_PROVIDER).lower(): each for each in onnxruntime.get_available_providers()}
    if name.lower() not in available:
        raise InputError(f"--provider {name!r} is not available: choose {', '.join(sorted(available))}")
    return str(available[name.lower()])


def open_session(graph: bytes, folder: Path, provider: str, threads: int, trace: Path | None = None) -> Any:
    """graph: a serialized model, whose weights lie in files of `folder`. trace: the beginning of the names of the files
    into which ONNX Runtime writes the times of nodes.

    Raises EngineError if it cannot load the model, InputError if the folder's path is not Unicode.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_mem_pattern = False  # it assumes one length of the input, and ours changes
    options.log_severity_level = 4
    # Where products of unsigned inputs and signed weights saturate (x86 without VNNI), slower ones that do not.
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", utf8_path(folder))
    if trace:
        options.enable_profiling, options.profile_file_prefix = True, str(trace)
    with explained(f"{folder}: ONNX Runtime cannot load it"):
        return onnxruntime.InferenceSession(graph, options, providers=[provider])


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise ONNX Runtime's exceptions as EngineErrors."""
    try:
        yield
    except Exception as error:  # some of its errors are RuntimeErrors, the others share no base class
        if not (type(error) is RuntimeError or type(error).__module__.startswith("onnxruntime")):
            raise
        raise EngineError(f"{what} ({' '.join(str(error).split())[:300]})") from None


def bind(
    binding: Any, name: str, array: AnyArray, *, output: bool = False, shape: tuple[int, ...] | None = None
) -> None:
    """Let an input or output of a session lie in the memory of an array, which must outlive the binding."""
    to = binding.bind_output if output else binding.bind_input
    to(name, "cpu", 0, array.dtype.type, list(array.shape if shape is None else shape), array.ctypes.data)

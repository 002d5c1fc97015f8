"""llama.cpp's low-level C API, without the other imports of its Python package, and with its log captured."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from typing import Any

from edge.errors import MissingExtraError

_LOG_WARNING, _LOG_ERROR = 3, 4


class Log:
    """The last warnings and errors of llama.cpp, for our own error messages."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=8)

    def clear(self) -> None:
        self.lines.clear()

    def receive(self, level: int, text: bytes, _user_data: Any) -> None:
        if level in (_LOG_WARNING, _LOG_ERROR):
            self.lines.append(" ".join(text.decode("utf-8", errors="replace").split()))

    def reason(self) -> str:
        """The first warning or error of the last call."""
        return next((line for line in self.lines if line), "no reason given")


LOG = Log()


def is_installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def version() -> str:
    return metadata.version("llama-cpp-python")


@lru_cache(maxsize=1)
def library() -> Any:
    """The initialized module `llama_cpp.llama_cpp`. Raises MissingExtraError.

    The package's `__init__` imports jinja2, diskcache and the high-level classes, which take 11 MB of resident memory
    and 0.1 s. A stand-in for the package skips it. It is removed afterwards, so a later `import llama_cpp` elsewhere
    imports the whole package.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.submodule_search_locations is None:
        raise MissingExtraError("llama-cpp-python", "llamacpp")
    with _parent_stand_in("llama_cpp", list(spec.submodule_search_locations)):
        low_level: Any = importlib.import_module("llama_cpp.llama_cpp")
    low_level.edge_log_callback = low_level.llama_log_callback(LOG.receive)  # kept alive by the module
    low_level.llama_log_set(low_level.edge_log_callback, None)
    low_level.llama_backend_init()
    return low_level


@contextmanager
def _parent_stand_in(name: str, path: list[str]) -> Iterator[None]:
    if name in sys.modules:
        yield
        return
    parent = types.ModuleType(name)
    parent.__path__ = path
    sys.modules[name] = parent
    try:
        yield
    finally:
        del sys.modules[name]

"""Engines. Each is one module that follows `backends.base.Backend`; adding one means adding a line here."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from edge.backends.base import Backend
from edge.errors import InputError
from edge.gguf_file import GGUFFile
from edge.model import ModelSpec

_MODULES = {"tvm": "edge.backends.tvm", "llamacpp": "edge.backends.llamacpp", "reference": "edge.backends.reference"}
_DEFAULT = "llamacpp"  # what `auto` means


def backend_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def find_backend(name: str, file: GGUFFile, spec: ModelSpec) -> Backend:
    """The engine called `name` (or `auto`), installed and able to run this model.

    Raises InputError for unknown names, MissingExtraError, UnsupportedError.
    """
    module = _MODULES.get(_DEFAULT if name == "auto" else name)
    if module is None:
        raise InputError(f"unknown backend {name!r}: choose auto, {', '.join(_MODULES)}")
    backend = cast(Backend, import_module(module))
    backend.check_installed()
    backend.check_supported(file, spec)
    return backend

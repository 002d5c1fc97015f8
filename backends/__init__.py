"""Engines. Each is a folder with an `ENGINE`, a `backends.base.Backend`; adding one means adding a line here."""

from __future__ import annotations

import logging
from importlib import import_module

from edge.backends.base import Backend
from edge.errors import InputError, MissingExtraError, UnsupportedError, worded
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.model.tokens.tokenizer import check_known

_MODULES = {
    "cpu": "edge.backends.tvm",
    "llamacpp": "edge.backends.llamacpp",
    "onnx": "edge.backends.onnx",
    "gpu": "edge.backends.tvm.gpu",
    "reference": "edge.backends.reference",
}
_AUTO = ("cpu", "llamacpp")  # the order in which `auto` tries engines, the fastest first

_log = logging.getLogger("edge")


def backend_names() -> tuple[str, ...]:
    """Names of all engines, as `--backend` takes them."""
    return tuple(_MODULES)


def engine_named(name: str) -> Backend:
    """The engine of this name, installed or not."""
    engine: Backend = import_module(_MODULES[name]).ENGINE
    return engine


def engines_with(capability: str) -> list[str]:
    """Names of the engines with a capability."""
    return [name for name in _MODULES if getattr(engine_named(name).CAPABILITIES, capability)]


def find_backend(name: str, file: GGUFFile, spec: ModelSpec, kv_dtype: str | None = None) -> Backend:
    """The engine called `name`, installed and able to run this model; for `auto`, the first such engine.

    `auto` picks an engine that has `kv_dtype`, and logs a warning with the reason if it is not the first.
    Raises InputError for unknown names, MissingExtraError, UnsupportedError.
    """
    _check_reads(spec)
    if name != "auto":
        if name not in _MODULES:
            raise InputError(f"unknown backend {name!r}: choose auto, {', '.join(_MODULES)}")
        return _usable(name, file, spec)
    if file.folder is not None:
        return _usable(engines_with("folders")[0], file, spec)
    *better, last = _AUTO
    first: Backend | None = None
    for each in better:
        try:
            backend = _usable(each, file, spec)
        except (MissingExtraError, UnsupportedError) as error:
            if isinstance(error, MissingExtraError) and not _is_installed(last):
                raise  # the better of two engines to install
            how = ", more slowly" if spec.network else ""
            _log.warning("%s runs this model%s: %s", last, how, str(error).removesuffix(_instead(last)))
            continue
        if kv_dtype in (None, *backend.CAPABILITIES.kv_dtypes):
            return backend
        first = first or backend
    # The plan refuses options that no engine supports; its message names the engine that would have run.
    return first if first and kv_dtype not in engine_named(last).CAPABILITIES.kv_dtypes else _usable(last, file, spec)


def backend_elsewhere(name: str, file: GGUFFile, spec: ModelSpec, system: str) -> tuple[Backend, str]:
    """The engine that would run this model on another device, for its footprint; loads nothing. Also returns why `auto`
    does not pick the fastest engine; empty if it does.

    Raises InputError for unknown names, UnsupportedError if the engine cannot run the model or does not exist there.
    """
    _check_reads(spec)
    if name not in ("auto", *_MODULES):
        raise InputError(f"unknown backend {name!r}: choose auto, {', '.join(_MODULES)}")
    if file.folder is not None:
        return _usable(engines_with("folders")[0], file, spec), ""
    *better, last = _AUTO if name == "auto" else (name,)
    why = ""
    for each in better:
        try:
            _check_tokenizer(each, file)
            engine_named(each).check_elsewhere(file, spec, system)
            return engine_named(each), ""
        except UnsupportedError as error:
            why = why or str(error).removesuffix(_instead(last))
    engine_named(last).check_elsewhere(file, spec, system)
    _check_tokenizer(last, file)
    return engine_named(last), why


def _check_reads(spec: ModelSpec) -> None:
    """Refuse a model that hears as a whole; engines run its encoder and its decoder, each as a model of its own."""
    if spec.ears:
        raise UnsupportedError(
            f"{spec.name} hears: edge transcribe FILE -m MODEL is what runs it, and checks its memory"
        )


def _usable(name: str, file: GGUFFile, spec: ModelSpec) -> Backend:
    backend = engine_named(name)
    if file.folder is not None and not backend.CAPABILITIES.folders:
        others = engines_with("folders")[0]
        raise UnsupportedError(
            f"{file.folder} is a model in ONNX, which the {name} engine cannot run: use --backend={others}"
        )
    _check_tokenizer(name, file)
    backend.check_installed()
    backend.check_supported(file, spec)
    return backend


def _is_installed(name: str) -> bool:
    try:
        engine_named(name).check_installed()
    except MissingExtraError:
        return False
    return True


def _instead(name: str) -> str:
    """How errors advise another engine."""
    return worded(f": use --backend={name}")


def _check_tokenizer(name: str, file: GGUFFile) -> None:
    """Raise UnsupportedError if the engine needs edge's tokenizer, and edge does not know this model's. The outline of
    a model (`edge models --fits`) has none."""
    if engine_named(name).CAPABILITIES.any_tokenizer or "tokenizer.ggml.model" not in file.metadata:
        return
    try:
        check_known(file)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}: use --backend={engines_with('any_tokenizer')[0]}") from None
